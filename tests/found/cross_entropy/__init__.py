"""Losses over large vocabularies found in float32 programs, and computed in chunks of tokens."""
