"""Held-out loss per domain, without expert capacity, from any state of a run."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from portolan.data.loss_metrics import summarize_losses
from portolan.model import transformer
from portolan.parallel.sharding import REPLICATED
from portolan.parallel.spread import Spread
from portolan.shapes import ModelConfig

METRIC_PREFIX = "eval_dropless/heldout"
NUM_KEPT_PROGRAMS = 8


@functools.lru_cache(NUM_KEPT_PROGRAMS)
def _loss_program(config: ModelConfig, compute_dtype: np.dtype, spread: Spread | None) -> Any:
    """The jitted losses of a shape; evaluators of one shape share its compiled form."""
    options = transformer.CPU_COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    settings: dict[str, Any] = {"compute_dtype": compute_dtype}
    if spread is None:
        losses = functools.partial(transformer.token_losses, config=config, **settings)
        return jax.jit(losses, compiler_options=options)
    everywhere = NamedSharding(spread.mesh, REPLICATED)
    losses = spread.token_losses(**settings)
    return jax.jit(losses, compiler_options=options, out_shardings=everywhere)


class HeldOutEvaluator:
    """Token losses of the held-out rows of every domain, in fixed batches.

    Args:
        evaluation_set: rows per domain (tokens, segments, weights of [rows, S]) and the UTF-8
            bytes of their targets.
        batch_sequences: rows a call of the model sees; the last batch is padded with rows whose
            weights are 0, so that one compiled program serves all.
        prefix: of the metric keys; another packing is another metric.
        devices: a mesh that shares the rows; the batch grows to a multiple of its parts.
    """

    def __init__(
        self,
        evaluation_set: Any,
        config: ModelConfig,
        *,
        batch_sequences: int,
        compute_dtype: Any,
        prefix: str = METRIC_PREFIX,
        devices: Any = None,
    ) -> None:
        self.evaluation_set = evaluation_set
        parts = devices.num_row_shards if devices else 1
        self.batch_sequences = -(-batch_sequences // parts) * parts
        self.compute_dtype = compute_dtype
        self.prefix = prefix
        self.devices = devices
        spread = devices and devices.spread(config, self.batch_sequences)
        spread = spread and spread.without_drops()
        self._losses = _loss_program(config, np.dtype(compute_dtype), spread)

    def with_model(self, config: ModelConfig) -> "HeldOutEvaluator":
        """The same metric of a model of another shape: a context stage changes its multiplier."""
        return HeldOutEvaluator(
            self.evaluation_set,
            config,
            batch_sequences=self.batch_sequences,
            compute_dtype=self.compute_dtype,
            prefix=self.prefix,
            devices=self.devices,
        )

    def lower(self, params: Any, beta: jax.Array) -> Any:
        """The program of one batch, traced but not compiled."""
        shape = (self.batch_sequences, self.evaluation_set.sequence_length)
        rows: Any = np.zeros(shape, np.int32)
        rows = self.devices.put_rows(rows) if self.devices else rows
        return self._losses.lower(params, beta, rows, rows)

    def __call__(self, params: Any, beta: jax.Array) -> dict[str, float]:
        """{metric key: nats per token or bits per byte} of all domains, macro and micro."""
        rows = self.evaluation_set.all_rows()
        nats = np.zeros((2, len(rows.tokens)))
        weights = (rows.weights, rows.text_weights)
        for start in range(0, len(rows.tokens), self.batch_sequences):
            chosen = slice(start, min(start + self.batch_sequences, len(rows.tokens)))
            losses = self._batch(params, beta, rows.tokens[chosen], rows.segments[chosen])
            for kind, weight in enumerate(weights):
                nats[kind, chosen] = (losses * weight[chosen]).sum(axis=1)
        domains = {}
        for index, name in enumerate(self.evaluation_set.domains):
            mine = rows.domain == index
            domains[name] = (
                float(nats[0, mine].sum()),
                self.evaluation_set.num_targets[name],
                self.evaluation_set.target_bytes[name],
                float(nats[1, mine].sum()),
            )
        summary = summarize_losses(domains)
        return {f"{self.prefix}/{key}": value for key, value in summary.items()}

    def _batch(
        self, params: Any, beta: jax.Array, tokens: np.ndarray, segments: np.ndarray
    ) -> np.ndarray:
        """Losses float64 [rows, S]; short batches are padded to the compiled size."""
        padding = ((0, self.batch_sequences - len(tokens)), (0, 0))
        rows = np.pad(tokens, padding), np.pad(segments, padding, constant_values=-1)
        if self.devices:
            rows = tuple(self.devices.put_rows(part) for part in rows)
        losses = self._losses(params, beta, *rows)
        return np.asarray(losses, np.float64)[: len(tokens)]
