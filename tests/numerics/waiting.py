"""What jaxamp still gets wrong, with the reason: each entry has to fail until it is mended."""

HOSTILE: dict[tuple[str, str], str] = {}
"""By case and low format."""

ISLANDS: dict[tuple[str, str, str], str] = {}
"""By island, low format and quantity."""
