"""Meshes that do not fit are refused before anything is compiled, with the numbers and the axes."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from tests.train.runs import CONFIG

from portolan.errors import UsageError
from portolan.parallel.context import shard_context
from portolan.parallel.layout import MESH_AXES
from portolan.parallel.mesh import resolve_sizes
from portolan.parallel.spread import Spread
from portolan.parallel_settings import MeshSettings, ParallelSettings


def spread(batch_sequences: int = 8, micro: int = 1, config=CONFIG, settings=None, **sizes: int):
    lengths = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    mesh = AbstractMesh(lengths, MESH_AXES)
    return Spread(mesh, settings or ParallelSettings(), config, batch_sequences, micro)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"expert": 3, "batch_sequences": 9}, "8 experts do not divide over 3 devices of expert"),
        ({"data": 3}, "8 sequences of a batch do not divide over 3 devices of replica x data"),
        ({"data": 2, "micro": 8}, "over 16 devices of replica x data x expert x 8 micro-batches"),
        ({"context": 5}, "32 positions of a row do not divide over 5 devices of context"),
        ({"model": 3}, "16 columns of an expert do not divide over 3 devices of model"),
    ],
)
def test_a_misfit_is_named(arguments, words):
    with pytest.raises(UsageError, match=words) as caught:
        spread(**arguments)
    assert "--mesh" in caught.value.remedy


def test_a_capacity_below_one_row_is_refused():
    settings = ParallelSettings(gate="cell", transport="cell", capacity_factor="0.01")
    with pytest.raises(UsageError, match="less than one"):
        spread(settings=settings, expert=4)


def test_exact_quantiles_need_the_whole_batch():
    config = dataclasses.replace(CONFIG, balance="qb_topk")
    assert spread(config=config).num_micro_batches == 1
    with pytest.raises(UsageError, match="qb_topk"):
        spread(config=config, micro=2)


def test_an_evaluation_drops_nothing():
    settings = ParallelSettings(gate="waterfill", capacity_factor="0.8")
    training = spread(settings=settings, expert=2)
    assert training.exchange("float32").capacities.rule.gate == "waterfill"
    assert training.without_drops().exchange("float32").capacities.rule.gate == "none"


def test_a_shard_shorter_than_the_taps_is_refused():
    with pytest.raises(UsageError, match="2 positions of a row on a device are fewer than the 3"):
        shard_context(jnp.zeros((1, 2), jnp.int32), CONFIG, jnp.float32)


def test_axes_take_what_is_there():
    assert resolve_sizes(MeshSettings(expert=4), 8)["data"] == 2
    assert resolve_sizes(MeshSettings(expert=4, data=1), 8)["data"] == 1
    with pytest.raises(UsageError, match="the mesh replica 2 x expert 8 needs 16 devices, 8 are"):
        resolve_sizes(MeshSettings(replica=2, expert=8), 8)
