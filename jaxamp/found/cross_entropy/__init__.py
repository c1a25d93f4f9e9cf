"""Losses over many words, computed in chunks of tokens so that no array holds all logits."""
