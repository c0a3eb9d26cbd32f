import math

import numpy as np
import pytest

from portolan.data.loss_metrics import (
    DomainLoss,
    macro_bits_per_byte,
    macro_loss,
    micro_bits_per_byte,
    micro_loss,
    summarize_losses,
    unigram_cross_entropy,
)


def test_golden_macro_and_micro():
    domains = [DomainLoss(200.0, 100, 400), DomainLoss(2700.0, 900, 900)]
    assert macro_loss(domains) == pytest.approx(2.5, abs=1e-12)
    assert micro_loss(domains) == pytest.approx(2.9, abs=1e-12)


def test_golden_bits_per_byte():
    assert DomainLoss(6.0, 3, 10).bits_per_byte == pytest.approx(0.865617, abs=5e-7)
    batches = [DomainLoss(200.0, 100, 400), DomainLoss(200.0, 100, 100)]
    assert micro_bits_per_byte(batches) == pytest.approx(1.154156, abs=5e-7)
    # The mean over batches that the public system prints is another number.
    assert macro_bits_per_byte(batches) == pytest.approx(1.803369, abs=5e-7)


def test_targets_without_text_stay_out_of_bits_per_byte():
    domain = DomainLoss(7.0, 4, 10, text_nats=6.0)
    assert domain.loss == 1.75
    assert domain.bits_per_byte == pytest.approx(0.865617, abs=5e-7)
    assert micro_bits_per_byte([domain, domain]) == pytest.approx(0.865617, abs=5e-7)


def test_summary_of_a_tree_of_tags():
    summary = summarize_losses(
        {
            "web/news": (200.0, 100, 400),
            "web/forum": (2700.0, 900, 900),
            "code": (100.0, 100, 0),
            "empty": (0.0, 0, 0),
        }
    )
    assert summary["web/news/loss"] == 2.0
    assert summary["web/macro_loss"] == 2.5
    assert summary["web/micro_loss"] == 2.9
    assert summary["macro_loss"] == 2.0
    assert summary["micro_loss"] == pytest.approx(3000 / 1100)
    assert summary["web/news/bpb"] == pytest.approx(0.5 / math.log(2))
    assert "code/bpb" not in summary
    assert not any(key.startswith("empty") for key in summary)
    with pytest.raises(ValueError, match="nothing to average"):
        summarize_losses({"empty": (0.0, 0, 0)})


def test_unigram_entropy():
    uniform = np.full(8, 1000)
    assert unigram_cross_entropy(uniform, np.arange(8)) == pytest.approx(math.log(8))
    train, heldout = np.array([3, 1, 0]), np.array([1, 0, 1])
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert unigram_cross_entropy(train, heldout) == pytest.approx(expected)
    with pytest.raises(ValueError, match="must match"):
        unigram_cross_entropy(train, np.array([0, 0, 0]))
