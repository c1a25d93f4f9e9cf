"""Effects of low precision on numbers: shadow runs, error statistics, the origin of a NaN."""
