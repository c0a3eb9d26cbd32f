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
PHILOX_WORDS = 4
"""Numbers that one count of the generator gives."""
CONSTANT_LEAVES = ("/gain", "/head_gate", "/taps")


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


def init_part(
    path: str, shape: tuple[int, ...], std: float, seed: int, index: tuple[slice, ...]
) -> np.ndarray:
    """The part `index` of a leaf of `init`, of which no more is drawn than whole rows.

    Rows are those of the first dimension after the layers.
    """
    if not path.startswith("blocks/"):
        return _drawn_part(path, 0, shape, std, seed, index)
    layers = range(*index[0].indices(shape[0]))
    parts = [_drawn_part(path, layer, shape[1:], std, seed, index[1:]) for layer in layers]
    return np.stack(parts)


def _drawn_part(
    path: str, layer: int, shape: tuple[int, ...], std: float, seed: int, index: tuple[slice, ...]
) -> np.ndarray:
    if path.endswith(CONSTANT_LEAVES):
        return _leaf(path, shape, std, seed)[index]
    start, stop, _ = index[0].indices(shape[0])
    rows = draw(seed, path, layer, (stop - start, *shape[1:]), std, skip=start)
    return rows[(slice(None), *index[1:])]


def draw(
    seed: int, path: str, layer: int, shape: tuple[int, ...], std: float, skip: int = 0
) -> np.ndarray:
    """std * TruncatedNormal(-3, 3) of `shape`, float32, from the stream (seed, path, layer).

    Philox counters give 53-bit uniforms, the inverse normal distribution makes them normal.
    `skip` leaves out that many rows at the start of the stream.
    """
    key = np.array([seed & LARGEST_SEED, zlib.crc32(path.encode()) << 32 | layer], np.uint64)
    skipped = skip * int(np.prod(shape[1:]))
    stream = np.random.Philox(key=key).advance(skipped // PHILOX_WORDS)
    raw = stream.random_raw(skipped % PHILOX_WORDS + int(np.prod(shape)))[skipped % PHILOX_WORDS :]
    uniform = (np.right_shift(raw, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    low, high = ndtr(-TRUNCATION), ndtr(TRUNCATION)
    return (std * ndtri(low + (high - low) * uniform)).astype(np.float32).reshape(shape)
