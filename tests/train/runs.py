"""A run on synthetic batches for child processes with many devices."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from portolan.data.loader import ALL_ROWS, TokenBatch, label_weights
from portolan.optim.schedule import PeakRates
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import derive_shape
from portolan.train.state import RunSettings

CONFIG = derive_shape(
    "micro",
    32,
    vocab_size=64,
    sequence_length=32,
    window=16,
    num_experts=8,
    num_layers=2,
    global_every=2,
)
PEAK = PeakRates(0.02, 0.01, 0.9, 0.95, 1e-8, False)
RUN = RunSettings(
    run_id="rung-mesh",
    role="rung",
    config=CONFIG,
    batch_sequences=8,
    steps=6,
    peak=PEAK,
    warmup_steps=2,
    min_ratio=0.05,
    optimizer=OptimizerSettings(hyperball_scope="per_expert", ns_dtype="float32").with_law(PEAK),
    seed=0,
    compute_dtype="float32",
    z_weight=1e-4,
    remat="none",
    norm_interval_steps=1,
    temporary_checkpoint_seconds=1e9,
    permanent_checkpoint_steps=2,
    num_evaluations=2,
)
IDENTITY = {"config_digest": "c" * 64, "data_digest": "d" * 64}


def batch(step: int) -> TokenBatch:
    """Rows that depend on the step only; the last one ends in padding."""
    rng = np.random.default_rng(step)
    shape = (RUN.batch_sequences, CONFIG.sequence_length)
    tokens = rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32)
    segments[-1, 20:] = -1
    return TokenBatch(tokens, segments, label_weights(segments))


class Batches:
    """Those batches as the training loop asks for them."""

    def batches(
        self, start: int, stop: int, *, rows: slice = ALL_ROWS
    ) -> Iterator[tuple[int, Any]]:
        for step in range(start, stop):
            yield step, TokenBatch(*(part[rows] for part in batch(step)))
