"""Analyses that find values for which a narrow format would lose too much accuracy.

Each finds one numerical hazard (cancellation, a singularity, an unstable top-k, ...); `hazards.py`
runs all of them.
"""
