"""Products whose operands are not rounded, because other terms nearly cancel their results."""
