import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from portolan.data.store import StoreError, TokenStore
from portolan.data.store_writing import (
    ShardPart,
    cells_of_sources,
    payload_dtype,
    store_stage,
    write_store,
)
from portolan.data.tokenizer import BoundaryPolicy, DocumentTokenizer, token_bytes

INPUTS = ["0" * 16]


def read_texts(shards):
    return [row for path in shards for row in pq.read_table(path).to_pylist()]


def test_cells_hold_the_documents_in_id_order(store, corpus, tokenizer):
    assert list(store.cells) == ["manual", "manual/log", "web"]
    for key, shards in corpus:
        rows, cell = read_texts(shards), store.cells[key]
        encoded = tokenizer.encode_documents([row["text"] for row in rows])
        assert len(cell.shards) > 1
        assert cell.num_documents == len(rows)
        assert cell.num_tokens == sum(map(len, encoded))
        assert cell.text_bytes == sum(len(row["text"].encode()) for row in rows)
        stored = np.concatenate([shard.tokens for shard in cell.shards])
        assert stored.dtype == np.uint16
        assert np.array_equal(stored, np.concatenate(encoded))
        ids = [shard.ids[i].tobytes().hex() for shard in cell.shards for i in range(len(shard.ids))]
        assert ids == sorted(row["id"] for row in rows)


def test_counts_of_manifest_and_shards_agree(store):
    manifest = json.loads((store.folder / "manifest.json").read_text())
    assert manifest["tokens"] == sum(store.tokens_by_cell.values())
    assert manifest["documents"] == sum(cell.num_documents for cell in store.cells.values())
    assert manifest["store_digest"] == store.digest
    for entry in manifest["shards"]:
        content = (store.folder / entry["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            entry["bytes"],
            entry["sha256"],
        )
        assert entry["tokens"] <= 3000
    store.verify()


def test_writing_again_gives_the_same_bytes(tmp_path, store, corpus, tokenizer):
    again = write_store(
        tmp_path, cells_of_sources(corpus[::-1]), tokenizer, inputs=INPUTS, shard_tokens=3000
    )
    assert again.digest == store.digest
    names = sorted(path.relative_to(store.folder) for path in store.folder.rglob("*"))
    assert names == sorted(path.relative_to(again.folder) for path in again.folder.rglob("*"))
    for name in names:
        if (store.folder / name).is_file():
            assert (store.folder / name).read_bytes() == (again.folder / name).read_bytes()


def test_a_complete_store_is_opened_and_not_written(tmp_path, corpus, tokenizer):
    cells = cells_of_sources(corpus)
    first = write_store(tmp_path, cells, tokenizer, inputs=INPUTS)
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    for _, shards in corpus:
        assert all(path.is_file() for path in shards)
    second = write_store(tmp_path, {k: [(k, [])] for k in cells}, tokenizer, inputs=INPUTS)
    assert second.folder == first.folder
    assert (second.folder / "manifest.json").stat().st_mtime_ns == stamp


def test_shard_size_changes_files_and_key_but_not_tokens(tmp_path, store, corpus, tokenizer):
    whole = write_store(tmp_path, cells_of_sources(corpus), tokenizer, inputs=INPUTS)
    assert whole.key != store.key
    assert whole.tokens_by_cell == store.tokens_by_cell
    for name, cell in whole.cells.items():
        assert len(cell.shards) == 1
        counts = store.cells[name].count_tokens(320)
        assert np.array_equal(cell.count_tokens(320), counts)
        assert counts.sum() == cell.num_tokens


def test_everything_that_changes_bytes_is_in_the_key(corpus, tokenizer):
    cells = cells_of_sources(corpus)
    base = store_stage(cells, tokenizer, inputs=INPUTS).key
    other_policy = DocumentTokenizer(tokenizer.content, BoundaryPolicy("document", "none"))
    other_bytes = DocumentTokenizer(tokenizer.content + b"\n")
    keys = {
        base,
        store_stage(cells, other_policy, inputs=INPUTS).key,
        store_stage(cells, other_bytes, inputs=INPUTS).key,
        store_stage(cells, tokenizer, inputs=["1" * 16]).key,
        store_stage(cells, tokenizer, inputs=INPUTS, shard_tokens=1000).key,
        store_stage(dict(list(cells.items())[:2]), tokenizer, inputs=INPUTS).key,
    }
    assert len(keys) == 6
    assert store_stage(cells, tokenizer, inputs=INPUTS).key == base


def test_a_cell_of_two_sources_is_merged_by_id(tmp_path, corpus, tokenizer):
    cells = {"c00q0": [one for parts in cells_of_sources(corpus).values() for one in parts]}
    both = write_store(tmp_path, cells, tokenizer, inputs=INPUTS).cells["c00q0"]
    rows = sorted((row["id"], key) for key, shards in corpus for row in read_texts(shards))
    found = [(span.document_id, span.source) for span in both.documents(0, both.num_tokens)]
    assert found == rows
    lengths = {key: [0, 0] for key, _ in corpus}
    for span in both.documents(0, both.num_tokens):
        lengths[span.source][0] += 1
        lengths[span.source][1] += span.stop - span.start
    assert both.count_sources() == {key: tuple(count) for key, count in lengths.items()}


def test_a_cell_can_be_some_row_groups_of_a_shard(tmp_path, corpus, tokenizer):
    rows = read_texts(dict(corpus)["web"])
    path = tmp_path / "part.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    parts = {"c00": [("web", [ShardPart(path, 0, 2)])], "c01": [("web", [ShardPart(path, 2)])]}
    store = write_store(tmp_path, parts, tokenizer, inputs=INPUTS)
    found = {
        name: [span.document_id for span in cell.documents(0, cell.num_tokens)]
        for name, cell in store.cells.items()
    }
    ids = [row["id"] for row in rows]
    assert found == {"c00": ids[:100], "c01": ids[100:]}


def test_the_lists_that_a_person_made_are_in_the_key(corpus, tokenizer):
    cells = cells_of_sources(corpus)
    keys = {
        store_stage(cells, tokenizer, inputs=INPUTS, choices=choices).key
        for choices in (None, {"exempt_sources": ["web"]}, {"exempt_sources": ["manual"]})
    }
    assert len(keys) == 3


def test_rows_and_documents_across_shards(store, corpus, tokenizer):
    cell = store.cells["manual/log"]
    shards = dict(corpus)["manual/log"]
    encoded = tokenizer.encode_documents([row["text"] for row in read_texts(shards)])
    flat = np.concatenate(encoded)
    owner = np.repeat(np.arange(len(encoded)), [len(ids) for ids in encoded])
    ids = [row["id"] for row in read_texts(shards)]
    length = 4000
    for start in (0, 1, 57, 2990, 3000, len(flat) - length):
        tokens, segments = np.empty(length, np.int32), np.empty(length, np.int32)
        cell.read_row(start, tokens, segments)
        assert np.array_equal(tokens, flat[start : start + length])
        assert np.array_equal(segments, owner[start : start + length] - owner[start])
        spans = cell.documents(start, start + length)
        assert [s.document_id for s in spans] == [
            ids[i] for i in range(owner[start], owner[start + length - 1] + 1)
        ]
        assert (spans[0].start, spans[-1].stop) == (0, length)
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    with pytest.raises(IndexError):
        cell.documents(0, cell.num_tokens + 1)


def test_bytes_of_tokens_are_the_bytes_of_the_text(store, tokenizer):
    lengths = token_bytes(tokenizer)
    for cell in store.cells.values():
        assert int(lengths @ cell.count_tokens(320)) == cell.text_bytes


def test_payload_type_follows_the_vocabulary():
    assert payload_dtype(65_536) == np.uint16
    assert payload_dtype(65_537) == np.uint32


def copy(store, folder):
    shutil.copytree(store.folder, folder)
    return folder


def test_a_missing_or_cut_shard_is_refused(store, tmp_path):
    folder = copy(store, tmp_path / "a")
    next(folder.rglob("*.arrow")).unlink()
    with pytest.raises(StoreError, match="missing or cut"):
        TokenStore(folder)
    folder = copy(store, tmp_path / "b")
    with next(folder.rglob("*.arrow")).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(StoreError, match="missing or cut"):
        TokenStore(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match="manifest"):
        TokenStore(folder)


def test_a_changed_byte_is_found(store, tmp_path):
    folder = copy(store, tmp_path / "a")
    path = sorted(folder.rglob("*.arrow"))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        TokenStore(folder).verify()


def test_counts_that_disagree_are_refused(store, tmp_path):
    for number, change in enumerate(
        [
            lambda manifest: manifest["shards"][0].update(tokens=1),
            lambda manifest: manifest["cells"][0].update(documents=1),
            lambda manifest: manifest["params"].update(bos="none"),
        ]
    ):
        folder = copy(store, tmp_path / str(number))
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(StoreError):
            _ = TokenStore(folder).cells


def test_ids_out_of_order_and_empty_documents_are_refused(tmp_path, tokenizer):
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"id": ["f" * 32, "0" * 32], "text": ["a", "b"]}), path)
    with pytest.raises(StoreError, match="sorted by id"):
        write_store(tmp_path / "t", {"web": [("web", [ShardPart(path)])]}, tokenizer, inputs=INPUTS)
    plain = DocumentTokenizer(tokenizer.content, BoundaryPolicy("none", "none"))
    pq.write_table(pa.table({"id": ["0" * 32], "text": [""]}), path)
    with pytest.raises(StoreError, match="no tokens"):
        write_store(tmp_path / "t", {"web": [("web", [ShardPart(path)])]}, plain, inputs=INPUTS)
    assert list((tmp_path / "t").iterdir()) == []


def test_a_cell_without_documents_is_marked_empty(tmp_path, tokenizer):
    path = tmp_path / "part.parquet"
    pq.write_table(
        pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}), path
    )
    empty = write_store(tmp_path, {"web": [("web", [ShardPart(path)])]}, tokenizer, inputs=INPUTS)
    assert empty.manifest["cells"][0]["status"] == "empty"
    assert empty.tokens_by_cell == {"web": 0}


KILLED = """
import os, pathlib, signal, sys
import portolan.data.store_writing as store
from portolan.data.tokenizer import DocumentTokenizer
original, calls = store._write_shard, []
def write(*arguments):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
store._write_shard = write
tokenizer = DocumentTokenizer(pathlib.Path(sys.argv[2]).read_bytes())
shards = [store.ShardPart(pathlib.Path(p)) for p in sys.argv[3:]]
cells = {"manual/log": [("manual/log", shards)]}
store.write_store(pathlib.Path(sys.argv[1]), cells, tokenizer, inputs=["0" * 16], shard_tokens=3000)
"""


def test_a_killed_writer_leaves_nothing_that_is_trusted(tmp_path, corpus, tokenizer):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.content)
    shards = dict(corpus)["manual/log"]
    target = tmp_path / "tokens"
    arguments = [str(target), str(tmp_path / "tokenizer.json"), *map(str, shards)]
    result = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=os.environ)
    assert result.returncode == -signal.SIGKILL
    assert [path.name[0] for path in target.iterdir()] == ["."]
    with pytest.raises(StoreError):
        TokenStore(next(target.iterdir()))
    store = write_store(
        target,
        {"manual/log": [("manual/log", [ShardPart(path) for path in shards])]},
        tokenizer,
        inputs=INPUTS,
        shard_tokens=3000,
    )
    store.verify()
    assert list(target.iterdir()) == [store.folder]
