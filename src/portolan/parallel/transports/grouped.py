"""All experts on every device, nothing dropped, no collective (parallel.md 6.1)."""

import jax
from jax.ad_checkpoint import checkpoint_name

from portolan.model.kernels import choose_experts
from portolan.model.router import SAVED_ROUTING
from portolan.model.tree import GatedMlp


def apply_grouped(
    x_TR: jax.Array,
    weights_TK: jax.Array,
    experts_TK: jax.Array,
    valid_T: jax.Array,
    experts: GatedMlp,
) -> jax.Array:
    """y [T, R] by the kernel that one device would use."""
    kernel = choose_experts(experts, experts_TK.size)
    dispatch = kernel.plan(experts_TK, valid_T, experts.gate.shape[0])
    dispatch = checkpoint_name(dispatch, SAVED_ROUTING)
    return kernel.apply(x_TR, weights_TK, experts, dispatch)
