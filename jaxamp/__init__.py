"""jaxamp: automatic mixed precision for JAX.

>>> import jax.numpy as jnp
>>> import jaxamp
>>> @jaxamp.amp
... def layer(x, w):
...     return jnp.tanh(x @ w)
>>> layer(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
(2, 4)
"""

from jaxamp.errors import JaxAmpError as JaxAmpError
from jaxamp.errors import NotCallableError as NotCallableError
from jaxamp.errors import OutputError as OutputError
from jaxamp.errors import PolicyError as PolicyError
from jaxamp.errors import RewriteError as RewriteError
from jaxamp.errors import RuleError as RuleError
from jaxamp.errors import UnknownPrimitiveError as UnknownPrimitiveError
from jaxamp.errors import UnsupportedPrecisionError as UnsupportedPrecisionError
from jaxamp.formats import CastConfig as CastConfig
from jaxamp.formats import Precision as Precision
from jaxamp.policy import Guard as Guard
from jaxamp.policy import PrecisionPolicy as PrecisionPolicy
from jaxamp.regions import keep_precision as keep_precision
from jaxamp.rules import EquationView as EquationView
from jaxamp.rules import Rule as Rule
from jaxamp.taxonomy import OpKind as OpKind
from jaxamp.semantic import DTypeish as DTypeish
from jaxamp.semantic import SemanticDType as SemanticDType
from jaxamp.semantic import cast_floating as cast_floating
from jaxamp.semantic import current_policy as current_policy
from jaxamp.semantic import in_compute_dtype as in_compute_dtype
from jaxamp.semantic import policy_scope as policy_scope
from jaxamp.semantic import resolve_dtype as resolve_dtype
from jaxamp.taxonomy import Trait as Trait
from jaxamp.taxonomy import register_op_kind as register_op_kind
from jaxamp.transform import amp as amp
from jaxamp.transform import plan_of as plan_of
