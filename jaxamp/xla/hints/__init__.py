"""Decide what XLA is told, equation by equation; none of it changes a precision."""
