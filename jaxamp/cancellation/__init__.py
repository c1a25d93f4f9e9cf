"""Products of which others leave so little that they are not to be rounded: what cancels them."""
