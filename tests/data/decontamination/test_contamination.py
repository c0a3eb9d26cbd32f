"""Contaminated documents: features, rules, frequency filters, evidence, recall by injection."""

import hashlib
import json
import random

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.data.normalized import rows_of, write_source, write_sources

from portolan.curation_settings import DecontaminationSettings, EvaluationSource
from portolan.data.decontamination import frequency
from portolan.data.decontamination.contamination import find_contaminated
from portolan.data.decontamination.features import Laid, is_short_item, paragraphs
from portolan.data.decontamination.index import BloomFilter, EvaluationIndex, SortedHashes
from portolan.data.decontamination.recall import LAYOUTS, flag_texts
from portolan.data.decontamination.registry import open_registry
from portolan.data.decontamination.rules import Hits, judge, precision_by_source
from portolan.data.documents import (
    Stage,
    document_id,
    manifest_digest,
    run_stage,
    source_folder_name,
    write_shard,
)
from portolan.data.engine import Dataset, Engine, LocalExecutor
from portolan.errors import UsageError

WORDS = [f"w{number}" for number in range(4000)]
LETTERS = " ".join("abcdefghijklm")


def make_text(generator, count):
    return " ".join(generator.choices(WORDS, k=count))


@pytest.fixture
def corpus(tmp_path):
    """Items of 13 to 60 tokens and one short item, planted in one source and not in another."""
    generator = random.Random(1)
    items = [make_text(generator, generator.randint(13, 60)) for _ in range(40)]
    items.append("Who wrote that old play?")
    texts = [make_text(generator, 150) for _ in range(60)]
    planted = [f"{text}\n{item}\n{text[:90]}" for text, item in zip(texts, items, strict=False)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps({"q": i}) + "\n" for i in items))
    sources = write_sources(tmp_path, {"a": texts, "a/b": planted})
    return tmp_path, sources, items, planted


def find(folder, sources, removed=(), workers=1, **fields):
    sets = fields.pop("sets", (EvaluationSource(name="quiz", path="quiz.jsonl"),))
    settings = DecontaminationSettings(sets=sets, **fields)
    registry = open_registry(settings, folder)
    with Engine(LocalExecutor(workers)) as engine:
        return find_contaminated(engine, sources, removed, registry, settings, folder)


def flags_of(found, source):
    return {row["id"]: row for row in rows_of(found.flags.within(source.replace("/", "~")))}


def test_golden_hashes_of_13_tokens():
    laid = Laid.of([[LETTERS]])
    assert f"{laid.windows('xxh3').hashes[0]:016x}" == "9a11e18f1ebd25cb"
    assert f"{laid.windows('blake2b').hashes[0]:016x}" == "6a1d4cbd0d2db59a"


@given(st.lists(st.lists(st.lists(st.sampled_from("abc"), max_size=20), max_size=4), max_size=4))
def test_windows_cross_paragraphs_but_not_documents(documents):
    texts = ["\n".join(" ".join(line) for line in document) for document in documents]
    laid = Laid.of([paragraphs(text, "none") for text in texts])
    for hashing in ("xxh3", "blake2b"):
        windows = laid.windows(hashing)
        for place, text in enumerate(texts):
            tokens = text.split()
            joined = [" ".join(tokens[i : i + 13]).encode() for i in range(len(tokens) - 12)]
            if hashing == "xxh3":
                expected = [xxhash.xxh3_64_intdigest(text) for text in joined]
            else:
                digests = (hashlib.blake2b(text, digest_size=8).digest() for text in joined)
                expected = [int.from_bytes(digest, "big") for digest in digests]
            assert windows.of(place).tolist() == expected


def test_planted_items_are_flagged_by_name_and_nothing_else(corpus):
    folder, sources, items, planted = corpus
    found = find(folder, sources)
    assert not any(row["contaminated"] for row in flags_of(found, "a").values())
    flags = flags_of(found, "a/b")
    assert len(flags) == len(planted) and all(row["contaminated"] for row in flags.values())
    evidence = {row["id"]: row for row in rows_of(found.evidence("a/b"))}
    for number, (item, text) in enumerate(zip(items, planted, strict=True)):
        row = evidence[document_id(text)]
        assert (row["eval_set"], row["eval_item"]) == ("quiz", str(number))
        assert row["matched"] in item.casefold() and row["score"] >= 0.5
        assert flags[document_id(text)]["first_items"] == [f"quiz:{number}"]
    short = evidence[document_id(planted[-1])]
    assert (short["rule"], short["paragraph"]) == ("short", 1)
    assert found.counts["a/b"]["contaminated"] == len(planted)
    assert found.counts["a"]["documents"] == 60


def test_injection_recall_is_complete_for_what_the_rules_promise(corpus):
    folder, sources, items, _ = corpus
    found = find(folder, sources)
    long = sum(len(item.split()) >= 28 for item in items)
    assert set(found.recall) == set(LAYOUTS)
    for name, counted in found.recall.items():
        assert counted["items"] == 40
        assert counted["found"] >= (long if name.startswith("embedded") else 40)


def test_every_long_item_is_found_when_embedded(corpus, tmp_path):
    folder, sources, items, _ = corpus
    found = find(folder, sources)
    index = EvaluationIndex(next((folder / "attributes").glob("eval_index_*")))
    words = [item.split() for item in items if len(item.split()) >= 28]
    settings = DecontaminationSettings()
    texts = [LAYOUTS["embedded in equal filler"](item) for item in words]
    assert all(flag_texts(texts, index, settings)) and found.recall
    assert not any(flag_texts([" ".join(item[:12]) for item in words], index, settings))


def test_folding_finds_other_spellings_only_when_asked(corpus):
    folder, _, items, _ = corpus
    shouted = items[0].upper().replace("W", "\uff37")  # full-width letters
    source = write_source(folder, "loud", [shouted])
    assert find(folder, [source]).counts["loud"]["contaminated"] == 1
    assert find(folder, [source], fold="none").counts["loud"]["contaminated"] == 0
    assert find(folder, [source], ngram_hash="blake2b").counts["loud"]["contaminated"] == 1


def test_phantoms_are_no_hits(tmp_path):
    rows = [{"q": text} for text in ("...", "yes", "42 43 44", "3 x 5 = 15", LETTERS + " n o p")]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["...\nyes\n42 43 44\n3 x 5 = 15\nabc", "a b c d e f\ng h i j k l"]
    found = find(tmp_path, [write_source(tmp_path, "a", texts)])
    assert not any(row["n_hits"] for row in flags_of(found, "a").values())
    assert not is_short_item("3 x 5 = 15".split()) and not is_short_item(["one", "two"])


@pytest.mark.parametrize(("sampled", "expected"), [(5000, 25), (2000, 10), (1000, 5), (100, 5)])
def test_frequency_thresholds(sampled, expected):
    assert frequency.threshold(sampled) == expected


def test_windows_common_in_a_source_do_not_count_there(tmp_path):
    generator = random.Random(2)
    header, rare = make_text(generator, 30), make_text(generator, 30)
    rows = [{"q": header}, {"q": rare}]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [f"{header}\n{make_text(generator, 30)}" for _ in range(5)]
    few = [f"{header}\n{make_text(generator, 30)}" for _ in range(4)]
    sources = write_sources(tmp_path, {"five": [*common, f"{rare} x"], "four": few})
    found = find(tmp_path, sources)
    assert found.counts["five"]["contaminated"] == 1
    assert found.counts["four"]["contaminated"] == 4


def test_windows_common_in_three_sources_count_nowhere():
    def facts(*values):
        hashes = np.array(values, np.uint64)
        return frequency.SourceFrequency(hashes[:0], hashes, 10)

    found = frequency.common_everywhere([facts(1, 2), facts(2, 3), facts(2, 1), facts(1)])
    assert found.tolist() == [1, 2]


def test_removed_documents_and_the_own_heldout_ones(corpus):
    folder, sources, _, planted = corpus
    source = sources[1]

    def build(partial):
        schema = pa.schema([("id", pa.string())])
        rows = pa.table({"id": [document_id(text) for text in planted[:3]]}, schema=schema)
        place = source_folder_name(source.key)
        names = source.shard_names
        return [write_shard(partial, f"{place}/{name}", schema, [rows]) for name in names], {}

    path, manifest, _ = run_stage(folder / "attributes", Stage("heldout", 1, {}), build)
    found = find(folder, sources, [Dataset(path, manifest)])
    assert found.counts["a/b"]["documents"] == found.counts["a/b"]["contaminated"] == 38
    registry = open_registry(DecontaminationSettings(), folder, [("a", sources[0].shard_paths[0])])
    assert all(item.name.startswith("a|") for item in registry.sets[0].items())


def test_workers_change_no_byte_and_a_second_run_does_nothing(corpus):
    folder, sources, *_ = corpus
    first = find(folder, sources)
    digest = manifest_digest(first.flags.folder)
    assert find(folder, sources).skipped and not first.skipped
    other = write_sources(
        folder / "again", {"a": texts_of(sources[0]), "a/b": texts_of(sources[1])}
    )
    (folder / "again" / "quiz.jsonl").write_bytes((folder / "quiz.jsonl").read_bytes())
    second = find(folder / "again", other, workers=2)
    assert manifest_digest(second.flags.folder) == digest
    assert first.key != find(folder, sources, ngram_hash="blake2b").key


def texts_of(source):
    return [row["text"] for row in rows_of(Dataset(source.folder, source.manifest))]


@given(st.lists(st.integers(0, 40), max_size=30, unique=True), st.integers(13, 60))
def test_the_best_span_is_that_of_all_spans(positions, tokens):
    total = tokens - 12
    position = np.array(sorted(p for p in positions if p < total), np.int64)
    count = len(position)
    zeros = np.zeros(count, np.int64)
    hits = Hits(tokens, position, zeros.astype(np.uint64), zeros > 0, zeros, zeros + 1, zeros == 0)
    width = min(32, total)
    flags = np.zeros(total)
    flags[position] = 1
    best = max(flags[j : j + width].mean() for j in range(total - width + 1))
    findings, overlap = judge(hits)
    assert overlap == pytest.approx(best)
    assert [finding.rule for finding in findings] == ["window"] * int(best >= 0.5)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.lists(st.integers(0, 2**64 - 1)))
def test_sorted_hashes_contain_what_they_hold(held, probes):
    hashes = np.unique(np.array(held, np.uint64))
    values = np.array([*held, *probes], np.uint64)
    found = SortedHashes(hashes).contains(values)
    assert found.tolist() == [int(value) in set(held) for value in values]


def test_the_bloom_filter_misses_nothing_and_joins_only_its_equals(corpus):
    generator = np.random.default_rng(1)
    values = generator.integers(0, 2**64, 20_000, dtype=np.uint64)
    first, second = BloomFilter(20_000), BloomFilter(20_000)
    assert first.num_bits / 20_000 == pytest.approx(43.13, abs=0.01) and first.num_probes == 30
    first.add(values[:10_000])
    second.add(values[10_000:])
    first.merge(second)
    assert first.contains(values).all()
    assert first.contains(generator.integers(0, 2**64, 100_000, dtype=np.uint64)).sum() <= 2
    with pytest.raises(UsageError, match="cannot be joined"):
        first.merge(BloomFilter(10_000))
    folder, sources, *_ = corpus
    find(folder, sources)
    path = next((folder / "attributes").glob("eval_index_*"))
    array, bloom = EvaluationIndex(path), EvaluationIndex(path, max_array_bytes=0)
    probes = np.concatenate([array.windows.hashes, values])
    assert (array.contains(probes) == bloom.contains(probes)).all()


def test_precision_on_a_labelled_sample():
    flagged = [("a", "1"), ("a", "2"), ("b", "9")]
    labels = [("a", "1", True), ("a", "2", False), ("a", "3", True), ("b", "8", False)]
    report = precision_by_source(flagged, labels)
    assert (report["a"]["precision"], report["a"]["recall"]) == (0.5, 0.5)
    assert report["b"] == {
        **{"labelled": 1, "right": 0, "wrong": 0, "missed": 0},
        **{"precision": None, "recall": None},
    }
