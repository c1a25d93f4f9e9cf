"""Steering XLA's fusion, layout and scheduling; precision does not depend on it."""
