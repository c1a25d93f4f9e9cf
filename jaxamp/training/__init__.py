"""Ready-made pieces of a training run: loss scales, gradients, optimizers of narrow parameters."""

from jaxamp.training.debug import Diagnosis as Diagnosis
from jaxamp.training.debug import debug_step as debug_step
from jaxamp.training.explain import Nonfinite as Nonfinite
from jaxamp.training.explain import explain_nonfinite as explain_nonfinite
from jaxamp.training.filtered import filter_grad as filter_grad
from jaxamp.training.filtered import filter_value_and_grad as filter_value_and_grad
from jaxamp.training.finite import all_finite as all_finite
from jaxamp.training.finite import first_nonfinite as first_nonfinite
from jaxamp.training.finite import nonfinite_index as nonfinite_index
from jaxamp.training.finite import select_tree as select_tree
from jaxamp.training.grads import Gradient as Gradient
from jaxamp.training.grads import clip_by_norm as clip_by_norm
from jaxamp.training.grads import grad as grad
from jaxamp.training.grads import value_and_grad as value_and_grad
from jaxamp.training.kahan import KahanState as KahanState
from jaxamp.training.kahan import with_kahan as with_kahan
from jaxamp.training.loss_scale import DynamicLossScale as DynamicLossScale
from jaxamp.training.loss_scale import LossScale as LossScale
from jaxamp.training.loss_scale import NoOpLossScale as NoOpLossScale
from jaxamp.training.loss_scale import StaticLossScale as StaticLossScale
from jaxamp.training.master_weights import MasterWeightsState as MasterWeightsState
from jaxamp.training.master_weights import with_master_weights as with_master_weights
from jaxamp.training.optax import LossScaleState as LossScaleState
from jaxamp.training.optax import SkipState as SkipState
from jaxamp.training.optax import skip_nonfinite as skip_nonfinite
from jaxamp.training.optax import with_loss_scale as with_loss_scale
from jaxamp.training.stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from jaxamp.training.stochastic_rounding import stochastic_round as stochastic_round
from jaxamp.training.stochastic_rounding import (
    with_stochastic_rounding as with_stochastic_rounding,
)
from jaxamp.training.transformation import apply_updates as apply_updates
