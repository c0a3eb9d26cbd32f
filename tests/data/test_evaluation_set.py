import math

import numpy as np
import pytest

from portolan.data.evaluation_set import EvaluationSet
from portolan.data.loss_metrics import DomainLoss
from portolan.data.tokenizer import token_bytes
from portolan.errors import UsageError

LENGTH = 96


@pytest.fixture(scope="module")
def lengths(tokenizer):
    return token_bytes(tokenizer)


@pytest.fixture(scope="module")
def heldout(store, lengths):
    return EvaluationSet(store, LENGTH, lengths)


def test_every_token_of_every_domain_is_there_once(heldout, store):
    assert heldout.domains == list(store.cells)
    for name, cell in store.cells.items():
        rows = heldout.rows[name]
        assert rows.tokens.shape == (-(-cell.num_tokens // LENGTH), LENGTH)
        real = rows.segments >= 0
        assert np.array_equal(
            rows.tokens[real], np.concatenate([shard.tokens for shard in cell.shards])
        )
        assert real[:-1].all()
        assert (rows.tokens[~real] == store.pad_id).all()
        assert (rows.weights[~real] == 0).all()
        assert (rows.segments[:, 0] == 0).all()
    assert not any(heldout.truncated.values())


def test_weights_and_bytes_of_targets(heldout, lengths):
    rows = heldout.all_rows()
    for row in range(len(rows.tokens)):
        for position in range(LENGTH):
            is_last = position == LENGTH - 1
            same = not is_last and (
                rows.segments[row, position] == rows.segments[row, position + 1] >= 0
            )
            assert rows.weights[row, position] == same
            expected = lengths[rows.tokens[row, position + 1]] if same else 0
            assert rows.target_bytes[row, position] == expected
    assert sum(heldout.target_bytes.values()) == rows.target_bytes.sum()
    assert sum(heldout.num_targets.values()) == rows.weights.sum()
    # BOS is never a target; EOS is one, without text.
    assert heldout.target_counts(320)[0] == 0
    assert heldout.target_counts(320)[1] > 0
    assert (rows.weights - rows.text_weights).sum() == heldout.target_counts(320)[1]


def test_bytes_are_those_of_the_text_except_at_row_starts(heldout, store, lengths):
    for name, cell in store.cells.items():
        first = lengths[heldout.rows[name].tokens[:, 0]].sum()
        assert heldout.target_bytes[name] == cell.text_bytes - first


def test_a_uniform_model_has_the_entropy_of_the_vocabulary(heldout):
    rows = heldout.all_rows()
    nats = math.log(320)
    domain = DomainLoss(
        nats * float(rows.weights.sum()),
        int(rows.weights.sum()),
        int(rows.target_bytes.sum()),
        nats * float(rows.text_weights.sum()),
    )
    assert domain.loss == pytest.approx(nats)
    tokens_per_byte = rows.text_weights.sum() / rows.target_bytes.sum()
    assert domain.bits_per_byte == pytest.approx(math.log2(320) * tokens_per_byte)


def test_a_limit_keeps_the_first_rows_and_says_so(heldout, store, lengths):
    limited = EvaluationSet(store, LENGTH, lengths, max_rows=40)
    for name, rows in limited.rows.items():
        full = heldout.rows[name]
        assert len(rows.tokens) == min(40, len(full.tokens))
        assert np.array_equal(rows.tokens, full.tokens[:40])
        assert limited.truncated[name] == (len(full.tokens) > 40)
    assert limited.all_rows().domain.tolist() == [
        index
        for index, name in enumerate(store.cells)
        for _ in range(len(limited.rows[name].tokens))
    ]


def test_digest_covers_what_is_measured(heldout, store, lengths):
    assert EvaluationSet(store, LENGTH, lengths).digest == heldout.digest
    assert EvaluationSet(store, 128, lengths).digest != heldout.digest
    assert EvaluationSet(store, LENGTH, lengths, max_rows=2).digest != heldout.digest


def test_lengths_of_another_tokenizer_are_refused(store, lengths):
    with pytest.raises(UsageError, match="token lengths"):
        EvaluationSet(store, LENGTH, lengths[:-1])
