"""Half-precision training for JAX as composable Optax transforms."""

from .scaling import scale_loss as scale_loss, value_and_grad as value_and_grad
from .averaging import pmean_gradients as pmean_gradients
from .loss_scale import dynamic_loss_scale as dynamic_loss_scale, static_loss_scale as static_loss_scale
from .clipping import clip_by_global_norm_fp32 as clip_by_global_norm_fp32, grad_global_norm as grad_global_norm
from .skipping import apply_gradients as apply_gradients, skip_if_nonfinite as skip_if_nonfinite
from .master_weights import master_weights as master_weights
from .zero import distributed as distributed
from .placing import zero_shardings as zero_shardings
from .recipe import mixed_precision as mixed_precision
from .optimizers import bert_adam as bert_adam
from .reading import (
    loss_scale_of as loss_scale_of,
    metrics_of as metrics_of,
    stuck as stuck,
    underflow_by_leaf as underflow_by_leaf,
)
from .report import nonfinite_report as nonfinite_report
from . import migrate as migrate

__version__ = "0.1.0"
