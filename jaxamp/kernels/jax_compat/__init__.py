"""JAX internals that kernels need: private imports and version tests, as in `core/jax_compat`."""
