"""Training documents: what no step removed, sorted by cell; and why every other one is missing.

A shard of a source becomes a shard of training documents whose row groups belong to one cell each,
and a shard of the attribute `removed`, with the first reason that applies to a document.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.data.dedup import NormalizedSource, read_ids
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    WORK,
    ShardWriter,
    Stage,
    hidden_path,
    shard_of,
    source_folder_name,
    write_shard,
)
from portolan.data.engine import Dataset, Engine, Shard, align
from portolan.data.engine.streams import rebatch
from portolan.data.engine.tasks import Task, build_stage, run_tasks
from portolan.data.heldout import HELDOUT, NEAR_HELDOUT
from portolan.errors import PortolanError

VERSION = 1
GLOBAL_DUP, CONTAMINATED, FUZZY_DUP = "global_dup", "contaminated", "fuzzy_dup"
REASONS = (GLOBAL_DUP, HELDOUT, NEAR_HELDOUT, CONTAMINATED, FUZZY_DUP)
"""Reasons of the steps across sources, in the order in which they apply."""
REMOVED_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("text_bytes", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Attributes:
    """What the steps found out about the documents; each is co-partitioned with the sources.

    `removals`: sparse attributes of all sources (all ids they list go, or those marked
    `contaminated`) in the order in which they apply, by reason; an attribute with a column `reason`
    names its own. `domains` and `buckets` are dense attributes by source, or empty.
    """

    removals: Mapping[str, Dataset]
    domains: Mapping[str, Dataset] = field(default_factory=dict)
    buckets: Mapping[str, Dataset] = field(default_factory=dict)

    def keys(self, sources: Sequence[NormalizedSource]) -> list[str]:
        """Keys of all of them, in order."""
        dense = [self.domains, self.buckets]
        own = [data[source.key].key for data in dense if data for source in sources]
        return [*(data.key for data in self.removals.values()), *own]


@dataclass(frozen=True)
class ShardTask:
    """One shard of a source with its attributes; `heldout`: ids of any source in its range."""

    source: str
    documents: Shard
    heldout: frozenset[str]
    removals: tuple[tuple[str, Shard], ...]
    domain: Shard | None
    quality: Shard | None

    @property
    def name(self) -> str:
        """Name of the task."""
        return f"{source_folder_name(self.source)}@{self.documents.name}"


@dataclass
class Outcome:
    """Documents and text bytes by cell or by reason."""

    documents: Counter[str] = field(default_factory=Counter)
    text_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, lengths: Any) -> None:
        """Count documents of the given text lengths."""
        self.documents[name] += len(lengths)
        self.text_bytes[name] += int(np.sum(lengths))

    def as_json(self) -> dict[str, list[int]]:
        """[documents, bytes] by name."""
        return {
            name: [self.documents[name], self.text_bytes[name]] for name in sorted(self.documents)
        }


def write_training_documents(
    engine: Engine, sources: Sequence[NormalizedSource], attributes: Attributes, corpus: Path
) -> Dataset:
    """Write `documents/train_<key>/<source>/part-*` and the attribute `removed` beside it.

    The manifest counts documents and bytes of every source by cell and by reason, and says in which
    row groups of a shard each cell lies. Memory: one row group, and the ids that a shard loses.

    Raises:
        PortolanError: a step left another number of documents than it was given, or a held-out
            document stands among those for training.
    """
    stage = Stage(
        "train",
        VERSION,
        {"sources": [source.key for source in sources], "reasons": list(attributes.removals)},
        (*(source.stage_key for source in sources), *attributes.keys(sources)),
    )

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        heldout = _heldout_ids(sources, attributes)
        shards = [
            shard for source in sources for shard in _shard_tasks(source, attributes, heldout)
        ]
        tasks = [
            Task(shard.name, _write, (shard,), shard.documents.rows, shard.documents.bytes)
            for shard in shards
        ]
        records = run_tasks(engine, stage, folder, stage.name, tasks)
        counts: dict[str, dict[str, dict[str, list[int]]]] = {
            source.key: {"cells": {}, "removed": {}} for source in sources
        }
        for record in records:
            for kind in ("cells", "removed"):
                _add_up(counts[record["source"]][kind], record[kind])
        files = [file for record in records for file in record["files"]]
        return files, {"domains": counts, "checks": {"heldout_ids_in_train": 0}}

    return build_stage(corpus / "documents", stage, build)[0]


def _add_up(total: dict[str, list[int]], more: Mapping[str, Sequence[int]]) -> None:
    for name, (documents, num_bytes) in more.items():
        known = total.get(name, [0, 0])
        total[name] = [known[0] + documents, known[1] + num_bytes]


def _heldout_ids(sources: Sequence[NormalizedSource], attributes: Attributes) -> list[str]:
    """Ids of all held-out documents."""
    found: list[str] = []
    for source in sources:
        for shard in attributes.removals[HELDOUT].within(source_folder_name(source.key)).shards:
            for table in shard.read(["id", "reason"]):
                held = pc.equal(table["reason"], HELDOUT)  # pyright: ignore
                found += table.filter(held)["id"].to_pylist()
    return found


def _shard_tasks(
    source: NormalizedSource, attributes: Attributes, heldout: Sequence[str]
) -> Iterator[ShardTask]:
    folder = source_folder_name(source.key)
    documents = Dataset(source.folder, source.manifest)
    removals = [(reason, data.within(folder)) for reason, data in attributes.removals.items()]
    domain, quality = (data.get(source.key) for data in (attributes.domains, attributes.buckets))
    by_shard: dict[int, set[str]] = {}
    for identifier in heldout:
        by_shard.setdefault(shard_of(identifier, len(source.shard_names)), set()).add(identifier)
    for index, name in enumerate(source.shard_names):
        yield ShardTask(
            source.key,
            documents.shard(name),
            frozenset(by_shard.get(index, ())),
            tuple((reason, data.shard(name)) for reason, data in removals if data.shards),
            None if domain is None else domain.shard(name),
            None if quality is None else quality.shard(name),
        )


def _write(folder: Path, task: ShardTask) -> dict[str, Any]:
    """The task: both shards of one shard of documents, and what they count."""
    removed = read_removals(task.removals)
    lost, kept = Outcome(), Outcome()
    name = f"{source_folder_name(task.source)}/{task.documents.name}"
    spool = hidden_path(folder / WORK / name)
    spool.parent.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, int]] = []
    try:
        places = _spool_by_cell(spool, task, removed, kept, rows)
        entry, cells = _write_by_cell(folder, name, spool, places)
    finally:
        spool.unlink(missing_ok=True)
    _check_absent(folder / name, task.heldout)
    if len(rows) != len(removed):
        raise PortolanError(
            f"source {task.source!r}: {len(removed)} documents were taken out of shard "
            f"{task.documents.name}, which holds only {len(rows)} of them",
            remedy="this is a defect of Portolan: please report it with the recipe",
        )
    for reason in {reason for _, reason, _ in rows}:
        lost.add(reason, [size for _, found, size in rows if found == reason])
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(c, f.type) for c, f in zip(columns, REMOVED_SCHEMA, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=REMOVED_SCHEMA)
    attribute = write_shard(folder, f"removed/{name}", REMOVED_SCHEMA, rebatch([table]))
    return {
        "source": task.source,
        "files": [{**entry, "cells": cells}, attribute],
        "cells": kept.as_json(),
        "removed": lost.as_json(),
    }


def _check_absent(path: Path, heldout: frozenset[str]) -> None:
    """Read a training shard back: no held-out id of any source may stand in it."""
    if both := read_ids(path) & heldout:
        raise PortolanError(
            f"held-out document {min(both)} stands in training shard {path.name}",
            remedy="this is a defect of Portolan: please report it with the recipe",
        )


def read_removals(removals: Iterable[tuple[str, Shard]]) -> dict[str, str]:
    """First reason by id of the documents that a shard loses."""
    found: dict[str, str] = {}
    for reason, shard in removals:
        for table in shard.read():
            if "contaminated" in table.schema.names:
                table = table.filter(table["contaminated"])
            ids = table["id"].to_pylist()
            own = table["reason"].to_pylist() if "reason" in table.schema.names else None
            for identifier, named in zip(ids, own or [reason] * len(ids), strict=True):
                found.setdefault(identifier, named)
    return found


def _spool_by_cell(
    spool: Path,
    task: ShardTask,
    removed: Mapping[str, str],
    kept: Outcome,
    rows: list[tuple[str, str, int]],
) -> dict[str, list[int]]:
    """Documents that stay, one record batch a row group and cell; returns the batches by cell."""
    places: dict[str, list[int]] = {}
    num_batches = 0
    with pa.OSFile(str(spool), "wb") as sink, pa.ipc.new_file(sink, DOCUMENT_SCHEMA) as writer:
        for documents, cells in _read_with_cells(task):
            ids = documents["id"].to_pylist()
            sizes = pc.binary_length(documents["text"]).to_pylist()  # pyright: ignore
            stays = np.array([identifier not in removed for identifier in ids], bool)
            rows += [(ids[i], removed[ids[i]], sizes[i]) for i in np.flatnonzero(~stays)]
            for cell in sorted(set(cells[stays])):
                chosen = np.flatnonzero(stays & (cells == cell))
                kept.add(cell, [sizes[i] for i in chosen])
                table = documents.take(pa.array(chosen)).cast(DOCUMENT_SCHEMA).combine_chunks()
                for batch in table.to_batches():
                    writer.write_batch(batch)
                    places.setdefault(cell, []).append(num_batches)
                    num_batches += 1
    return places


def _read_with_cells(task: ShardTask) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Row groups of documents with the name of each document's cell, object[n]."""
    columns = {"domain": task.domain, "quality_bucket": task.quality}
    present = {name: shard for name, shard in columns.items() if shard is not None}
    streams = [shard.read(["id", name]) for name, shard in present.items()]
    for documents, *tables in align(task.documents.read(), *streams):
        for name, table in zip(present, tables, strict=True):
            if not table["id"].equals(documents["id"]):
                raise PortolanError(
                    f"source {task.source!r}: attribute {name} of shard {task.documents.name} "
                    "holds other documents than the source",
                    remedy=f"delete {present[name].folder} and run again",
                )
        values = dict(zip(present, tables, strict=True))
        yield documents, _cells(task.source, documents.num_rows, values)


def _cells(source: str, num_rows: int, values: Mapping[str, pa.Table]) -> np.ndarray:
    """Names `cXXqY`, `cXX`, or the key of the source where there are no domains."""
    if "domain" not in values:
        return np.full(num_rows, source, object)
    domains = values["domain"]["domain"].to_pylist()
    if "quality_bucket" not in values:
        return np.array([f"c{domain:02d}" for domain in domains], object)
    buckets = values["quality_bucket"]["quality_bucket"].to_pylist()
    pairs = zip(domains, buckets, strict=True)
    return np.array([f"c{domain:02d}q{bucket}" for domain, bucket in pairs], object)


def _write_by_cell(
    folder: Path, name: str, spool: Path, places: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Write the shard cell by cell; its entry, and the row groups [begin, end) of each cell."""
    writer, groups, cells = ShardWriter(folder, name, DOCUMENT_SCHEMA), 0, {}
    try:
        with pa.memory_map(str(spool)) as source, pa.ipc.open_file(source) as file:
            for cell in sorted(places):
                begin = groups
                tables = (pa.Table.from_batches([file.get_batch(n)]) for n in places[cell])
                for table in rebatch(tables):
                    writer.write(table)
                    groups += 1
                cells[cell] = [begin, groups]
        return writer.close(), cells
    except BaseException:
        writer.discard()
        raise
