"""Normalising: whitespace, ids, shards, in-source duplicates, byte caps, and equal bytes."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from portolan.data import normalize, normalized_shards
from portolan.data.documents import document_id, shard_of
from portolan.data.engine import Engine, LocalExecutor
from portolan.data.normalize import cut_whitespace, location_rank, normalize_source
from portolan.data.sources import DigestCache, resolve_source
from portolan.errors import UsageError
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings


def run(
    folder: Path,
    *,
    workers=1,
    seed=0,
    task_bytes=1 << 29,
    max_document_bytes=1 << 24,
    out="out",
    **source,
):
    source = {"key": "notes", "kind": "text", "license_spdx": "MIT", **source}
    settings = DataSettings(
        sources=(SourceSettings(**source),), seed=seed, max_document_bytes=max_document_bytes
    )
    resolved = resolve_source(settings.sources[0], settings, folder, DigestCache(folder / out))
    with Engine(LocalExecutor(workers), task_bytes=task_bytes) as engine:
        stage, manifest, _ = normalize_source(engine, resolved, seed, folder / out)
    return stage, manifest


def rows_of(stage: Path, folder="") -> list[dict]:
    shards = sorted((stage / folder).glob("part-*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def write_texts(folder: Path, texts: dict[str, str | bytes]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_whitespace_runs():
    assert cut_whitespace("a" + " " * 200 + "b") == ("a" + " " * 128 + "b", True)
    assert cut_whitespace("\n" * 100 + " " * 100) == ("\n" * 100 + " " * 28, True)
    assert cut_whitespace("a" + " " * 128 + "b") == ("a" + " " * 128 + "b", False)


@given(st.lists(st.tuples(st.sampled_from("a \n\t\x1c\u2003\x85é"), st.integers(0, 300))))
@example([("a", 7), (" ", 129), ("a", 1)])
@example([("a", 1), ("\u2003", 128), ("a", 1)])
def test_whitespace_equals_the_plain_definition(runs):
    text = "".join(character * count for character, count in runs)
    parts = re.split(r"(\s+)", text)
    assert all(part.isspace() for part in parts[1::2])
    expected = "".join(part[:128] if part.isspace() else part for part in parts)
    assert cut_whitespace(text) == (expected, expected != text)


def test_rows_ids_and_counts(tmp_path):
    write_texts(
        tmp_path / "in",
        {
            "b.txt": "same",
            "a/c.txt": "same",
            "wide.md": "x" + " " * 500 + "y",
            "empty.txt": "",
            "blank.txt": " \n\t ",
            "zeros.bin": bytes(100),
            "latin.txt": b"caf\xe9",
            "long.txt": "z" * 2000,
            ".hidden": "hidden",
        },
    )
    stage, manifest = run(tmp_path, path="in", max_document_bytes=1000)
    rows = rows_of(stage)
    assert [row["id"] for row in rows] == sorted(document_id(row["text"]) for row in rows)
    assert {row["text"] for row in rows} == {"same", "x" + " " * 128 + "y"}
    kept = next(row for row in rows if row["text"] == "same")
    assert (kept["path"], kept["row"], kept["license"]) == ("a/c.txt", 0, "MIT")
    assert [(row["path"], row["reason"]) for row in rows_of(stage, "dups")] == [
        ("b.txt", "source_dup")
    ]
    assert manifest["counts"] == {
        "read": 8,
        "dropped": {"binary": 1, "empty": 2, "invalid_utf8": 1, "source_dup": 1, "too_long": 1},
        "kept": 2,
        "kept_text_bytes": 134,
        "whitespace_cut": 1,
        "input_files": 8,
        "input_bytes": sum(p.stat().st_size for p in (tmp_path / "in").glob("**/[!.]*.*")),
    }
    assert manifest["examples"]["empty"] == ["blank.txt#0", "empty.txt#0"]
    assert str(tmp_path) not in (stage / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a.txt": bytes(100)}, r"'notes': nothing remains of 1 documents \(1 binary; .*a\.txt#0"),
        ({"a.txt": " ", "b.txt": b"\xff"}, r"of 2 documents \(1 empty, 1 invalid_utf8"),
        ({"a.txt": "x" * 99}, r"1 too_long"),
    ],
)
def test_nothing_left_is_an_error_and_leaves_nothing(tmp_path, texts, message):
    write_texts(tmp_path / "in", texts)
    with pytest.raises(UsageError, match=message):
        run(tmp_path, path="in", max_document_bytes=50)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["input-digests.json"]


def test_an_empty_folder_is_an_error(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(UsageError, match="source 'notes': no files in 'in'"):
        run(tmp_path, path="in")
    (tmp_path / "in" / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"no files in 'in' that end with \.jsonl, \.json"):
        run(tmp_path, path="in", kind="jsonl")


def test_a_wrong_text_field_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 3)
    with pytest.raises(UsageError, match=r"nothing remains of 3 documents \(3 missing_text"):
        run(tmp_path, path="a.jsonl", kind="jsonl")


def test_a_wrong_id_field_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UsageError, match="no document has the field 'uid'"):
        run(tmp_path, path="a.jsonl", kind="jsonl", id_field="uid")


def test_lone_surrogates_are_dropped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}\n{"text": "fine", "x": "\\ud800"}\n')
    _, manifest = run(tmp_path, path="a.jsonl", kind="jsonl")
    assert manifest["counts"]["dropped"] == {"invalid_unicode": 1}
    assert manifest["counts"]["kept"] == 1


def test_content_key_keeps_the_first_row_of_each_key(tmp_path):
    rows = [
        {"text": "v1", "repo": "a", "name": "x"},
        {"text": "v2", "repo": "a", "name": "x"},
        {"text": "v3", "repo": "b", "name": "x"},
        {"text": "v4", "repo": "b"},
        {"text": "v5", "repo": "b"},
        {"text": "v1", "repo": "c", "name": "y"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage, manifest = run(tmp_path, path=".", kind="jsonl", content_key=("repo", "name"))
    assert {row["text"] for row in rows_of(stage)} == {"v1", "v3", "v4", "v5"}
    assert manifest["counts"]["dropped"] == {"content_key_dup": 1, "source_dup": 1}


def corpus(folder: Path, count=60, seed=1) -> list[str]:
    generator = random.Random(seed)
    words = ["the", "chart", "shows", "a", "coast", "with", "many", "harbours", "and", "winds"]
    texts = [" ".join(generator.choices(words, k=generator.randint(5, 80))) for _ in range(count)]
    write_texts(folder, {f"{i % 7}/{i:03d}.txt": text for i, text in enumerate(texts)})
    return texts


def files_of(stage: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(stage)): path.read_bytes()
        for path in sorted(stage.rglob("*"))
        if path.is_file()
    }


def test_shards_partition_by_id(tmp_path, monkeypatch):
    texts = corpus(tmp_path / "in")
    monkeypatch.setattr(normalize, "INPUT_BYTES_PER_SHARD", sum(map(len, texts)) // 5)
    monkeypatch.setattr(normalize, "SPOOL_ROWS", 7)
    monkeypatch.setattr(normalize, "TASK_FILES", 11)
    stage, manifest = run(tmp_path, path="in")
    shards = [entry for entry in manifest["shards"] if entry["name"].startswith("part-")]
    assert [entry["name"] for entry in shards] == [
        f"part-0000{i}-of-00005.parquet" for i in range(5)
    ]
    for index, entry in enumerate(shards):
        ids = pq.read_table(stage / entry["name"])["id"].to_pylist()
        assert ids == sorted(ids)
        assert all(shard_of(name, 5) == index for name in ids)
    rows = rows_of(stage)
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert Counter(row["text"] for row in rows) == Counter(set(texts))
    assert not (stage / "spool").exists()


def test_workers_do_not_change_bytes(tmp_path, monkeypatch):
    corpus(tmp_path / "in")
    monkeypatch.setattr(normalize, "TASK_FILES", 5)
    one, manifest = run(tmp_path, path="in", max_bytes=3000, out="one")
    two, _ = run(tmp_path, path="in", max_bytes=3000, out="two", workers=2)
    assert manifest["counts"]["dropped"]["not_chosen"] > 30
    assert files_of(one) == files_of(two)


def test_cap_takes_the_smallest_hashes_whichever_reader(tmp_path):
    texts = corpus(tmp_path / "in", count=200)
    stage, manifest = run(tmp_path, path="in", max_bytes=10_000, seed=5)
    taken = sum(len(row["text"]) for row in rows_of(stage))
    assert 9_900 <= taken <= 10_000
    counts = manifest["counts"]
    assert counts["read"] == 200 == counts["kept"] + sum(counts["dropped"].values())

    names = [f"{i % 7}/{i:03d}.txt" for i in range(200)]
    order = sorted(range(200), key=lambda i: location_rank(5, "notes", names[i]))
    expected, used = set(), 0
    for i in order:
        if used * 100 < 10_000 * 99 and used + len(texts[i]) <= 10_000:
            expected.add(texts[i])
            used += len(texts[i])
    assert {row["text"] for row in rows_of(stage)} == expected

    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    stage, manifest = run(tmp_path, path="a.jsonl", kind="jsonl", max_bytes=10_000, out="rows")
    assert 9_900 <= manifest["counts"]["kept_text_bytes"] <= 10_000
    assert manifest["counts"]["dropped"]["not_chosen"] > 0


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"category": "math"}, True),
        ({"seed": 9}, True),
        ({"max_bytes": 10**6}, False),
        ({"key": "others"}, False),
        ({"license_spdx": "ISC"}, False),
        ({"max_document_bytes": 99}, False),
        ({"content_key": ("name",)}, False),
        ({"extensions": (".txt",)}, True),
    ],
)
def test_key_changes_with_what_changes_bytes(tmp_path, change, same):
    write_texts(tmp_path / "in", {"a.txt": "one", "b.txt": "two"})
    before, _ = run(tmp_path, path="in")
    after, _ = run(tmp_path, path="in", **change)
    assert (before.name.rsplit("_")[-1] == after.name.rsplit("_")[-1]) == same


def test_content_and_not_place_or_time_decides_the_key(tmp_path):
    write_texts(tmp_path / "in", {"a.txt": "one"})
    write_texts(tmp_path / "moved/to", {"a.txt": "one"})
    before, _ = run(tmp_path, path="in")
    assert run(tmp_path, path="moved/to")[0] == before
    assert run(tmp_path, path=str(tmp_path / "in"))[0] == before
    (tmp_path / "in/a.txt").write_text("two")
    assert run(tmp_path, path="in")[0] != before


def test_urls_give_the_bytes_of_a_folder(tmp_path):
    write_texts(tmp_path / "in", {"a.txt": "one", "b/c.txt": "two"})
    system = fsspec.filesystem("memory")
    system.pipe({"/normalize/a.txt": b"one", "/normalize/b/c.txt": b"two"})
    local, _ = run(tmp_path, path="in", out="local")
    remote, _ = run(tmp_path, path="memory://normalize", out="remote")
    assert files_of(local) == files_of(remote)
    system.rm("/normalize", recursive=True)


@pytest.mark.parametrize(
    "options",
    [
        {"path": "in"},
        {"path": "in", "max_bytes": 3000},
        {"path": "rows.jsonl", "kind": "jsonl", "content_key": ("repo",), "max_bytes": 4000},
    ],
)
def test_memory_does_not_change_bytes(tmp_path, monkeypatch, options):
    texts = corpus(tmp_path / "in")
    rows = [{"text": text, "repo": str(i % 20)} for i, text in enumerate(texts * 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(normalize, "INPUT_BYTES_PER_SHARD", sum(map(len, texts)) // 3)
    plenty, manifest = run(tmp_path, out="plenty", **options)
    assert any(entry["rows"] for entry in manifest["shards"])
    monkeypatch.setattr(normalize, "SPOOL_ROWS", 7)
    monkeypatch.setattr(normalized_shards, "KEYS_PER_PASS", 50)
    little, _ = run(tmp_path, out="little", task_bytes=2000, **options)
    assert files_of(plenty) == files_of(little)


def test_a_source_that_disappears_goes_on_where_it_was(tmp_path, monkeypatch):
    texts = {f"{name}.txt": f"text {name}" for name in "abcd"}
    write_texts(tmp_path / "in", texts)
    expected, _ = run(tmp_path, path="in", out="expected")
    monkeypatch.setattr(normalize, "TASK_FILES", 1)
    plain, read = normalize.READERS["text"], []

    def vanish(file, options):
        if file.path == "c.txt":
            (tmp_path / "in/c.txt").unlink()
        yield from note(file, options)

    def note(file, options):
        read.append(file.path)
        yield from plain(file, options)

    monkeypatch.setitem(normalize.READERS, "text", vanish)
    with pytest.raises(UsageError, match=r"notes, task read-000002: .*c\.txt"):
        run(tmp_path, path="in")
    write_texts(tmp_path / "in", texts)
    monkeypatch.setitem(normalize.READERS, "text", note)
    stage, _ = run(tmp_path, path="in")
    assert read == ["a.txt", "b.txt", "c.txt", "c.txt", "d.txt"]
    assert files_of(stage) == files_of(expected)
