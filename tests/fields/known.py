"""Runs that are known to be wrong, by cause; one that passes must be taken off."""

CAUSES: dict[str, str] = {
    "kinks": "One ReLU changes its sign, or one place its cell; with a smooth function, or with "
    "arguments a little off, they hold.",
    "couplings": "The state of a flow is rounded between its maps; errors meet in the likelihood.",
    "scaling": "Vectors that scale a kernel by turns, reciprocals of products, are rounded.",
}
"""What is wrong, in a sentence for each cause."""

KNOWN: dict[str, tuple[str, ...]] = {
    "kinks": (
        "deformed_grid bf16 amp(grad)",
        "deformed_grid bf16 grad(amp)",
        "recurrent_flow f16 amp(grad)",
        "recurrent_flow f16 grad(amp)",
        "wavenet f16 amp(grad)",
        "wavenet f16 grad(amp)",
    ),
    "couplings": (
        "glow bf16 grad(amp)",
        "planar_flow bf16 amp(grad)",
        "planar_flow bf16 grad(amp)",
        "planar_flow f16 amp(grad)",
        "planar_flow f16 grad(amp)",
    ),
    "scaling": (
        "entropic_transport bf16 grad(amp)",
        "entropic_transport f16 grad(amp)",
    ),
}
"""For each cause the runs: program, format, order."""
