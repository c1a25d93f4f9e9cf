"""Primitives of quantized products, and their forms on each platform."""
