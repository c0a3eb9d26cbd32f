"""Initial parameters. Each leaf draws from its own stream, whatever else the tree holds.

Matrices: init_std * TruncatedNormal(-3, 3); gains 1; head gates 0; convolutions the identity.
Drawn with NumPy: compiling the same draws for every shape took the CPU 22-28 s.
"""

import zlib

import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr, ndtri

from portolan.model.tree import Params, abstract, flatten_paths, unflatten_paths
from portolan.shapes import ModelConfig

TRUNCATION = 3.0
"""Matrices are drawn within this many standard deviations."""
LARGEST_SEED = 2**64 - 1


def init(config: ModelConfig, seed: int) -> Params:
    """Fresh parameters, float32.

    The stream of a leaf is (seed, path, layer), so that changing the depth, switching a component
    or sharding the model leaves every other leaf bitwise equal.
    """
    tree = abstract(config)
    leaves = {
        path: jnp.asarray(_leaf(path, leaf.shape, config.init_std, seed))
        for path, leaf in flatten_paths(tree).items()
    }
    return unflatten_paths(tree, leaves)


def _leaf(path: str, shape: tuple[int, ...], std: float, seed: int) -> np.ndarray:
    if path.endswith("/gain"):
        return np.ones(shape, np.float32)
    if path.endswith("/head_gate"):
        return np.zeros(shape, np.float32)
    if path.endswith("/taps"):
        taps = np.zeros(shape, np.float32)
        taps[..., 0, :] = 1
        return taps
    if not path.startswith("blocks/"):
        return draw(seed, path, 0, shape, std)
    return np.stack([draw(seed, path, layer, shape[1:], std) for layer in range(shape[0])])


def draw(seed: int, path: str, layer: int, shape: tuple[int, ...], std: float) -> np.ndarray:
    """std * TruncatedNormal(-3, 3) of `shape`, float32, from the stream (seed, path, layer).

    Philox counters give 53-bit uniforms, the inverse normal distribution makes them normal.
    """
    key = np.array([seed & LARGEST_SEED, zlib.crc32(path.encode()) << 32 | layer], np.uint64)
    raw = np.random.Philox(key=key).random_raw(int(np.prod(shape)))
    uniform = (np.right_shift(raw, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    low, high = ndtr(-TRUNCATION), ndtr(TRUNCATION)
    return (std * ndtri(low + (high - low) * uniform)).astype(np.float32).reshape(shape)
