"""Other libraries' objects: each module here is imported only where its library is already."""

import importlib

from jaxamp.core.adapters import register_adapter

# Given as functions, so that importing jaxamp imports none of the libraries.
register_adapter("equinox", lambda: importlib.import_module("jaxamp.interop.equinox"))
register_adapter("flax.nnx", lambda: importlib.import_module("jaxamp.interop.flax_nnx"))
register_adapter("numpyro", lambda: importlib.import_module("jaxamp.interop.numpyro"))
