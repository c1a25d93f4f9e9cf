"""The decision: in which precision each equation computes and each value is stored."""
