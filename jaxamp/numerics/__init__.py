"""What low precision does to numbers: shadow runs, error statistics, the origin of a NaN."""
