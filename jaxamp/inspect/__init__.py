"""Seeing: what a policy does to a program, line by line, and how two policies differ.

Everything here reads the ``Plan``; nothing is decided again.
"""
