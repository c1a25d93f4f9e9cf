"""The one door to JAX internals: every private import and every version test is in here.

What its files define without an underscore is used from here, `jax_compat.bind`.
"""

import jax

if jax.__version_info__ < (0, 10, 2):  # before anything below asks JAX for what it has not
    raise ImportError("it is too old")

from jaxamp.core.jax_compat.avals import *  # noqa: F403
from jaxamp.core.jax_compat.binding import *  # noqa: F403
from jaxamp.core.jax_compat.checkpoints import *  # noqa: F403
from jaxamp.core.jax_compat.checks import *  # noqa: F403
from jaxamp.core.jax_compat.derivative_rules import *  # noqa: F403
from jaxamp.core.jax_compat.lowering import *  # noqa: F403
from jaxamp.core.jax_compat.name_stacks import *  # noqa: F403
from jaxamp.core.jax_compat.release import *  # noqa: F403
from jaxamp.core.jax_compat.tracing import *  # noqa: F403
