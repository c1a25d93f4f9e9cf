"""Models that nobody here wrote, from installed packages and unmodified.

`trained.py` has networks, where products dominate and mixed precision is to pay; `solved.py` has
solvers and samplers, which are to keep the accuracy that they are asked for.
"""
