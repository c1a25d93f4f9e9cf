"""What jaxamp still gets wrong, with the reason: each entry has to fail until it is mended."""

HOSTILE: dict[tuple[str, str], str] = {
    ("welford", "f16"): "a running variance through two products loses a few ulps",
}
"""By case and low format."""

ISLANDS: dict[tuple[str, str, str], str] = {}
"""By island, low format and quantity."""
