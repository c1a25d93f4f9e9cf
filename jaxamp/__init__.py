"""jaxamp: automatic mixed precision for JAX.

>>> import jax.numpy as jnp
>>> import jaxamp
>>> @jaxamp.amp
... def layer(x, w):
...     return jnp.tanh(x @ w)
>>> layer(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
(2, 4)
"""

__version__ = "0.1.0"  # the build reads it

import jaxamp.display
import jaxamp.interop  # noqa: F401  registers the adapters of other libraries
from jaxamp.core.formats import CastConfig as CastConfig
from jaxamp.core.formats import Precision as Precision
from jaxamp.core.guards import Guard as Guard
from jaxamp.core.keep_precision import keep_precision as keep_precision
from jaxamp.core.taxonomy import OpKind as OpKind
from jaxamp.core.taxonomy import Trait as Trait
from jaxamp.core.taxonomy import register_op_kind as register_op_kind
from jaxamp.errors import ImmutableError as ImmutableError
from jaxamp.errors import InspectionError as InspectionError
from jaxamp.errors import JaxAmpError as JaxAmpError
from jaxamp.errors import KernelError as KernelError
from jaxamp.errors import NotCallableError as NotCallableError
from jaxamp.errors import OutputError as OutputError
from jaxamp.errors import PolicyError as PolicyError
from jaxamp.errors import RewriteError as RewriteError
from jaxamp.errors import RuleError as RuleError
from jaxamp.errors import ServingError as ServingError
from jaxamp.errors import TrainingError as TrainingError
from jaxamp.errors import TuningError as TuningError
from jaxamp.errors import UnknownPrimitiveError as UnknownPrimitiveError
from jaxamp.errors import UnsupportedPrecisionError as UnsupportedPrecisionError
from jaxamp.inspect.diff import Difference as Difference
from jaxamp.inspect.diff import diff as diff
from jaxamp.inspect.explain import Explanation as Explanation
from jaxamp.inspect.explain import explain as explain
from jaxamp.inspect.fp8_products import Lowering as Lowering
from jaxamp.inspect.fp8_products import verify_lowering as verify_lowering
from jaxamp.inspect.report import Report as Report
from jaxamp.inspect.report import report as report
from jaxamp.lowp import ScaledArray as ScaledArray
from jaxamp.lowp import dequantize as dequantize
from jaxamp.lowp import quantize as quantize
from jaxamp.numerics.probe import probe as probe
from jaxamp.numerics.probe_report import Measured as Measured
from jaxamp.numerics.probe_report import ProbeReport as ProbeReport
from jaxamp.plan import Decision as Decision
from jaxamp.plan import Plan as Plan
from jaxamp.policy.context import current_policy as current_policy
from jaxamp.policy.context import policy_scope as policy_scope
from jaxamp.policy.dtype_roles import DTypeish as DTypeish
from jaxamp.policy.dtype_roles import SemanticDType as SemanticDType
from jaxamp.policy.dtype_roles import cast_floating as cast_floating
from jaxamp.policy.dtype_roles import in_compute_dtype as in_compute_dtype
from jaxamp.policy.dtype_roles import resolve_dtype as resolve_dtype
from jaxamp.policy.policy import PrecisionPolicy as PrecisionPolicy
from jaxamp.policy.rules import EquationView as EquationView
from jaxamp.policy.rules import Rule as Rule
from jaxamp.policy.scaling import Scaling as Scaling
from jaxamp.run.amp import AmpFunction as AmpFunction
from jaxamp.run.amp import amp as amp
from jaxamp.run.amp import plan_of as plan_of
from jaxamp.tools.estimate import Estimate as Estimate
from jaxamp.tools.estimate import estimate as estimate
from jaxamp.tools.serving.serve import Loaded as Loaded
from jaxamp.tools.serving.serve import Served as Served
from jaxamp.tools.serving.serve import load_served as load_served
from jaxamp.tools.serving.serve import serve as serve
from jaxamp.tools.tune import Tuning as Tuning
from jaxamp.tools.tune import tune as tune
from jaxamp.training import Diagnosis as Diagnosis
from jaxamp.training import DynamicLossScale as DynamicLossScale
from jaxamp.training import Gradient as Gradient
from jaxamp.training import Nonfinite as Nonfinite
from jaxamp.training import NoOpLossScale as NoOpLossScale
from jaxamp.training import StaticLossScale as StaticLossScale
from jaxamp.training import all_finite as all_finite
from jaxamp.training import apply_updates as apply_updates
from jaxamp.training import debug_step as debug_step
from jaxamp.training import explain_nonfinite as explain_nonfinite
from jaxamp.training import filter_grad as filter_grad
from jaxamp.training import filter_value_and_grad as filter_value_and_grad
from jaxamp.training import first_nonfinite as first_nonfinite
from jaxamp.training import grad as grad
from jaxamp.training import nonfinite_index as nonfinite_index
from jaxamp.training import select_tree as select_tree
from jaxamp.training import skip_nonfinite as skip_nonfinite
from jaxamp.training import stochastic_round as stochastic_round
from jaxamp.training import value_and_grad as value_and_grad
from jaxamp.training import with_kahan as with_kahan
from jaxamp.training import with_loss_scale as with_loss_scale
from jaxamp.training import with_master_weights as with_master_weights
from jaxamp.training import with_stochastic_rounding as with_stochastic_rounding
from jaxamp.training.auto_policy import AutoChoice as AutoChoice
from jaxamp.training.auto_policy import auto_policy as auto_policy
