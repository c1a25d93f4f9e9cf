"""Jaxprs as data: what they nest, how to walk one, what in them is dead, names and hashes."""
