"""Primitives that tell XLA what was decided, and how they are lowered."""
