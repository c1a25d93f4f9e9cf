"""Primitives that rewritten programs contain where JAX has none that fits."""
