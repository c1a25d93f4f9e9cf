"""Ready-made pieces of a training run: loss scales, gradients, optimizers of narrow parameters."""

import importlib

from jaxamp.core.adapters import register_adapter
from jaxamp.numerics.nonfinite import Nonfinite as Nonfinite
from jaxamp.training.debug import Diagnosis as Diagnosis
from jaxamp.training.debug import debug_step as debug_step
from jaxamp.training.debug import explain_nonfinite as explain_nonfinite
from jaxamp.training.filtered import scaled_filter_grad as scaled_filter_grad
from jaxamp.training.filtered import scaled_filter_value_and_grad as scaled_filter_value_and_grad
from jaxamp.training.grads import Gradient as Gradient
from jaxamp.training.grads import scaled_grad as scaled_grad
from jaxamp.training.grads import scaled_value_and_grad as scaled_value_and_grad
from jaxamp.training.loss_scale import DynamicLossScale as DynamicLossScale
from jaxamp.training.loss_scale import LossScale as LossScale
from jaxamp.training.loss_scale import NoOpLossScale as NoOpLossScale
from jaxamp.training.loss_scale import StaticLossScale as StaticLossScale
from jaxamp.training.low_params import KahanState as KahanState
from jaxamp.training.low_params import MasterWeightsState as MasterWeightsState
from jaxamp.training.low_params import StochasticRoundingState as StochasticRoundingState
from jaxamp.training.low_params import stochastic_round as stochastic_round
from jaxamp.training.low_params import with_kahan as with_kahan
from jaxamp.training.low_params import with_master_weights as with_master_weights
from jaxamp.training.low_params import with_stochastic_rounding as with_stochastic_rounding
from jaxamp.training.optax import LossScaleState as LossScaleState
from jaxamp.training.optax import SkipState as SkipState
from jaxamp.training.optax import skip_nonfinite as skip_nonfinite
from jaxamp.training.optax import with_loss_scale as with_loss_scale
from jaxamp.training.trees import all_finite as all_finite
from jaxamp.training.trees import first_nonfinite as first_nonfinite
from jaxamp.training.trees import nonfinite_index as nonfinite_index
from jaxamp.training.trees import select_tree as select_tree

register_adapter("jmp", lambda: importlib.import_module("jaxamp.training.jmp_loss_scale"))
