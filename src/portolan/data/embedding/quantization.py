"""Vectors of unit length as int8: 1 byte a coordinate at a mean cosine of 0.99976."""

import math

import numpy as np
from numpy.typing import NDArray

CLIP_AT_1024 = 0.3


def step_size(dimension: int) -> float:
    """Value of one int8 step: c/127 with c = 0.3 sqrt(1024/d), at most 1."""
    return min(1.0, CLIP_AT_1024 * math.sqrt(1024 / dimension)) / 127


def quantize(vectors: NDArray[np.floating]) -> NDArray[np.int8]:
    """Normalise float[n, d] and round to int8[n, d]; a zero vector stays zero."""
    wide = np.asarray(vectors, np.float64)
    norms = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    norms[norms == 0] = 1.0
    steps = np.rint(wide / norms[:, None] / step_size(wide.shape[1]))
    return np.clip(steps, -127, 127).astype(np.int8)


def dequantize(codes: NDArray[np.int8]) -> NDArray[np.float64]:
    """Vectors float64[n, d] of int8 codes."""
    return codes.astype(np.float64) * step_size(codes.shape[1])
