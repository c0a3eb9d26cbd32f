"""Held-out losses against a plain computation from the logits of one row at a time."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.data.loader import label_weights
from portolan.evals.perplexity import HeldOutEvaluator
from portolan.model import transformer
from portolan.shapes import derive_shape

CONFIG = derive_shape(
    "micro", 32, vocab_size=64, sequence_length=16, window=8, num_experts=4, num_layers=2
)
NUM_ROWS = {"a": 3, "b": 2}
TARGET_BYTES = {"a": 120, "b": 77}
QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def rows() -> SimpleNamespace:
    """Five rows of two domains: several documents a row, padding, targets without text."""
    rng = np.random.default_rng(5)
    shape = (sum(NUM_ROWS.values()), CONFIG.sequence_length)
    tokens = rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32)
    segments[2, 9:] = segments[4, 3:] = -1
    weights = label_weights(segments)
    is_text = rng.random(shape) < 0.8
    return SimpleNamespace(
        tokens=tokens,
        segments=segments,
        weights=weights,
        text_weights=weights * is_text.astype(np.float32),
        domain=np.repeat([0, 1], list(NUM_ROWS.values())),
    )


@pytest.fixture(scope="module")
def params() -> transformer.Params:
    """Random leaves, so that router and gates are not at rest."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32),
        transformer.abstract(CONFIG),
    )


@pytest.fixture(scope="module")
def beta() -> jax.Array:
    rng = np.random.default_rng(4)
    values = 0.1 * rng.standard_normal((CONFIG.num_layers, CONFIG.num_experts))
    return jnp.asarray(values, jnp.float32)


@pytest.fixture(scope="module")
def expected(rows, params, beta) -> dict[str, tuple[float, float, int]]:
    """Nats, nats of text targets, and number of targets by domain, in float64."""

    def logits(tokens, segments):
        return transformer.logits(params, beta, tokens, segments, CONFIG, compute_dtype="float32")

    quick = jax.jit(logits, compiler_options=QUICK)
    sums = {name: [0.0, 0.0, 0] for name in NUM_ROWS}
    for row in range(len(rows.tokens)):
        tokens = rows.tokens[row : row + 1]
        found = np.asarray(quick(tokens, rows.segments[row : row + 1]), np.float64)[0]
        total = sums["ab"[rows.domain[row]]]
        for place in range(CONFIG.sequence_length - 1):
            if rows.segments[row, place] < 0:
                continue
            if rows.segments[row, place] != rows.segments[row, place + 1]:
                continue
            nats = np.log(np.exp(found[place]).sum()) - found[place, tokens[0, place + 1]]
            total[0] += nats
            total[1] += nats * rows.text_weights[row, place]
            total[2] += 1
    return {name: tuple(total) for name, total in sums.items()}


@pytest.mark.parametrize("batch_sequences", [2, 5])
def test_losses_and_bits_are_those_of_the_logits(batch_sequences, rows, params, beta, expected):
    heldout = SimpleNamespace(
        all_rows=lambda: rows,
        domains=list(NUM_ROWS),
        num_targets={name: expected[name][2] for name in NUM_ROWS},
        target_bytes=TARGET_BYTES,
        sequence_length=CONFIG.sequence_length,
    )
    evaluator = HeldOutEvaluator(
        heldout, CONFIG, batch_sequences=batch_sequences, compute_dtype="float32"
    )
    found = evaluator(params, beta)
    losses = {name: nats / count for name, (nats, _, count) in expected.items()}
    bits = {
        name: text / math.log(2) / TARGET_BYTES[name] for name, (_, text, _) in expected.items()
    }
    nats, texts, counts = map(sum, zip(*expected.values(), strict=True))
    wanted = {
        "a/loss": losses["a"],
        "b/loss": losses["b"],
        "a/bpb": bits["a"],
        "b/bpb": bits["b"],
        "macro_loss": (losses["a"] + losses["b"]) / 2,
        "micro_loss": nats / counts,
        "macro_bpb": (bits["a"] + bits["b"]) / 2,
        "micro_bpb": texts / math.log(2) / sum(TARGET_BYTES.values()),
    }
    wanted = {f"eval_dropless/heldout/{name}": value for name, value in wanted.items()}
    assert set(found) == set(wanted)
    assert found == pytest.approx(wanted, rel=2e-6)
    assert losses["a"] != pytest.approx(losses["b"], rel=1e-3)
