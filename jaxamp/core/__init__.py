"""Tables that everything rests on: float formats, kinds of primitives, guards, JAX internals."""
