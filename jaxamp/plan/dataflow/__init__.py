"""Facts about every value, found by sweeps: provenance, uses, fusion regions, exactness."""
