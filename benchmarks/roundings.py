"""XLA's flags under which every rounding of a program takes place.

They must be set before JAX starts, so this module does not import it.
"""

NO_EXCESS = "--xla_allow_excess_precision=false"
"""Otherwise XLA may skip roundings to bfloat16."""
NO_FUSED_PRODUCTS = "--xla_cpu_experimental_ynn_fusion_type="
"""The same, of products with what surrounds them, on the CPU; jaxlib 0.4 does not know it."""

FLAGS = (NO_EXCESS, NO_FUSED_PRODUCTS)
