"""Attention found in float32 programs, and replaced by fused kernels."""
