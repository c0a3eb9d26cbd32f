"""Curation as a whole: accounting, disjoint held-out text, resumption, equal bytes."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from portolan.data import heldout, normalized_shards, training_documents
from portolan.data.curate import curate_documents
from portolan.data.engine import Engine, LocalExecutor
from portolan.errors import PortolanError, StorageError, UsageError
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings

VOCABULARY = [f"word{i}" for i in range(3000)]


def text_of(seed, count=120):
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def copy_of(text):
    return f"{text} one more word"


def write_inputs(folder, num_documents=60):
    """Two sources that share documents, hold near-copies of each other, and hold broken files."""
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
    for i in range(num_documents):
        (folder / "one" / f"{i:04d}.txt").write_text(text_of(i))
    rows = [{"text": text_of(i), "name": str(i)} for i in range(num_documents - 10, num_documents)]
    rows += [{"text": copy_of(text_of(i))} for i in range(num_documents // 3)]
    rows += [{"text": text_of(10_000 + i)} for i in range(num_documents)]
    (folder / "two" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "one" / "zeros.bin").write_bytes(bytes(1000))
    (folder / "one" / "broken.txt").write_bytes(b"\xff\xfe")


def settings_of(**fields):
    return DataSettings(
        sources=(
            SourceSettings(key="two", kind="jsonl", path="two", license_spdx="MIT"),
            SourceSettings(key="one", kind="text", path="one", license_spdx="CC0-1.0"),
        ),
        heldout_documents_per_domain=8,
        **fields,
    )


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "input-digests.json"
    }


def read_shards(shards):
    return [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def test_accounting_and_disjoint_heldout_text(tmp_path):
    write_inputs(tmp_path)
    steps = []
    corpus = curate_documents(settings_of(), tmp_path, progress=steps.append)
    one, two = corpus.sources
    assert (one.key, two.key) == ("one", "two")
    assert [step.step for step in steps] == [
        "list",
        *["normalise"] * 2,
        "dedup",
        "heldout",
        "decontamination",
        "near-duplicates",
        "train",
    ]
    for source in corpus.sources:
        assert source.read == sum(source.dropped.values()) + source.train_documents
        train = read_shards(source.train_shards)
        assert len(train) == source.train_documents
        assert sum(len(row["text"].encode()) for row in train) == source.train_text_bytes
        assert len(read_shards(source.heldout_shards)) == source.heldout_documents
        assert source.heldout_documents >= 6
    held = [row["text"] for source in corpus.sources for row in read_shards(source.heldout_shards)]
    copies = [text for text in map(text_of, range(20)) if not {text, copy_of(text)} & set(held)]
    assert one.dropped == {
        "binary": 1,
        "invalid_utf8": 1,
        "heldout": one.heldout_documents,
        "fuzzy_dup": len(copies),
        **near(one),
    }
    assert two.dropped == {"global_dup": 10, "heldout": two.heldout_documents, **near(two)}
    assert near(two), "near-copies of held-out documents of the other source must go"
    train = [row["text"] for source in corpus.sources for row in read_shards(source.train_shards)]
    assert set(map(copy_of, copies)) <= set(train), "the longer one of a pair stays"
    assert len(set(train)) == len(train)
    assert not set(held) & set(train)
    windows = {tuple(text.split()[i : i + 13]) for text in held for i in range(108)}
    for text in train:
        own = [tuple(text.split()[i : i + 13]) for i in range(len(text.split()) - 12)]
        assert 2 * sum(window in windows for window in own) < len(own)


def near(source):
    count = source.dropped.get("near_heldout", 0)
    return {"near_heldout": count} if count else {}


def test_a_second_run_does_nothing(tmp_path):
    write_inputs(tmp_path)
    first = curate_documents(settings_of(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")}
    second = curate_documents(settings_of(), tmp_path)
    assert (first.skipped, second.skipped) == (False, True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")} == before
    assert (second.key, second.sources, second.provenance) == (
        first.key,
        first.sources,
        first.provenance,
    )


def test_workers_order_and_place_do_not_change_bytes(tmp_path):
    write_inputs(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    settings = settings_of()
    reordered = settings.model_copy(update={"sources": settings.sources[::-1]})
    curate_documents(settings, tmp_path / "a", engine=Engine(LocalExecutor(1)))
    curate_documents(reordered, tmp_path / "b", engine=Engine(LocalExecutor(2)))
    assert files_of(tmp_path / "a/corpus") == files_of(tmp_path / "b/corpus")
    assert str(tmp_path).encode() not in b"".join(files_of(tmp_path / "a/corpus").values())


def test_a_new_source_repeats_no_step_of_another(tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "three").mkdir()
    for i in range(50):
        (tmp_path / "three" / f"{i}.txt").write_text(text_of(20_000 + i))
    settings = settings_of()
    first = curate_documents(settings, tmp_path)
    extra = SourceSettings(key="three", kind="text", path="three", license_spdx="MIT")
    steps = []
    second = curate_documents(
        settings.model_copy(update={"sources": (*settings.sources, extra)}),
        tmp_path,
        progress=steps.append,
    )
    done = {(step.step, step.source): step.skipped for step in steps}
    assert done["normalise", "one"]
    assert done["normalise", "two"]
    assert not done["normalise", "three"]
    assert not done["dedup", ""]
    assert second.key != first.key


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"heldout_documents_per_domain": 2},
        {"heldout_bytes_per_domain": 3000},
        {"heldout_fraction_max": 0.05},
    ],
)
def test_heldout_settings_change_the_key_and_not_the_documents(tmp_path, change):
    write_inputs(tmp_path, num_documents=40)
    settings = settings_of()
    first = curate_documents(settings, tmp_path)
    second = curate_documents(settings.model_copy(update=change), tmp_path)
    assert first.key != second.key
    assert first.heldout_key != second.heldout_key
    assert [s.documents_manifest for s in first.sources] == [
        s.documents_manifest for s in second.sources
    ]
    assert [read_shards(s.heldout_shards) for s in first.sources] != [
        read_shards(s.heldout_shards) for s in second.sources
    ]


def test_no_document_to_hold_out_is_an_error(tmp_path):
    write_inputs(tmp_path, num_documents=30)
    with pytest.raises(UsageError, match="no domain has a document to hold out"):
        curate_documents(settings_of(heldout_fraction_max=0.0), tmp_path)


def test_a_heldout_document_in_training_is_refused(tmp_path, monkeypatch):
    write_inputs(tmp_path, num_documents=30)
    monkeypatch.setattr(training_documents, "read_removals", lambda removals: {})
    with pytest.raises(PortolanError, match="stands in training shard"):
        curate_documents(settings_of(), tmp_path)
    assert not list((tmp_path / "corpus/documents").glob("train_*"))


def test_counts_that_do_not_add_up_are_refused(tmp_path, monkeypatch):
    write_inputs(tmp_path, num_documents=30)
    monkeypatch.setattr(heldout, "scan_shard", lambda task: (0, []))
    corpus = curate_documents(settings_of(), tmp_path)
    manifest_path = corpus.sources[0].documents_manifest
    manifest = json.loads(manifest_path.read_text())
    manifest["counts"]["read"] += 1
    manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(PortolanError, match="do not add up"):
        curate_documents(settings_of(), tmp_path)


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path, monkeypatch):
    write_inputs(tmp_path, num_documents=30)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(normalized_shards, "write_shard", full)
        with pytest.raises(StorageError, match="No space left"):
            curate_documents(settings_of(), tmp_path)
    assert all(path.name.startswith(".") for path in (tmp_path / "corpus/documents").iterdir())
    assert curate_documents(settings_of(), tmp_path).sources[0].train_documents


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_curate
from portolan.data.curate import curate_documents
print("ready", flush=True)
curate_documents(test_curate.settings_of(), Path(sys.argv[1]))
"""


def test_a_killed_run_leaves_nothing_that_a_second_run_trusts(tmp_path):
    write_inputs(tmp_path / "whole", num_documents=200)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    begin = time.monotonic()
    curate_documents(settings_of(), tmp_path / "whole")
    seconds = time.monotonic() - begin
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    generator = random.Random(0)
    for _ in range(3):
        command = [sys.executable, "-c", KILLED.format(here=here), str(tmp_path / "killed")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(generator.uniform(0, seconds))
            process.send_signal(signal.SIGKILL)
    curate_documents(settings_of(), tmp_path / "killed")
    assert files_of(tmp_path / "killed/corpus") == files_of(tmp_path / "whole/corpus")
