"""Attention found in a program, as one equation of it."""
