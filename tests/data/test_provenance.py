"""The provenance table: hashes, tokens filled in later, and both file formats."""

import csv
import hashlib

import pyarrow.parquet as pq

from portolan.canonical import canonical
from portolan.data.provenance import (
    COLUMNS,
    hash_row,
    provenance_row,
    read_provenance,
    with_tokens,
    write_provenance,
)
from portolan.data.sources import DigestCache, resolve_source
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings


def row_of(tmp_path, key="notes", **fields):
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in/a.txt").write_text("ahoy")
    source = SourceSettings(key=key, kind="text", path="in", license_spdx="MIT", **fields)
    settings = DataSettings(sources=(source,))
    resolved = resolve_source(source, settings, tmp_path, DigestCache(tmp_path / "corpus"))
    facts = resolved.license_facts
    return provenance_row(resolved, documents=1, text_bytes=4, license_facts=facts)


def test_row(tmp_path):
    row = row_of(tmp_path, upstream="own notes", category="math", synthetic=True, generator="m")
    assert list(row) == list(COLUMNS)
    assert (row["license_class"], row["documents"], row["bytes"]) == ("permissive", 1, 4)
    assert (row["synthetic"], row["generator"], row["tokens"]) == (True, "m", None)
    line = f"{hashlib.sha256(b'ahoy').hexdigest()}  a.txt\n"
    assert row["revision"] == hashlib.sha256(line.encode()).hexdigest()


def test_row_hash_is_stable_and_covers_every_column(tmp_path):
    row = row_of(tmp_path)
    bare = {name: value for name, value in row.items() if name != "row_hash"}
    assert row["row_hash"] == hashlib.sha256(canonical(bare)).hexdigest()
    assert hash_row(dict(reversed(row.items()))) == row["row_hash"]
    for name in bare:
        assert hash_row({**row, name: "changed"}) != row["row_hash"]


def test_tokens_change_the_hash(tmp_path):
    row = row_of(tmp_path)
    (filled,) = with_tokens([row], {"notes": 3, "other": 4})
    assert filled == {**row, "tokens": 3, "row_hash": hash_row({**row, "tokens": 3})}


def test_files(tmp_path):
    rows = [row_of(tmp_path, key=key) for key in ("b", "a/c", "B")]
    write_provenance(tmp_path, rows)
    assert [row["key"] for row in read_provenance(tmp_path)] == ["B", "a/c", "b"]
    assert read_provenance(tmp_path)[2] == rows[0]
    with (tmp_path / "provenance.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["row_hash"] for line in lines] == [
        row["row_hash"] for row in read_provenance(tmp_path)
    ]
    assert lines[0]["tokens"] == ""
    assert pq.read_schema(tmp_path / "provenance.parquet").names == list(COLUMNS)
