"""Softmax attention as primitives of jaxamp, lowered to the fused kernel that a platform has."""
