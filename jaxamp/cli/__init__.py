"""The command line, ``python -m jaxamp``."""
