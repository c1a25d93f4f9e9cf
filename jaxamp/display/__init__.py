"""Screens of values: at a terminal, as a page, in a notebook."""
