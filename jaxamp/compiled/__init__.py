"""Estimating: what a policy would give on a chip that is not there.

The vendors' compilers run on any machine; only running needs the chip. What they emit is fact: the
bytes that kernels move, the temporary memory, the kernels, the dots. The time is a model.
"""
