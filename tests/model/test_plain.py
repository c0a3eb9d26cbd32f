"""The plain NumPy model against printed figures, and the package against the plain model."""

import numpy as np
import pytest
from tests.model import golden, plain


@pytest.fixture(scope="module")
def golden_result():
    tokens, segments, _ = golden.inputs()
    return plain.forward(golden.leaves(), golden.beta(), tokens, segments, golden.CONFIG)


def test_golden_loss_and_logits(golden_result):
    tokens, _, weights = golden.inputs()
    assert weights.sum() == 18
    figures = plain.loss(golden_result.logits, tokens, weights)
    expected = (golden.LOSS, golden.CROSS_ENTROPY, golden.MEAN_SQUARE_LSE)
    np.testing.assert_allclose(figures, expected, rtol=0, atol=5.1e-11)
    np.testing.assert_allclose(golden_result.logits[0, 3, :4], golden.LOGITS, rtol=0, atol=5.1e-7)


def test_golden_hidden_norms(golden_result):
    for layer, expected in golden.HIDDEN_NORMS.items():
        state = golden_result.states[layer]
        norms = np.linalg.norm(state[0]), np.linalg.norm(state[1, :9])
        np.testing.assert_allclose(norms, expected, rtol=0, atol=5.1e-7)


def test_golden_routing(golden_result):
    for layer, choice in enumerate(golden_result.choices):
        experts = " ".join("".join(map(str, pair)) for pair in choice.experts[0, :7])
        assert experts == golden.SELECTED[layer]
        np.testing.assert_allclose(choice.weights[0, 0], golden.WEIGHTS[layer], rtol=0, atol=5.1e-7)
    gap = min(choice.smallest_gap for choice in golden_result.choices)
    assert gap == pytest.approx(0.0058, abs=5.1e-5)
    np.testing.assert_allclose(golden_result.new_beta, golden.NEW_BETA, rtol=0, atol=5.1e-7)


def test_case_exercises_what_it_should(case):
    result, config = case.plain(), case.config
    assert config.global_layers == (False, True, False, True, True)
    assert config.num_kv_heads_global < config.num_kv_heads_local < config.num_heads
    # Single precision may not change a choice, or the comparison below would mean nothing.
    assert min(choice.smallest_gap for choice in result.choices) > 1e-4
    loads = np.bincount(result.choices[0].experts[case.segments >= 0].ravel())
    assert loads.max() > 3 * loads.min() > 0


def test_float64_model_agrees(case, double_run):
    loss, aux, _, _ = double_run
    result = case.plain()
    figures = plain.loss(result.logits, case.tokens, case.weights)
    np.testing.assert_allclose((loss, aux.ce, aux.mean_square_lse), figures, rtol=1e-12)
    np.testing.assert_allclose(aux.new_beta, result.new_beta, rtol=0, atol=1e-12)
    kept = {name for name, value in aux.router._asdict().items() if value is not None}
    assert kept == set(result.metrics)
    for name, expected in result.metrics.items():
        measured = getattr(aux.router, name)
        np.testing.assert_allclose(measured, expected, rtol=1e-11, atol=1e-13, err_msg=name)


def test_float32_logits_agree(case, single_logits):
    logits = single_logits(case.tokens, case.segments)
    expected = case.plain().logits
    valid = case.segments >= 0
    size = np.sqrt(np.mean(expected[valid] ** 2))
    assert np.abs(logits - expected)[valid].max() < 1e-5 * size
