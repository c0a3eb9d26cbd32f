"""Failures of the public system as tests: keys, states, names, moves, and what a change repeats."""

import json
import os
import random
import shutil

import pyarrow.parquet as pq
import pytest

from portolan.data.curate import curate_documents, stages_behind
from portolan.data.engine import Dataset, Engine, LocalExecutor
from portolan.errors import PortolanError, UsageError
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings

TOPICS = {
    "sea": "ship harbour tide wind sail rope chart star port mast fog anchor deck hull".split(),
    "field": "wheat plough soil rain barn horse seed harvest fence mill grain cow hay oats".split(),
}
KEYS = ("a", "a/b", "c")
DOMAINS = {"domains": {"count": 2, "fine": 8, "minimum_share": 0.05, "restarts": 1}}


def text_of(seed, topic, count=90):
    words = [*TOPICS[topic], *(f"{topic}{i}" for i in range(400))]
    return " ".join(random.Random(f"{topic}{seed}").choices(words, k=count))


def write_inputs(folder, num_documents=60):
    """Sources of two topics each; `a` and `a/b` share ten documents, which lie in `shared` too."""
    for index, key in enumerate(KEYS):
        (folder / "in" / str(index)).mkdir(parents=True)
        for i in range(num_documents):
            topic = ("sea", "field")[i % 2]
            seed = f"{i}" if i < 10 and key != "c" else f"{key}{i}"
            (folder / "in" / str(index) / f"{i:03d}.txt").write_text(text_of(seed, topic))


def settings_of(keys=KEYS, **tables):
    sources = [
        {"key": key, "kind": "text", "path": f"in/{KEYS.index(key)}", "license_spdx": "MIT"}
        for key in keys
    ]
    fields = {"sources": sources, "heldout_documents_per_domain": 4, **tables}
    return DataSettings.model_validate_json(json.dumps(fields))


def ids_of(dataset):
    return [row["id"] for shard in dataset.shards for row in pq.read_table(shard.path).to_pylist()]


@pytest.fixture(scope="module")
def curated(tmp_path_factory):
    """A project with domains, curated once; only to be read or copied."""
    folder = tmp_path_factory.mktemp("project")
    write_inputs(folder)
    return folder, curate_documents(settings_of(**DOMAINS), folder)


def test_no_attribute_crosses_from_a_to_a_b(curated):
    _, corpus = curated
    a, a_b, c = corpus.sources
    assert [source.key for source in corpus.sources] == list(KEYS)
    duplicates = next(p for p in corpus.manifests if p.parent.name.startswith("dup_doc"))
    dup_doc = Dataset.open(duplicates.parent)
    assert [len(ids_of(dup_doc.within(name))) for name in ("a", "a~b", "c")] == [0, 10, 0]
    assert (a.dropped.get("global_dup"), a_b.dropped["global_dup"]) == (None, 10)
    assert "global_dup" not in c.dropped
    folders = {part.path.parent.name for source in corpus.sources for parts in
               source.cells.values() for part in parts}  # fmt: skip
    assert folders == {"a", "a~b", "c"}


def test_equal_ids_of_two_sources_stay_two_rows(curated):
    _, corpus = curated
    for source in corpus.normalized:
        table = pq.read_table(source.shard_paths[0])
        assert table.num_rows == source.kept == 60
    first, second = (set(ids_of(Dataset(s.folder, s.manifest))) for s in corpus.normalized[:2])
    assert len(first & second) == 10
    # The survivor belongs to the first key; the other row names its reason.
    removed = corpus.train.within("removed")
    assert first & second <= {
        row["id"]
        for shard in removed.within("a~b").shards
        for row in pq.read_table(shard.path).to_pylist()
        if row["reason"] == "global_dup"
    }


def test_cells_are_domains_and_hold_every_document_once(curated):
    _, corpus = curated
    assert list(corpus.cells) == ["c00", "c01"]
    found = []
    for name, sources in corpus.cells.items():
        topics = []
        for key, parts in sources:
            for part in parts:
                groups = range(part.begin, part.end)
                with pq.ParquetFile(part.path) as file:
                    rows = file.read_row_groups(list(groups)).to_pylist()
                assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
                found += [(key, row["id"]) for row in rows]
                topics += ["sea" in row["text"] for row in rows]
        assert min(sum(topics), len(topics) - sum(topics)) < 0.1 * len(topics), name
    assert len(set(found)) == len(found) == sum(s.train_documents for s in corpus.sources)


def test_a_moved_project_and_other_workers_repeat_nothing(curated, tmp_path):
    folder, corpus = curated
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved, copy_function=shutil.copy2)
    before = {path: path.stat().st_mtime_ns for path in (moved / "corpus").rglob("*")}
    with Engine(LocalExecutor(2)) as engine:
        again = curate_documents(settings_of(**DOMAINS), moved, engine=engine)
    assert again.skipped
    assert again.key == corpus.key
    assert {path: path.stat().st_mtime_ns for path in (moved / "corpus").rglob("*")} == before
    for path in (moved / "corpus").rglob("*"):
        if path.is_file() and path.name != "input-digests.json":
            assert str(folder).encode() not in path.read_bytes(), path


def test_a_new_source_repeats_no_stage_of_one_source(curated, tmp_path):
    folder, _ = curated
    shutil.copytree(folder, tmp_path / "p", copy_function=shutil.copy2)
    (tmp_path / "p/in/3").mkdir()
    for i in range(30):
        (tmp_path / "p/in/3" / f"{i}.txt").write_text(text_of(f"new{i}", "sea"))
    settings = settings_of(**DOMAINS)
    extra = SourceSettings(key="d", kind="text", path="in/3", license_spdx="MIT")
    own = ("minhash~", "embedding~", "domain~", "a_", "a~b_", "c_")
    stages = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "p/corpus").glob("*/*/manifest.json")
        if path.parent.name.startswith((*own, "domains_", "embedder_"))
    }
    assert len(stages) == 4 * len(KEYS) + 2
    new = settings.model_copy(update={"sources": (*settings.sources, extra)})
    corpus = curate_documents(new, tmp_path / "p")
    assert {path: path.stat().st_mtime_ns for path in stages} == stages
    assert set(stages) <= set(corpus.manifests)
    assert corpus.sources[-1].train_documents > 20


def test_empty_missing_and_damaged_are_three_states(curated, tmp_path):
    folder, corpus = curated
    shutil.copytree(folder, tmp_path / "p", copy_function=shutil.copy2)
    path = next(p for p in corpus.manifests if p.parent.name.startswith("dup_doc"))
    stage = tmp_path / "p" / path.parent.relative_to(folder)
    dup_doc = Dataset.open(stage)
    assert [s.status for s in dup_doc.within("a").shards] == ["empty"]
    assert [s.status for s in dup_doc.within("a~b").shards] == ["complete"]
    assert ids_of(dup_doc.within("a")) == []
    # A missing file is no empty one: reading fails, and curation builds the stage anew.
    empty = dup_doc.within("a").shards[0].path
    empty.unlink()
    with pytest.raises(PortolanError, match="is missing"):
        list(dup_doc.within("a").shards[0].read())
    again = curate_documents(settings_of(**DOMAINS), tmp_path / "p")
    assert empty.is_file()
    assert again.key == corpus.key
    # A damaged one of the right size is named when it is read.
    shard = dup_doc.within("a~b").shards[0]
    shard.path.write_bytes(bytes(shard.path.stat().st_size))
    with pytest.raises(PortolanError, match="is damaged"):
        list(shard.read())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fuzzy": {"exempt_sources": ["b"]}}, "exempt_sources names 'b'"),
        ({"fuzzy": {"source_rank": ["c", "d"]}}, "source_rank names 'd'"),
        (
            {
                "fuzzy": {
                    "reviewed_losses": [
                        {"source": "x", "reason": "r", "reviewer": "me", "max_loss": 0.9}
                    ]
                }
            },
            "reviewed_losses names 'x'",
        ),
    ],
)
def test_a_list_that_names_an_unknown_source_is_refused(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        curate_documents(settings_of(**change), tmp_path)


def test_a_source_that_vanishes_in_the_middle_is_named_and_resumed(curated, tmp_path, monkeypatch):
    folder, corpus = curated
    shutil.copytree(folder / "in", tmp_path / "in")
    gone = tmp_path / "in/1/030.txt"
    content = gone.read_bytes()
    from portolan.data import curate

    original = curate.normalize_source

    def remove_first(engine, source, *arguments):
        if source.key == "a/b":
            gone.unlink()
        return original(engine, source, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(curate, "normalize_source", remove_first)
        with pytest.raises(UsageError, match=r"cannot read .*030\.txt"):
            curate_documents(settings_of(**DOMAINS), tmp_path)
    gone.write_bytes(content)
    done = next((tmp_path / "corpus/documents").glob("a_*/manifest.json"))
    stamp = done.stat().st_mtime_ns
    assert curate_documents(settings_of(**DOMAINS), tmp_path).key == corpus.key
    assert done.stat().st_mtime_ns == stamp


def other_value(name, value):
    """A value that the key accepts and that differs from the given one."""
    choices = {
        "signature": "reference", "shingle_unit": "char", "fold": "none", "ngram_hash": "blake2b",
        "backend": None, "labeller": None, "containment": 0.75, "minimum_share": 0.2,
        "sample_documents": 150, "exempt_sources": ["a"], "source_rank": ["c", "a"], "count": 3,
        "fine": 10,
        "max_document_bytes": 400, "heldout_fraction_max": 0.03, "heldout_bytes_per_domain": 700,
    }  # fmt: skip
    if name in choices:
        return choices[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return None


def parameters():
    """(dotted name, new value) of the parameters of steps that run offline."""
    settings = settings_of(**DOMAINS)
    for name, value in settings.model_dump().items():
        if isinstance(value, dict) and name != "quality":
            for key, inner in value.items():
                if (other := other_value(key, inner)) is not None:
                    yield name, key, other
        elif not isinstance(value, dict) and (other := other_value(name, value)) is not None:
            yield "", name, other


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name", "value"), list(parameters()))
def test_every_parameter_changes_the_key_or_is_refused(curated, tmp_path, table, name, value):
    """R7: a parameter that is accepted and never read does not exist."""
    folder, corpus = curated
    shutil.copytree(folder, tmp_path / "p", copy_function=os.link)
    tables = {key: dict(fields) for key, fields in DOMAINS.items()}
    if table:
        tables.setdefault(table, {})[name] = value
    else:
        tables[name] = value
    settings = settings_of(**tables)
    shutil.rmtree(tmp_path / "p/corpus/fits", ignore_errors=name in ("sample_documents", "seed"))
    try:
        changed = curate_documents(settings, tmp_path / "p")
    except UsageError:
        return
    assert changed.key != corpus.key


def test_the_stages_behind_a_corpus_are_all_there(curated):
    _, corpus = curated
    names = {path.parent.name.rsplit("_", 1)[0].split("~")[0] for path in corpus.manifests}
    assert {"a", "c", "dup_doc", "heldout", "heldout_documents", "contaminated"} <= names
    assert {"fuzzy_dup", "minhash", "embedding", "domain", "domains", "train"} <= names
    assert stages_behind(corpus.folder, []) == []
