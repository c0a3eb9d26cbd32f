"""Sums of drops in int64, and the identities that devices' counts must obey."""

import numpy as np
import pytest

from portolan.errors import PortolanError
from portolan.parallel.drops import Drops, layer_causes, total_drops


def test_totals_by_cause_beyond_32_bits():
    # Batch 4096 of the public run: 6,442,450,944 / 4 assignments a layer, 48 layers.
    per_layer, layers = 4096 * 4096 * 8 * 12 // 4, 48
    sender = np.full(layers, 2_000_000, np.int32)
    receiver = np.full(layers, 1_000_000, np.int32)
    receiver[7] = 5_000_000
    skipped = np.full(layers, per_layer // 2, np.int32)
    found = total_drops(Drops(sender, receiver, skipped), "pooled", per_layer // 2, per_layer)
    assert found.assignments == 19_327_352_832 > 2**31
    assert found.padding_skipped == found.valid == found.assignments // 2 > 2**31
    assert (found.sender_cell, found.sender_pool) == (0, 96_000_000)
    assert (found.sender, found.receiver) == (96_000_000, 52_000_000)
    assert found.drop_fraction == pytest.approx(148e6 / found.valid)
    assert found.receiver_fraction == pytest.approx(52e6 / (found.valid - 96e6))
    assert found.skipped_fraction == 0.5
    assert found.worst_layer == 7
    assert found.worst_fraction == pytest.approx(7e6 / (per_layer // 2))


def test_senders_are_named_by_transport():
    drops = Drops([3], [0], [1])
    assert layer_causes(drops, "cell")["sender_cell"] == 3
    assert layer_causes(drops, "ragged")["sender_pool"] == 0
    assert layer_causes(drops, "pooled")["sender_pool"] == 3


def test_a_batch_of_padding_divides_by_nothing():
    found = total_drops(Drops([0], [0], [8]), "ragged", 0, 8)
    assert (found.drop_fraction, found.receiver_fraction, found.skipped_fraction) == (0, 0, 1)


@pytest.mark.parametrize(
    ("drops", "message"),
    [
        (Drops([0, 0], [0, 0], [2, 3]), r"layer 1 .* valid 6 \+ skipped != 8"),
        (Drops([4, 0], [3, 0], [2, 2]), "layer 0 .* dropped > valid 6"),
        (Drops([0, 0], [0, -1], [2, 2]), "layer 1 .* receiver_capacity < 0"),
    ],
)
def test_contradictions_are_refused(drops, message):
    with pytest.raises(PortolanError, match=message):
        total_drops(drops, "cell", 6, 8)
