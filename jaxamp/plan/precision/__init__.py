"""The decision: in which precision each value is computed, stored and read."""
