"""Analyses of where values come from, what they are used for, and which are fused."""
