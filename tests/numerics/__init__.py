"""Hostile numerics: what mixed precision may cost, measured against rounding the products alone."""
