"""Readers: what they yield, what they drop, and what they refuse, from small and hostile files."""

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.normalize import READERS
from portolan.data.readers import (
    Drop,
    InputFile,
    RawDocument,
    ReadOptions,
    iterate_lines,
    list_files,
)
from portolan.errors import UsageError


def read(path: Path, kind: str, *, limit: int = 1 << 20, **fields) -> list[RawDocument | Drop]:
    file = InputFile(str(path), path.name, path.stat().st_size)
    return list(READERS[kind](file, ReadOptions(kind, limit, **fields)))


def write_jsonl(path: Path, rows, compress=lambda content: content) -> Path:
    path.write_bytes(compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


ROWS = [
    {"id": 7, "text": "first", "url": "a", "n": [1, 2]},
    {"id": 8, "text": "second\nline", "url": None},
]


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.jsonl", lambda content: content),
        ("a.json", lambda content: content),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.zst", zstandard.compress),
        # Members and frames one after the other are one file.
        ("b.jsonl.gz", lambda c: gzip.compress(c[:30]) + gzip.compress(c[30:])),
        ("b.jsonl.zst", lambda c: zstandard.compress(c[:30]) + zstandard.compress(c[30:])),
    ],
)
def test_jsonl(tmp_path, name, compress):
    first, second = read(write_jsonl(tmp_path / name, ROWS, compress), "jsonl", id_field="id")
    assert (first.text, first.source_id, first.row) == ("first", "7", 0)
    assert json.loads(first.extra) == {"url": "a", "n": [1, 2]}
    assert (second.text, second.source_id, second.row, second.extra) == (
        "second\nline",
        "8",
        1,
        None,
    )


def test_jsonl_drops_name_reason_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n\n{"text": null}\n{"body": "x"}\n{"text": 3}\nnot json\n[1]\n'
        b'{"text": "\xff"}\n{"text": "a\\u0000b"}\n\0\0\0\n{"text": "' + b"y" * 5000 + b'"}\n'
        b'{"text": "last"}'
    )
    items = read(path, "jsonl", limit=4096)
    assert [(item.row, getattr(item, "reason", None)) for item in items] == [
        (0, None),
        (2, "empty"),
        (3, "missing_text"),
        (4, "missing_text"),
        (5, "not_json"),
        (6, "not_json"),
        (7, "invalid_utf8"),
        (8, "binary"),
        (9, "binary"),
        (10, "too_long"),
        (11, None),
    ]


@given(st.binary(max_size=300).map(lambda b: b.replace(b"x", b"\n")), st.integers(1, 40))
def test_lines_equal_split_within_the_limit(content, limit):
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    found = list(iterate_lines(io.BytesIO(content), limit))
    assert found == [line if len(line) <= limit else None for line in expected]


def test_a_line_of_200_megabytes_is_dropped_in_little_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for _ in range(200):
            file.write(b"a" * 1_000_000)
        file.write(b'\n{"text": "after it"}\n')
    tracemalloc.start()
    items = read(path, "jsonl", limit=16 << 20)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [getattr(item, "reason", None) for item in items] == ["too_long", None]
    assert peak_bytes < 40 << 20
    assert read(path, "text", limit=16 << 20) == [Drop("too_long", "a.jsonl", 0)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(50), "binary"),
        (bytes(5000), "binary"),
        (b"caf\xe9", "invalid_utf8"),
        (b"\xed\xa0\x80", "invalid_utf8"),
        (b"x" * 101, "too_long"),
    ],
)
def test_text_drops(tmp_path, content, reason):
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt", "text", limit=100) == [Drop(reason, "a.txt", 0)]


def test_text_is_not_changed(tmp_path):
    content = "\ufeffline\r\nnext\u0301\t"
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(content.encode()))
    (document,) = read(tmp_path / "a.md.gz", "text", content_key=("name",))
    assert (document.text, document.source_id) == (content, "a.md.gz")
    assert len(document.content_key) == 32


def parquet(path: Path, table: pa.Table, compress=lambda content: content) -> Path:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2)
    path.write_bytes(compress(sink.getvalue()))
    return path


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path, kind):
    text = pa.array(["a", "b", None, "d\0", "e" * 200], pa.string()).cast(kind)
    table = pa.table({"body": text, "key": [1, 2, 3, 4, 5], "blob": [b"\1"] * 5})
    items = read(
        parquet(tmp_path / "a.parquet", table),
        "parquet",
        limit=100,
        text_field="body",
        id_field="key",
    )
    assert [item.row for item in items] == [0, 1, 2, 3, 4]
    assert (items[0].text, items[1].source_id, items[0].extra) == ("a", "2", '{"blob": "01"}')
    assert [item.reason for item in items[2:]] == ["empty", "binary", "too_long"]


def test_compressed_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet.gz", pa.table({"text": ["a", "b", "c"]}), gzip.compress)
    assert [item.text for item in read(path, "parquet")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_field": "body"}, "no column 'body'; its columns are text, n"),
        ({"text_field": "n"}, "column 'n' of .* has type int64, not text"),
        ({"id_field": "uid"}, "no column 'uid'"),
        ({"content_key": ("sha",)}, "no column 'sha'"),
    ],
)
def test_parquet_columns_are_checked(tmp_path, fields, message):
    path = parquet(tmp_path / "a.parquet", pa.table({"text": ["a"], "n": [1]}))
    with pytest.raises(UsageError, match=message):
        read(path, "parquet", **fields)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-12]),
        ("a.jsonl.gz", b"this is no gzip file"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "x"}\n' * 1000)[:-5]),
        ("a.jsonl.zst", b"this is no zstd file"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=name):
        read(tmp_path / name, "jsonl")


@pytest.mark.parametrize("content", [b"", b"PAR1 nothing", bytes(5000)])
def test_damaged_parquet(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot read .*a\.parquet"):
        read(tmp_path / "a.parquet", "parquet")


def test_walk_is_sorted_and_passes_over_hidden_names_and_folder_links(tmp_path):
    for name in ("b/z.txt", "b/.hidden", ".git/x.txt", "a.txt", "B.txt", "b.txt", "c/d/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = list_files(str(tmp_path), ())
    assert [file.path for file in found] == ["B.txt", "a.txt", "b.txt", "b/z.txt", "c/d/e.txt"]
    assert all(file.size == len(file.path) for file in found)


def test_extensions_and_single_files(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "a.JSON.zst", "a.txt", "a.gz"):
        (tmp_path / name).write_bytes(b"")
    found = [file.path for file in list_files(str(tmp_path), (".jsonl", ".json"))]
    assert found == ["a.JSON.zst", "a.jsonl", "a.jsonl.gz"]
    (only,) = list_files(str(tmp_path / "a.txt"), (".jsonl",))
    assert only.path == "a.txt"


@pytest.mark.parametrize("root", ["/no/such/folder", "nosuchprotocol://x", "memory://nothing"])
def test_a_missing_place_is_an_error(root):
    with pytest.raises(UsageError, match=r"cannot (list|open)"):
        list_files(root, ())


def test_urls_read_like_folders():
    system = fsspec.filesystem("memory")
    for name in ("b.txt", "a/c.txt", ".hidden.txt"):
        system.pipe(f"/readers/{name}", name.encode())
    files = list_files("memory://readers", (".txt",))
    assert [file.path for file in files] == ["a/c.txt", "b.txt"]
    options = ReadOptions("text", 100)
    assert [next(READERS["text"](file, options)).text for file in files] == ["a/c.txt", "b.txt"]
    system.rm("/readers", recursive=True)


def test_file_urls_read_like_paths(tmp_path):
    (tmp_path / "a.txt").write_text("ahoy")
    (file,) = list_files(tmp_path.as_uri(), ())
    (document,) = READERS["text"](file, ReadOptions("text", 100))
    assert (document.path, document.text) == ("a.txt", "ahoy")
