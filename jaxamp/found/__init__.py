"""Regions of a program that are replaced whole: how they are looked for, and emitted."""
