"""The pinned sample and the attribute made with it."""

from pathlib import Path

import pytest
from tests.data.normalized import rows_of, write_source, write_sources
from tests.data.topics import topic_texts

from portolan.curation_settings import EmbeddingSettings
from portolan.data.documents import Stage, run_stage, write_shard
from portolan.data.embedding.attribute import codes_of, embed_sources, vectors_of_sample
from portolan.data.embedding.sampling import draw_sample, quotas, ranks_of, share_out
from portolan.data.engine import Dataset, Engine, LocalExecutor
from portolan.errors import UsageError

SETTINGS = EmbeddingSettings(sample_documents=40, dimension=64)


@pytest.fixture
def texts():
    return {"a": topic_texts({"sea": 30}), "a/b": topic_texts({"court": 40}, seed=1)}


def ids_of(sample):
    return {key: [row["id"] for row in rows_of(part)] for key, part in sample.sources.items()}


def remove(corpus, source, ids):
    """A sparse attribute that removes some documents of a source."""
    import pyarrow as pa

    schema = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("gone", pa.bool_())])

    def build(folder):
        entries = []
        for path in source.shard_paths:
            rows = [{"id": name, "gone": gone} for name, gone in ids.items()]
            table = pa.Table.from_pylist(rows, schema=schema)
            name = f"{source.key.replace('/', '~')}/{path.name}"
            entries.append(write_shard(folder, name, schema, [table]))
        return entries, {}

    folder, manifest, _ = run_stage(corpus / "attributes", Stage("gone", 1, {"ids": ids}), build)
    return Dataset(folder, manifest)


def test_quotas():
    assert quotas({"a": 10, "b": 20}, 30) == {"a": 10, "b": 20}
    assert quotas({"a": 1000, "b": 3000, "c": 1001, "d": 0}, 8) == {"a": 1, "b": 5, "c": 2, "d": 0}
    assert share_out({"b": 1, "a": 1}, 3) == {"a": 2, "b": 1}


def test_the_sample_is_the_smallest_ranks_whatever_the_shards(tmp_path, texts, monkeypatch):
    monkeypatch.setattr("portolan.data.embedding.sampling.SMALL_SOURCE_ROWS", 0)
    one = draw_sample(Engine(), write_sources(tmp_path / "1", texts), [], SETTINGS, tmp_path / "1")
    shuffled = [write_source(tmp_path / "2", key, texts[key][::-1], 5) for key in ("a/b", "a")]
    two = draw_sample(Engine(), shuffled, [], SETTINGS, tmp_path / "2")
    assert ids_of(one) == ids_of(two)
    assert {key: len(ids) for key, ids in ids_of(one).items()} == {"a": 17, "a/b": 23}
    everything = [row["id"] for path in shuffled for row in rows_of(Dataset.open(path.folder))]
    ranks = dict(zip(everything, ranks_of(everything, SETTINGS.seed, "a"), strict=True))
    of_a = [row["id"] for row in rows_of(Dataset.open(shuffled[1].folder))]
    assert set(ids_of(one)["a"]) == set(sorted(of_a, key=ranks.__getitem__)[:17])


def test_a_relative_folder_keeps_its_fresh_sample(tmp_path, texts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = draw_sample(Engine(), write_sources(Path("p"), texts), [], SETTINGS, Path("p"))
    assert sorted(ids_of(sample)) == ["a", "a/b"]


def test_removed_documents_are_not_sampled(tmp_path, texts):
    (source,) = write_sources(tmp_path, {"a": texts["a"]})
    ids = [row["id"] for row in rows_of(Dataset.open(source.folder))]
    gone = remove(tmp_path, source, {ids[0]: True, ids[1]: False})
    sample = draw_sample(Engine(), [source], [gone], SETTINGS, tmp_path)
    assert ids_of(sample)["a"] == ids[1:]
    all_gone = remove(tmp_path, source, dict.fromkeys(ids, True))
    with pytest.raises(UsageError, match="no document is left"):
        draw_sample(Engine(), [source], [all_gone], SETTINGS, tmp_path, refit=True)


def test_a_new_source_changes_no_old_attribute_until_a_refit(tmp_path, texts):
    def embed(sources, refit=False):
        sample = draw_sample(Engine(), sources, [], SETTINGS, tmp_path, refit=refit)
        return sample, embed_sources(Engine(), sources, sample, SETTINGS, tmp_path)

    old = write_sources(tmp_path, texts)
    sample, before = embed(old)
    new = write_source(tmp_path, "new", topic_texts({"kitchen": 20}, seed=2))
    pinned, after = embed([*old, new])
    assert not sample.pinned and pinned.pinned and set(pinned.sources) == {"a", "a/b"}
    assert {key: after[key].key for key in before} == {key: d.key for key, d in before.items()}
    assert after["new"].num_rows == 20
    refitted, third = embed([*old, new], refit=True)
    assert "new" in refitted.sources and third["a"].key != before["a"].key
    changed = write_source(tmp_path, "a", texts["a"][1:])
    redrawn, _ = embed([changed, old[1], new])
    assert not redrawn.pinned


def test_embedding_is_dense_and_equal_for_any_number_of_workers(tmp_path, texts):
    digests = []
    for workers in (1, 2):
        corpus = tmp_path / str(workers)
        with Engine(LocalExecutor(workers)) as engine:
            sources = write_sources(corpus, texts)
            sample = draw_sample(engine, sources, [], SETTINGS, corpus)
            found = embed_sources(engine, sources, sample, SETTINGS, corpus)
        digests.append([shard["sha256"] for d in found.values() for shard in d.manifest["shards"]])
    assert digests[0] == digests[1]
    for source in sources:
        (documents, vectors) = Dataset.open(source.folder), found[source.key]
        assert [r["id"] for r in rows_of(documents)] == [r["id"] for r in rows_of(vectors)]
    collected = vectors_of_sample(Engine(), sample, found)
    assert collected.codes.shape == (sample.num_documents, 64)
    (first,) = found["a"].read(found["a"].names[0])
    rows = [collected.ids.index(name) for name in first["id"].to_pylist() if name in collected.ids]
    kept = [name in collected.ids for name in first["id"].to_pylist()]
    assert (collected.codes[rows] == codes_of(first)[kept]).all()
