"""What jaxamp still gets wrong, with the reason: each entry has to fail until it is mended."""

HOSTILE: dict[tuple[str, str], str] = {
    ("welford", "f16"): "a running variance through two products loses a few ulps",
}
"""By case and low format."""

_TWO_COTANGENTS = "under vmap two cotangents of one narrow value are rounded before they meet"

ISLANDS: dict[tuple[str, str, str], str] = {
    ("equinox.BatchNorm", low, "grad(amp)"): _TWO_COTANGENTS for low in ("bf16", "f16")
}
"""By island, low format and quantity."""
