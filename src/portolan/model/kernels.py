"""Which kernel computes the experts and the attention: the one place that decides.

The choice follows the platform and static shapes, so a compiled program holds one kernel only.

| platform | experts | attention |
|---|---|---|
| cpu | large in float32: numpy's products; else grouped products | hand-written |
| cuda | grouped products | cuDNN for 16-bit floats and sizes that it takes, else hand-written |
| rocm | grouped products | hand-written |
| tpu | ragged products | hand-written |

Ragged products are for TPUs only: on CUDA, jaxlib 0.10.2 expands `jax.lax.ragged_dot` to all rows
times all experts (reported in marin #7012 and #9077), and on CPU too. The grouped products of
`experts` drop nothing either. `benchmarks/gpu_step.py` times both on the device at hand.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from portolan.model import (
    attention_flash,
    experts,
    experts_blas,
    experts_ragged,
    softmax_attention,
)
from portolan.model.tree import GatedMlp

BLAS_DTYPES = (jnp.float32, jnp.float64)
BLAS_MIN_FLOPS = 2**22
"""Of one product of one expert at the mean load. Below, numpy's calls cost more than they gain;
above, they are 0.85 to 1.9 times as fast, mostly 1.1 and more (LOG.md)."""
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
CUDNN_HEAD_STEP = 8
CUDNN_MAX_HEAD_SIZE = 128
"""Hopper and later take 256; 128 holds from Ampere on."""
CUDNN_LENGTH_STEP = 2
"""With a mask, in training."""

_assumed: ContextVar[str | None] = ContextVar("assumed_platform", default=None)


class ExpertKernel(NamedTuple):
    """`plan(experts [T, K], valid [T], E)` makes the dispatch that `apply(x, weights, experts,
    dispatch)` reads.

    With `reads_stack` it takes a `Stack` after the dispatch: the place of the values.
    """

    plan: Callable[..., Any]
    apply: Callable[..., jax.Array]
    reads_stack: bool = False


GROUPED = ExpertKernel(experts.plan_dispatch, experts.apply_experts)
SORTED = ExpertKernel(experts_blas.plan_sorted, experts_blas.apply_sorted, reads_stack=True)
RAGGED = ExpertKernel(experts_ragged.plan_dispatch, experts_ragged.apply_experts)


def platform() -> str:
    """`cpu`, `cuda`, `rocm` or `tpu`: of JAX's default backend, unless one is assumed."""
    if assumed := _assumed.get():
        return assumed
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "cuda" if "cuda" in get_backend().platform_version else "rocm"


@contextlib.contextmanager
def assume_platform(name: str) -> Iterator[None]:
    """Inside, programs are traced with the kernels of that platform, to compare them on one device.

    Wrap the first call of a jitted function: a program that is traced already stays as it is.
    """
    token = _assumed.set(name)
    try:
        yield
    finally:
        _assumed.reset(token)


def choose_experts(experts: GatedMlp, num_assignments: int) -> ExpertKernel:
    """The routed experts' kernel for matrices [E, R, F] and T * K assignments of tokens."""
    if platform() == "tpu":
        return RAGGED
    flops = 2 * num_assignments * math.prod(experts.gate.shape[1:]) // experts.gate.shape[0]
    on_host = platform() == jax.default_backend() == "cpu"
    if on_host and experts.gate.dtype in BLAS_DTYPES and flops >= BLAS_MIN_FLOPS:
        return SORTED
    return GROUPED


def choose_attention(dtype: jnp.dtype, head_size: int, length: int) -> Callable[..., jax.Array]:
    """`dot_product(q, k, v, segments, window, scale)` for heads and rows of these sizes."""
    fits = (
        dtype in CUDNN_DTYPES
        and head_size % CUDNN_HEAD_STEP == 0
        and head_size <= CUDNN_MAX_HEAD_SIZE
        and length % CUDNN_LENGTH_STEP == 0
    )
    if platform() == "cuda" and fits:
        return attention_flash.dot_product
    return softmax_attention.dot_product
