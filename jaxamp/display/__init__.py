"""Screens of the results of `inspect`, `numerics` and `tools`: terminal and HTML page."""
