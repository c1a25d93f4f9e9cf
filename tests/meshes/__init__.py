"""Programs over the three types of mesh axes, and the contexts that lead from one to another."""
