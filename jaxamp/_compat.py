"""The one door to JAX internals: every private import and every version test lives here."""
