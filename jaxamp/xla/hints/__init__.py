"""Decide hints for XLA, equation by equation; none of them changes a precision."""
