"""Conformance runs: `python -m tests.conformance --help`."""
