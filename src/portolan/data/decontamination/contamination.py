"""Contaminated documents of a corpus: hits, frequency filters, rules, and the evidence."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.curation_settings import DecontaminationSettings
from portolan.data.decontamination import frequency
from portolan.data.decontamination.features import Fold, paragraphs
from portolan.data.decontamination.hits import find_hits
from portolan.data.decontamination.index import EvaluationIndex, build_index, open_index
from portolan.data.decontamination.recall import injection_recall
from portolan.data.decontamination.registry import Registry
from portolan.data.decontamination.rules import (
    MIN_SHARE,
    SHORT,
    SPAN_WINDOWS,
    Finding,
    Hits,
    first_items,
    judge,
    main_item,
)
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, open_stage, run_stage, source_folder_name, write_shard
from portolan.data.engine import Dataset, Engine
from portolan.data.engine.dataset import Shard
from portolan.data.engine.streams import group_tables, rebatch
from portolan.data.fuzzy.candidates import is_taken, listed_ids, removed_of

VERSION = 1
FIRST_ITEMS = 3
MAX_SPAN_CHARACTERS = 500
FLAG_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("contaminated", pa.bool_(), nullable=False),
        pa.field("rule", pa.string()),
        pa.field("max_overlap", pa.float64(), nullable=False),
        pa.field("n_hits", pa.int64(), nullable=False),
        pa.field("first_items", pa.list_(pa.string()), nullable=False),
    ]
)
EVIDENCE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("eval_set", pa.string(), nullable=False),
        pa.field("eval_item", pa.string(), nullable=False),
        pa.field("paragraph", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("matched", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Contamination:
    """Flags of all documents.

    `flags` holds, under each source's folder, a dense attribute (`contaminated`, `rule`,
    `max_overlap`, `n_hits`, `first_items`), and in `evidence/` a row for each finding. `counts` are
    by source: documents looked at, contaminated ones, and those of each rule. `sets` are the
    registered sets as the index holds them; `recall` is that of injected items by layout.
    """

    flags: Dataset
    counts: Mapping[str, Mapping[str, int]]
    sets: Sequence[Mapping[str, Any]]
    recall: Mapping[str, Mapping[str, int]]
    skipped: bool

    @property
    def key(self) -> str:
        """Key of the stage."""
        return self.flags.key

    def evidence(self, source: str) -> Dataset:
        """Evidence rows of a source's documents."""
        return self.flags.within(source_folder_name(source)).within("evidence")


def find_contaminated(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    removed: Sequence[Dataset],
    registry: Registry,
    settings: DecontaminationSettings,
    corpus: Path,
) -> Contamination:
    """Flag documents that hold test items, among those that no attribute of `removed` has taken.

    Raises:
        UsageError: a registered set is not what the recipe says, or cannot be found in any text.
    """
    ordered = in_key_order(sources)
    index_folder, index = build_index(registry, settings, corpus)
    hits = [
        find_hits(engine, source, index_folder, index["key"], settings, corpus)
        for source in ordered
    ]
    params = {
        "sources": [source.key for source in ordered],
        "fold": settings.fold,
        "min_share": repr(MIN_SHARE),
        "span_windows": SPAN_WINDOWS,
        "first_items": FIRST_ITEMS,
        "max_span_characters": MAX_SPAN_CHARACTERS,
        **frequency.PARAMS,
    }
    keys = (index["key"], *(dataset.key for dataset in (*hits, *removed)))
    stage = Stage("contaminated", VERSION, params, keys)
    parent = corpus / "attributes"

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        tasks = list(_plan(folder, ordered, hits, removed, settings.fold, index_folder))
        entries, counts = [], {source.key: dict.fromkeys(_COUNTS, 0) for source in ordered}
        for task, (written, found) in zip(tasks, engine.map(flag_shard, tasks), strict=True):
            entries += written
            for name, count in found.items():
                counts[task.source][name] += count
        recall = injection_recall(registry, open_index(str(index_folder)), settings)
        return entries, {"counts": counts, "recall": recall}

    already = open_stage(parent / stage.folder_name, stage.key) is not None
    folder, manifest, _ = run_stage(parent, stage, build)
    return Contamination(
        Dataset(folder, manifest), manifest["counts"], index["sets"], manifest["recall"], already
    )


_COUNTS: tuple[str, ...] = ("documents", "contaminated", "paragraph", "window", "short")


@dataclass(frozen=True)
class FlagTask:
    """One shard to judge: its documents, hits, removed ids, and hashes that do not count."""

    folder: str
    source: str
    documents: Shard
    hits: Shard
    removed: tuple[Shard, ...]
    common: np.ndarray
    fold: Fold
    index_folder: str


def _plan(
    folder: Path,
    sources: Sequence[NormalizedSource],
    hits: Sequence[Dataset],
    removed: Sequence[Dataset],
    fold: Fold,
    index_folder: Path,
) -> Iterator[FlagTask]:
    measured = [
        frequency.measure_source(source, found, removed)
        for source, found in zip(sources, hits, strict=True)
    ]
    everywhere = frequency.common_everywhere(measured)
    for source, found, facts in zip(sources, hits, measured, strict=True):
        documents = Dataset(source.folder, source.manifest)
        attributes = removed_of(removed, source)
        for name in source.shard_names:
            yield FlagTask(
                str(folder),
                source.key,
                documents.shard(name),
                found.shard(name),
                tuple(attribute.shard(name) for attribute in attributes),
                np.union1d(everywhere, facts.in_sample),
                fold,
                str(index_folder),
            )


def flag_shard(task: FlagTask) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Write flags and evidence of one shard; return their manifest entries and the counts."""
    index = open_index(task.index_folder)
    taken = [listed_ids(shard.read()) for shard in task.removed]
    found = _judge_documents(task, taken)
    flagged = {name for name, (findings, *_) in found.items() if findings}
    evidence: list[dict[str, Any]] = []
    counts = dict.fromkeys(_COUNTS, 0)

    def flags() -> Iterator[pa.Table]:
        columns = ["id", "text"] if flagged else ["id"]
        for table in task.documents.read(columns):
            ids = table["id"].to_pylist()
            counts["documents"] += int((~is_taken(table["id"], taken)).sum())
            yield pa.Table.from_pylist([_flag(name, found, index) for name in ids], FLAG_SCHEMA)
            for row, name in enumerate(ids):
                if name in flagged:
                    findings = found[name][0]
                    evidence.extend(_evidence(task, name, table["text"][row].as_py(), findings))
                    counts["contaminated"] += 1
                    for rule in {finding.rule for finding in findings}:
                        counts[rule] += 1

    folder, place = Path(task.folder), source_folder_name(task.source)
    name = task.documents.name
    entries = [write_shard(folder, f"{place}/{name}", FLAG_SCHEMA, rebatch(flags()))]
    rows = rebatch([pa.Table.from_pylist(evidence, EVIDENCE_SCHEMA)])
    entries.append(write_shard(folder, f"{place}/evidence/{name}", EVIDENCE_SCHEMA, rows))
    return entries, counts


Judged = tuple[list[Finding], float, Hits]


def _judge_documents(task: FlagTask, taken: Sequence[pa.Array]) -> dict[str, Judged]:
    """Findings, largest share and hits of each document that has a hit which counts."""
    common = pa.array(task.common, pa.uint64())
    found: dict[str, Judged] = {}
    for name, tables in group_tables(task.hits.read(), "id"):
        table = pa.concat_tables(tables)
        table = table.filter(pc.invert(pc.is_in(table["hash"], value_set=common)))  # pyright: ignore
        if table.num_rows and not is_taken(table["id"][:1], taken)[0]:
            hits = Hits.of(table)
            found[name] = (*judge(hits), hits)
    return found


def _flag(name: str, found: Mapping[str, Judged], index: EvaluationIndex) -> dict[str, Any]:
    if name not in found:
        empty = {"rule": None, "max_overlap": 0.0, "n_hits": 0, "first_items": []}
        return {"id": name, "contaminated": False, **empty}
    findings, overlap, hits = found[name]
    return {
        "id": name,
        "contaminated": bool(findings),
        "rule": findings[0].rule if findings else None,
        "max_overlap": overlap,
        "n_hits": len(hits.position),
        "first_items": [index.items[item] for item in first_items(hits, index, FIRST_ITEMS)],
    }


def _evidence(
    task: FlagTask, name: str, text: str, findings: Sequence[Finding]
) -> Iterator[dict[str, Any]]:
    index = open_index(task.index_folder)
    lines = paragraphs(text, task.fold)
    tokens = list(itertools.chain.from_iterable(line.split() for line in lines))
    for finding in findings:
        is_short = finding.rule == SHORT
        matched = (
            lines[finding.paragraph] if is_short else " ".join(tokens[finding.begin : finding.end])
        )
        eval_set, eval_item = index.items[main_item(finding, index)].split(":", 1)
        yield {
            "id": name,
            "source": task.source,
            "rule": finding.rule,
            "eval_set": eval_set,
            "eval_item": eval_item,
            "paragraph": finding.paragraph,
            "position": finding.begin,
            "score": finding.score,
            "matched": matched[:MAX_SPAN_CHARACTERS],
        }
