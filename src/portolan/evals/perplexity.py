"""Held-out loss per domain, without expert capacity, from any state of a run."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from portolan.data.loss_metrics import summarize_losses
from portolan.model import transformer
from portolan.shapes import ModelConfig

METRIC_PREFIX = "eval_dropless/heldout"


class HeldOutEvaluator:
    """Token losses of the held-out rows of every domain, in fixed batches.

    Args:
        evaluation_set: rows per domain (tokens, segments, weights of [rows, S]) and the UTF-8
            bytes of their targets.
        batch_sequences: rows a call of the model sees; the last batch is padded with rows whose
            weights are 0, so that one compiled program serves all.
    """

    def __init__(
        self,
        evaluation_set: Any,
        config: ModelConfig,
        *,
        batch_sequences: int,
        compute_dtype: Any,
    ) -> None:
        self.evaluation_set = evaluation_set
        self.batch_sequences = batch_sequences

        def losses(params: Any, beta: jax.Array, tokens: jax.Array, segments: jax.Array):
            return transformer.token_losses(
                params, beta, tokens, segments, config, compute_dtype=compute_dtype
            )

        self._losses: Callable = jax.jit(losses)

    def __call__(self, params: Any, beta: jax.Array) -> dict[str, float]:
        """{metric key: nats per token or bits per byte} of all domains, macro and micro."""
        rows = self.evaluation_set.all_rows()
        count = len(rows.tokens)
        sums = np.zeros(count)
        for start in range(0, count, self.batch_sequences):
            stop = min(start + self.batch_sequences, count)
            padding = self.batch_sequences - (stop - start)
            tokens = np.pad(rows.tokens[start:stop], ((0, padding), (0, 0)))
            segments = np.pad(
                rows.segments[start:stop], ((0, padding), (0, 0)), constant_values=-1
            )
            nll = np.asarray(self._losses(params, beta, tokens, segments), np.float64)
            sums[start:stop] = (nll[: stop - start] * rows.weights[start:stop]).sum(axis=1)
        return self._summary(rows, sums)

    def _summary(self, rows: Any, row_sums: np.ndarray) -> dict[str, float]:
        per_domain = {}
        for index, domain in enumerate(self.evaluation_set.domains):
            chosen = rows.domain == index
            per_domain[domain] = (
                float(row_sums[chosen].sum()),
                int(rows.weights[chosen].sum()),
                int(self.evaluation_set.target_bytes[domain]),
            )
        summary = summarize_losses(per_domain)
        return {f"{METRIC_PREFIX}/{key}": value for key, value in summary.items()}
