"""Training programs as people write them, each with `amp` in every natural place."""
