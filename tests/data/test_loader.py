import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.data.loader import Loader, label_weights, prefetch
from portolan.data.mixing import shuffle_blocks
from portolan.data.mixture import Mixture, MixtureError, Phase, plan_mixture
from portolan.data.mixture_design import proportional_counts
from portolan.data.order import Geometry, SequenceOrder, cell_key
from portolan.errors import UsageError

CELLS = {"c00q0": 20, "c00q1": 7, "c01q0": 5}
NAMES = list(CELLS)


def make_mixture(cells, *phases, block=8, lattice=8, length=1):
    """Phases are (start step, counts in the order of the cells); budgets do not matter here."""
    made = tuple(
        Phase(f"p{i}", start, 1, dict(zip(cells, counts, strict=True)))
        for i, (start, counts) in enumerate(phases)
    )
    return Mixture("m", "tok", "sto", cells, made, length, block, lattice)


GOLDEN = make_mixture(CELLS, (0, (5, 2, 1)), (16, (2, 2, 4)))


def make_order(mixture=GOLDEN, batch=1, seed=42, **options):
    options = {"window_blocks": 2, "block_tokens": 4} | options
    geometry = [Geometry(0, batch, mixture.sequence_length)]
    return SequenceOrder(mixture, options.pop("geometry", geometry), seed=seed, **options)


def located(order, count, start=0):
    found = order.locate_many(np.arange(start, start + count))
    return list(zip(*(values.tolist() for values in found), strict=True))


def test_golden_order():
    order = make_order()
    assert [order.locate(g, 0) for g in range(5)] == [
        ("c00q1", 0, 0), ("c00q0", 0, 17), ("c01q0", 0, 2), ("c00q0", 0, 16), ("c00q0", 0, 19)
    ]  # fmt: skip
    assert [order.locate(g, 0) for g in range(16, 20)] == [
        ("c01q0", 1, 2), ("c01q0", 0, 0), ("c00q0", 0, 7), ("c00q1", 0, 4)
    ]  # fmt: skip
    assert cell_key(42, "c00q0") == 0xB5654B51AC73D6C0


orders = st.builds(
    lambda sizes, counts, later, seed: (
        make_mixture(
            {f"c{i}": size for i, size in enumerate(sizes)},
            (0, counts),
            (3 * sum(counts), later),
            block=sum(counts),
            lattice=sum(counts),
        ),
        seed,
    ),
    st.lists(st.integers(1, 90), min_size=3, max_size=3),
    st.permutations([1, 4, 11]),
    st.permutations([2, 0, 14]),
    st.integers(0, 2**63 - 1),
)


@settings(max_examples=40)
@given(orders)
def test_counts_are_exact_and_no_sequence_repeats_in_an_epoch(case):
    mixture, seed = case
    order = make_order(mixture, seed=seed, block_tokens=8)
    found = located(order, 16 * 20)
    for block in range(20):
        counts = Counter(cell for cell, _, _ in found[16 * block : 16 * (block + 1)])
        expected = mixture.block_counts(int(block >= 3))
        assert [counts[cell] for cell in range(3)] == expected.tolist()
    for cell, size in enumerate(mixture.cells.values()):
        reads = [(epoch, sequence) for c, epoch, sequence in found if c == cell]
        assert len(set(reads)) == len(reads)
        epochs = Counter(epoch for epoch, _ in reads)
        assert sorted(epochs) == list(range(len(epochs)))
        assert all(count == size for epoch, count in epochs.items() if epoch + 1 < len(epochs))
        assert all(0 <= sequence < size for _, sequence in reads)


@settings(max_examples=8)
@given(orders, st.integers(0, 2**40))
def test_many_equals_one_by_one(case, start):
    mixture, seed = case
    order = make_order(mixture, seed=seed)
    names = list(mixture.cells)
    many = located(order, 40, start)
    assert many == [
        (names.index(one.cell), one.epoch, one.sequence)
        for one in (order.locate(g, 0) for g in range(start, start + 40))
    ]
    shuffled = np.random.default_rng(0).permutation(40)
    found = order.locate_many(start + shuffled)
    assert [tuple(v[i] for v in found) for i in range(40)] == [many[i] for i in shuffled]


def test_seeds_and_cells_are_independent():
    first, second = located(make_order(), 800), located(make_order(seed=43), 800)
    assert first != second
    renamed = make_mixture({"a": 3, **CELLS}, (0, (0, 5, 2, 1)), (16, (0, 2, 2, 4)))
    found = located(make_order(renamed), 800)
    assert [(cell - 1, epoch, sequence) for cell, epoch, sequence in found] == first


def test_per_epoch_changes_later_epochs_only():
    fixed, renewed = located(make_order(), 2000), located(make_order(reshuffle="per_epoch"), 2000)
    assert [row[:2] for row in fixed] == [row[:2] for row in renewed]
    assert all(a == b for a, b in zip(fixed, renewed, strict=True) if a[1] == 0)
    assert fixed != renewed


def test_an_appended_phase_leaves_what_was_read_and_repeats_nothing():
    before = make_mixture({"a": 400, "b": 400}, (0, (6, 2)))
    after = make_mixture({"a": 400, "b": 400}, (0, (6, 2)), (80, (1, 7)))
    short, long = located(make_order(before), 80), located(make_order(after), 400)
    assert long[:80] == short
    assert len(set(long)) == len(long)
    assert located(make_order(before), 400) != long


def test_batches_may_change_between_steps():
    geometry = [Geometry(0, 2, 1), Geometry(8, 4, 1), Geometry(12, 1, 1)]
    order = make_order(make_mixture(CELLS, (0, (5, 2, 1)), (8, (2, 2, 4))), geometry=geometry)
    assert [order.first_index(step) for step in (0, 7, 8, 10, 12, 20)] == [0, 14, 16, 24, 32, 40]
    assert [order.batch_sequences(step) for step in (7, 8, 12)] == [2, 4, 1]
    flat = located(make_order(), 40)
    rows = [
        (NAMES.index(found.cell), found.epoch, found.sequence)
        for step in range(20)
        for found in (order.locate(step, r) for r in range(order.batch_sequences(step)))
    ]
    assert rows == flat


def test_counters_do_not_overflow():
    cells = {f"c{i:02d}q{q}": 10**11 + 977 * i + q for i in range(4) for q in range(5)}
    counts = proportional_counts(cells, 49_152)
    mixture = make_mixture(cells, (0, tuple(counts.values())), block=49_152, lattice=49_152)
    order = make_order(mixture, batch=11_264, block_tokens=1 << 20)
    for g in (2**31 - 1, 2**31, 2**32 + 5, 390_251 * 11_264 - 1):
        step, row = divmod(g, 11_264)
        found = order.locate_many(np.array([g]))
        one = order.locate(step, row)
        assert order.cell_names[found.cells[0]] == one.cell
        assert one.epoch == 0
        assert 0 <= one.sequence < cells[one.cell]
    near = order.locate_many(np.arange(2**32 - 49_152, 2**32 + 49_152))
    assert len(set(zip(near.cells.tolist(), near.sequences.tolist(), strict=True))) == 2 * 49_152


@pytest.mark.parametrize("reshuffle", ["fixed", "per_epoch"])
def test_simulated_epoching_reads_the_first_part_of_the_shuffled_cell(reshuffle):
    cells, prefixes = {"a": 300, "b": 200}, {"a": 30, "b": 20}
    mixture = make_mixture(cells, (0, (5, 3)))
    found = located(make_order(mixture, prefixes=prefixes, reshuffle=reshuffle), 400)
    smaller = located(make_order(mixture, prefixes={"a": 15, "b": 10}, reshuffle=reshuffle), 400)
    for cell, (name, prefix) in enumerate(prefixes.items()):
        shuffled = shuffle_blocks(
            cells[name],
            cell_key(42, name),
            np.arange(prefix),
            block_sequences=4,
            window_blocks=2,
        )
        for epoch in (0, 1, 4):
            reads = [sequence for c, e, sequence in found if (c, e) == (cell, epoch)]
            assert sorted(reads) == sorted(shuffled.tolist())
        nested = {sequence for c, _, sequence in smaller if c == cell}
        assert nested == set(shuffled[: prefix // 2].tolist())


def test_simulated_epoching_can_reshuffle_each_epoch():
    options = {"prefixes": {"c00q0": 16, "c00q1": 4, "c01q0": 2}}
    fixed = located(make_order(**options), 400)
    renewed = located(make_order(**options, reshuffle="per_epoch"), 400)
    assert [row[:2] for row in fixed] == [row[:2] for row in renewed]
    assert all(a == b for a, b in zip(fixed, renewed, strict=True) if a[1] == 0)
    assert fixed != renewed


@settings(max_examples=30)
@given(st.integers(300, 3000), st.integers(200, 2000), st.integers(1, 12), st.integers(0, 99))
def test_a_longer_row_skips_and_never_repeats(tokens_a, tokens_b, change_block, seed):
    cells = {"a": tokens_a, "b": tokens_b}
    mixture = make_mixture(cells, (0, (5, 3)), block=8, length=4)
    change_step = 4 * change_block
    geometry = [Geometry(0, 2, 4), Geometry(change_step, 2, 16)]
    order = make_order(mixture, geometry=geometry, seed=seed, block_tokens=64, window_blocks=2)
    same = make_order(mixture, batch=2, seed=seed, block_tokens=64, window_blocks=2)
    boundary = 2 * change_step
    before, after = located(order, boundary), located(order, 400, boundary)
    assert before == located(same, boundary)
    for cell, tokens in enumerate(cells.values()):
        used: dict[int, set[int]] = {}
        for rows, length in ((before, 4), (after, 16)):
            for c, epoch, sequence in rows:
                if c == cell:
                    positions = set(range(sequence * length, (sequence + 1) * length))
                    assert max(positions) < tokens
                    assert not positions & used.setdefault(epoch, set())
                    used[epoch] |= positions
        last = max((epoch for c, epoch, _ in before if c == cell), default=0)
        first = min(epoch for c, epoch, _ in after if c == cell)
        assert first in (last, last + 1)
        complete = [epoch for epoch in used if last + 1 < epoch < max(used)]
        assert all(len(used[epoch]) == tokens // 16 * 16 for epoch in complete)
        if last + 1 in used and last + 1 < max(used):
            assert len(used[last]) > tokens - 2 * 64 - 64 - 2 * 16


def test_refusals_of_the_order():
    with pytest.raises(MixtureError, match="inside a mixture block"):
        make_order(make_mixture(CELLS, (0, (5, 2, 1)), (15, (2, 2, 4))))
    with pytest.raises(MixtureError, match=r"cells \['c00q1'\] have a weight"):
        make_order(make_mixture(CELLS | {"c00q1": 0}, (0, (5, 2, 1))))
    with pytest.raises(MixtureError, match=r"cells \['c00q1'\] have a weight"):
        make_order(prefixes={"c00q0": 1, "c00q1": 0, "c01q0": 1})
    with pytest.raises(MixtureError, match="longer than the cells"):
        make_order(prefixes={"c00q0": 21, "c00q1": 1, "c01q0": 1})
    with pytest.raises(MixtureError, match="every cell"):
        make_order(prefixes={"c00q0": 1})
    with pytest.raises(MixtureError, match="does not divide"):
        make_order(geometry=[Geometry(0, 1, 1), Geometry(8, 1, 3)])
    with pytest.raises(MixtureError, match="one row length"):
        make_order(
            geometry=[Geometry(0, 1, 1), Geometry(8, 1, 2)], prefixes=dict.fromkeys(CELLS, 1)
        )
    with pytest.raises(MixtureError, match="reshuffle"):
        make_order(reshuffle="never")
    with pytest.raises(IndexError):
        make_order().locate(0, 1)
    with pytest.raises(IndexError):
        make_order().locate_many(np.array([-1]))


LENGTH, BATCH, STEPS = 64, 8, 60


@pytest.fixture(scope="module")
def loader(store):
    tokens = store.tokens_by_cell
    mixture = plan_mixture(
        "test",
        tokens=tokens,
        tokenizer_digest=store.tokenizer_digest,
        store_digest=store.digest,
        steps=STEPS,
        batch_sequences=BATCH,
        sequence_length=LENGTH,
        phases=[
            ("main", (0, 1), proportional_counts(tokens, 64)),
            ("cooldown", (4, 5), {"manual": 20, "manual/log": 20, "web": 24}),
        ],
        block_sequences=64,
        lattice=64,
    )
    return Loader(store, mixture, batch=BATCH, seed=1)


def test_rows_are_the_tokens_of_the_store(loader, store):
    for step in (0, 7, 55):
        batch = loader.batch(step)
        assert batch.tokens.shape == batch.segments.shape == batch.weights.shape == (BATCH, LENGTH)
        assert (batch.tokens.dtype, batch.segments.dtype, batch.weights.dtype) == (
            np.int32, np.int32, np.float32
        )  # fmt: skip
        for row in range(BATCH):
            cell, _, sequence = loader.locate(step, row)
            stored = np.concatenate([shard.tokens for shard in store.cells[cell].shards])
            expected = stored[sequence * LENGTH : (sequence + 1) * LENGTH]
            assert np.array_equal(batch.tokens[row], expected)
            # Every document begins with BOS, token 0.
            starts = expected == 0
            starts[0] = False
            assert np.array_equal(batch.segments[row], np.cumsum(starts))
            assert np.array_equal(batch.weights[row, :-1], ~starts[1:])
            assert batch.weights[row, -1] == 0


def test_label_weights_of_padding_are_zero():
    segments = np.array([[0, 0, 1, 1, -1, -1]], np.int32)
    assert label_weights(segments).tolist() == [[1, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_hosts_share_one_batch(loader, num_hosts):
    whole = loader.batch(11)
    share = len(whole.tokens) // num_hosts
    parts = [loader.batch(11, slice(host * share, (host + 1) * share)) for host in range(num_hosts)]
    for together, *pieces in zip(whole, *parts, strict=True):
        assert np.array_equal(together, np.concatenate(pieces))


def test_rows_outside_the_batch_are_refused(loader):
    with pytest.raises(UsageError, match="rows 4 to 900 are not in a batch"):
        loader.batch(0, slice(4, 900))


def test_show_batch_names_the_documents(loader, corpus, tokenizer):
    import pyarrow.parquet as pq

    texts = {
        (key, row["id"]): row["text"]
        for key, shards in corpus
        for path in shards
        for row in pq.read_table(path).to_pylist()
    }
    batch = loader.batch(3)
    for shown in loader.show_batch(3):
        assert (shown.cell, shown.epoch, shown.sequence) == loader.locate(3, shown.row)
        assert [d.start for d in shown.documents[1:]] == [d.stop for d in shown.documents[:-1]]
        assert len(shown.documents) == batch.segments[shown.row].max() + 1
        for document in shown.documents:
            part = batch.tokens[shown.row, document.start : document.stop]
            ids = tokenizer.encode_documents([texts[document.source, document.document_id]])[0]
            assert any(
                np.array_equal(ids[i : i + len(part)], part)
                for i in range(len(ids) - len(part) + 1)
            )
            assert document.epoch == shown.epoch


def test_batch_digests_identify_batches(loader, store):
    digests = [loader.batch_digest(step) for step in range(STEPS)]
    assert len(set(digests)) == STEPS
    again = Loader(store, loader.order.mixture, batch=BATCH, seed=1)
    assert [again.batch_digest(step) for step in range(STEPS)] == digests
    assert Loader(store, loader.order.mixture, batch=BATCH, seed=2).batch_digest(0) != digests[0]


@pytest.mark.parametrize(("buffer", "threads"), [(0, 1), (4, 1), (16, 3)])
@pytest.mark.parametrize(("start", "stop"), [(0, 30), (13, 30), (29, 30), (30, 30)])
def test_prefetch_equals_the_plain_loop_from_any_step(loader, buffer, threads, start, stop):
    found = list(prefetch(loader, start, stop, buffer, num_threads=threads))
    assert [step for step, _ in found] == list(range(start, stop))
    for step, batch in found:
        for a, b in zip(batch, loader.batch(step), strict=True):
            assert np.array_equal(a, b)


def test_a_prefetch_that_is_left_early_ends_its_threads(loader):
    before = threading.active_count()
    taken = list(itertools.islice(loader.batches(0, STEPS, buffer=4), 3))
    assert [step for step, _ in taken] == [0, 1, 2]
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_mixture_of_another_store_is_refused(loader, store):
    import dataclasses

    other = dataclasses.replace(loader.order.mixture, store_digest="x")
    with pytest.raises(MixtureError, match="store digest is x"):
        Loader(store, other, batch=BATCH, seed=1)
    with pytest.raises(UsageError, match="give one of them"):
        Loader(store, loader.order.mixture, seed=1)


def test_rows_may_become_longer(store, loader):
    mixture = loader.order.mixture
    geometry = [Geometry(0, 8, LENGTH), Geometry(16, 4, 2 * LENGTH)]
    options = {"seed": 1, "block_tokens": 512, "window_blocks": 2}
    longer = Loader(store, mixture, geometry=geometry, **options)
    plain = Loader(store, mixture, batch=8, **options)
    assert np.array_equal(longer.batch(15).tokens, plain.batch(15).tokens)
    assert longer.batch(16).tokens.shape == (4, 2 * LENGTH)
    assert longer.batch_digest(16) != plain.batch_digest(16)
