"""Problems that every transport must solve like the dense reference, and their inputs."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from portolan.parallel.exchange import Exchange, make_exchange
from portolan.parallel.layout import MESH_AXES
from portolan.parallel_settings import ParallelSettings


@dataclass(frozen=True)
class Case:
    """One problem: T tokens a shard, K of E experts, widths H and I, `mesh` in the axes' order."""

    name: str
    mesh: tuple[int, int, int, int, int]
    transport: str = "ragged"
    gate: str = "none"
    factor: str = "1.15"
    chunks: int = 1
    waves: int = 1
    group: int = 1
    order: str = "source_major"
    dtype: str = "float32"
    padding: float = 0.1
    tokens: int = 16
    selected: int = 3
    experts: int = 8
    width: int = 8
    inner: int = 12
    distinct: bool = False
    seed: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(MESH_AXES, self.mesh, strict=True))

    @property
    def num_groups(self) -> int:
        """Sets of shards that exchange rows."""
        return self.mesh[0] * self.mesh[1] * self.mesh[2]

    @property
    def num_tokens(self) -> int:
        return self.num_groups * self.mesh[3] * self.tokens

    def exchange(self) -> Exchange:
        settings = ParallelSettings(
            transport=self.transport,
            gate=self.gate,
            capacity_factor=self.factor,
            num_chunks=self.chunks,
            num_waves=self.waves,
            group_size=self.group,
            order=self.order,
        )
        return make_exchange(
            settings,
            self.sizes,
            num_experts=self.experts,
            num_selected=self.selected,
            tokens_per_shard=self.tokens,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class Golden:
    """The problem G1 of parallel.md 5.5 under one rule: its kept set, y, and drops on either side.

    Two shards, x[t] = t + 1, weights 1, expert g multiplies by g + 1, sum(y) is differentiated.
    """

    case: Case
    keep: str
    y: tuple[int, ...]
    drops: tuple[int, int, int]
    invalid: tuple[int, ...] = ()


G1_IDS = np.array([[0, 2], [1, 0], [0, 3], [1, 2], [0, 1], [0, 2], [3, 3], [2, 0]], np.int32)
G1 = Case(
    "", (1, 1, 1, 2, 1), factor="0.75", tokens=4, selected=2, experts=4, width=1, inner=1, group=2
)


def _golden(name, keep, y, drops, invalid=(), **changes) -> Golden:
    case = dataclasses.replace(G1, name=f"G1 {name}", **changes)
    return Golden(case, keep.replace(" ", ""), y, drops, invalid)


FULL, SHORT = (4, 6, 15, 20, 3, 8, 24, 16), (4, 6, 15, 20, 2, 6, 24, 0)
GOLDENS = [
    _golden("none", "11111111 11111111", FULL, (0, 0, 0)),
    _golden(
        "cell",
        "11110111 11111110",
        (4, 6, 12, 20, 3, 8, 24, 12),
        (2, 0, 0),
        transport="cell",
        gate="cell",
    ),
    _golden(
        "receiver",
        "11011101 10111011",
        (4, 2, 15, 12, 1, 8, 12, 16),
        (0, 4, 0),
        gate="receiver",
    ),
    _golden("two chunks", "11111111 01011100", SHORT, (0, 4, 0), gate="receiver", chunks=2),
    _golden("waterfill", "11111111 01011100", SHORT, (0, 4, 0), gate="waterfill"),
    _golden(
        "round robin",
        "11110111 11011100",
        (4, 6, 12, 20, 3, 6, 24, 0),
        (0, 4, 0),
        gate="waterfill",
        order="round_robin",
    ),
    _golden(
        "pooled",
        "11101100 11011111",
        (4, 4, 15, 0, 3, 6, 24, 16),
        (1, 3, 0),
        transport="pooled",
        waves=2,
    ),
    _golden(
        "padding",
        "11110011 11011110",
        (4, 6, 0, 20, 3, 6, 24, 12),
        (0, 2, 2),
        (2,),
        gate="waterfill",
        order="round_robin",
    ),
]


class Inputs(NamedTuple):
    """x, u [T, H], c [T, K], experts int32[T, K], valid [T], gate, up [E, H, I], down [E, I, H]."""

    x: np.ndarray
    u: np.ndarray
    c: np.ndarray
    experts: np.ndarray
    valid: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


def make_inputs(case: Case) -> Inputs:
    """Skewed, with unused experts and padding; a token may select one expert twice.

    With `distinct` it does not, as the router's top-k: the kernel of one device relies on it.
    """
    rng = np.random.default_rng(case.seed)
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32
    tokens, width = case.num_tokens, case.width

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    liking = rng.normal(0, 0.8, case.experts)
    liking[rng.integers(case.experts)] = -np.inf
    noise = rng.gumbel(size=(tokens, case.selected, case.experts))
    if case.distinct:
        experts = np.argsort(-liking - noise[:, 0], axis=1)[:, : case.selected]
    else:
        experts = np.argmax(liking + noise, axis=2)
    scale = np.asarray(1 / math.sqrt(width), dtype)
    matrix = (case.experts, width, case.inner)
    return Inputs(
        normal(tokens, width),
        normal(tokens, width),
        rng.random((tokens, case.selected)).astype(np.float32),
        experts.astype(np.int32),
        rng.random(tokens) >= case.padding,
        normal(*matrix) * scale,
        normal(*matrix) * scale,
        normal(case.experts, case.inner, width) * scale,
    )


LARGE = Case(
    "grouped, large experts",
    (2, 4, 1, 1, 1),
    "grouped",
    tokens=128,
    selected=4,
    experts=4,
    width=128,
    inner=128,
)
"""So large that eight devices of a CPU compute them by numpy, side by side."""
CASES = [
    Case("grouped", (2, 2, 1, 1, 2), "grouped", distinct=True),
    LARGE,
    Case("ring", (1, 1, 1, 4, 2), "ring", distinct=True),
    Case("ring waterfill", (1, 2, 1, 4, 1), "ring", "waterfill", group=2),
    Case("cell", (1, 2, 1, 4, 1), "cell", "cell"),
    Case("pooled waves", (2, 1, 1, 4, 1), "pooled", factor="0.9", waves=2),
    Case("pooled dropless", (1, 1, 1, 4, 1), "pooled", factor="8", distinct=True),
    Case("ragged", (1, 1, 1, 8, 1)),
    Case("ragged model", (1, 2, 1, 2, 2), chunks=2, distinct=True),
    Case("ragged waterfill", (1, 2, 1, 4, 1), gate="waterfill", group=2),
    Case("one shard", (1, 4, 1, 1, 1), gate="waterfill", factor="0.9", group=4),
    Case("bfloat16 ragged", (1, 1, 1, 4, 1), gate="cell", dtype="bfloat16"),
    Case("bfloat16 cell", (1, 1, 1, 4, 1), "cell", "cell", dtype="bfloat16"),
    Case("cell dropless", (1, 1, 1, 4, 1), "cell", "cell", "8", distinct=True),
    Case("ragged receiver", (1, 2, 1, 4, 1), gate="receiver", factor="0.9", chunks=2),
    Case("all padding", (1, 1, 1, 4, 1), gate="receiver", padding=1.0),
    Case("bfloat16 pooled", (1, 1, 1, 4, 1), "pooled", waves=2, dtype="bfloat16"),
]
MORE_CASES = [
    Case("pooled", (1, 1, 1, 8, 1), "pooled", factor="1.0"),
    Case("round robin", (2, 1, 1, 2, 2), gate="waterfill", group=2, order="round_robin"),
    Case("ring cell", (1, 2, 1, 4, 1), "ring", "cell"),
    Case("ring receiver", (1, 2, 1, 4, 1), "ring", "receiver", "0.9", chunks=2),
    Case("ring round robin", (2, 1, 1, 2, 2), "ring", "waterfill", group=2, order="round_robin"),
    Case("cell model", (2, 1, 1, 2, 2), "cell", "cell", "0.9"),
    Case("cell eight", (1, 1, 1, 8, 1), "cell", "cell", "1.3", experts=16),
    Case("pooled model", (1, 2, 1, 2, 2), "pooled", factor="1.05", waves=4),
    Case("pooled context", (1, 1, 2, 4, 1), "pooled", waves=2, padding=0.6),
    Case("pooled fat header", (1, 1, 1, 4, 1), "pooled", tokens=32, width=2),
    Case("ragged cell", (1, 2, 1, 4, 1), gate="cell"),
    Case("ragged eight", (1, 1, 1, 8, 1), gate="receiver", factor="0.9", chunks=2, experts=16),
    Case("ragged two", (2, 2, 1, 2, 1), gate="receiver", order="round_robin"),
    Case("waterfill eight", (1, 1, 1, 8, 1), gate="waterfill", group=2, experts=16),
    Case("waterfill context", (1, 1, 4, 2, 1), gate="waterfill", group=4, padding=0.6),
    Case("waterfill model", (1, 2, 1, 2, 2), gate="waterfill", chunks=2, group=2),
    Case("all padding pooled", (1, 1, 1, 4, 1), "pooled", padding=1.0),
    Case("all padding ring", (1, 1, 1, 4, 1), "ring", padding=1.0),
    Case("bfloat16 ring", (1, 1, 1, 4, 1), "ring", "cell", dtype="bfloat16"),
]
MEMORY = "memory of chunks"
