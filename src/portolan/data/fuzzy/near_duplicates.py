"""Near-duplicates of a corpus: what is removed, the evidence, and the alarm if it is too much."""

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.curation_settings import FuzzySettings
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, open_stage, run_stage, source_folder_name
from portolan.data.engine import Dataset, Engine, exchange, map_shards
from portolan.data.fuzzy.candidates import find_edges, is_taken, listed_ids, removed_of
from portolan.data.fuzzy.components import MAX_NODES_IN_MEMORY, find_components
from portolan.data.fuzzy.members import collect_members
from portolan.data.fuzzy.merging import Verification
from portolan.data.fuzzy.placement import write_by_shard
from portolan.data.fuzzy.signatures import MAX_CHARACTERS, sign_source, signature_params
from portolan.data.fuzzy.verdicts import REMOVED
from portolan.errors import PortolanError

VERSION = 1
MAX_ROUNDS = 200
ALARM_LOSS = 0.5
RULE_VERSION = f"containment/{VERSION}"
FUZZY_SCHEMA = pa.schema(
    [pa.field("id", pa.string(), nullable=False), pa.field("fuzzy_dup", pa.bool_(), nullable=False)]
)
EVIDENCE_SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("removed_id", pa.string()),
            ("removed_source", pa.string()),
            ("kept_id", pa.string()),
            ("kept_source", pa.string()),
            ("n_removed", pa.int64()),
            ("n_kept", pa.int64()),
            ("n_shared", pa.int64()),
            ("containment", pa.float64()),
            ("jaccard", pa.float64()),
            ("new_words", pa.int64()),
            ("chars_removed", pa.int64()),
            ("chars_kept", pa.int64()),
            ("shared_buckets", pa.int64()),
            ("component", pa.string()),
            ("component_size", pa.int64()),
            ("part", pa.string()),
            ("split_level", pa.int64()),
            ("comparisons", pa.int64()),
            ("truncated", pa.bool_()),
            ("exempt", pa.bool_()),
            ("rule_version", pa.string()),
        )
    ]
)


class WipeOut(PortolanError):
    """A source loses more to near-duplicates than anybody has reviewed."""


@dataclass(frozen=True)
class NearDuplicates:
    """Near-duplicates of all sources.

    `removed` holds, under each source's folder, the ids that go (attribute `fuzzy_dup`), and in
    `evidence/` a row for each verified pair, those of exempt sources included. `counts` are by
    source: documents and words that came in, documents and words removed, exempt, empty,
    unsegmented and truncated ones.
    """

    removed: Dataset
    counts: Mapping[str, Mapping[str, int]]
    skipped: bool

    @property
    def key(self) -> str:
        """Key of the stage."""
        return self.removed.key

    def evidence(self, source: str) -> Dataset:
        """Evidence rows whose removed document is of a source."""
        return self.removed.within(source_folder_name(source)).within("evidence")


def find_near_duplicates(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    removed: Sequence[Dataset],
    settings: FuzzySettings,
    corpus: Path,
    *,
    max_rounds: int = MAX_ROUNDS,
    max_nodes_in_memory: int = MAX_NODES_IN_MEMORY,
) -> NearDuplicates:
    """Find near-duplicates among the documents that no attribute of `removed` has taken.

    An attribute of `removed` holds, under each source's folder, shards named as the source's. What
    is written does not depend on the order of the sources, on workers, or on where components are
    found. Steps in between lie in `corpus/fuzzy` until the result is there.

    Raises:
        WipeOut: a source loses more than half, and no reviewed entry allows it.
        NotConverged: components on disk need more than `max_rounds`.
    """
    ordered = in_key_order(sources)
    signatures = [sign_source(engine, source, settings, corpus) for source in ordered]
    params = {
        **signature_params(settings),
        "sources": [source.key for source in ordered],
        "containment": repr(settings.containment),
        "no_new_token": settings.no_new_token,
        "exempt": sorted(settings.exempt_sources),
        "source_rank": list(settings.source_rank),
        "max_part_documents": settings.max_part_documents,
        "max_part_characters": settings.max_part_characters,
    }
    inputs = (*(dataset.key for dataset in signatures), *(dataset.key for dataset in removed))
    stage = Stage("fuzzy_dup", VERSION, params, inputs)
    parent, work = corpus / "attributes", corpus / "fuzzy"

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        edges = find_edges(engine, ordered, signatures, removed, settings.bands, work)
        components = find_components(
            engine,
            ordered,
            edges,
            sum(source.kept for source in ordered),
            max_rounds,
            work,
            max_nodes_in_memory=max_nodes_in_memory,
        )
        members = collect_members(
            engine, ordered, signatures, components, settings.source_rank, MAX_CHARACTERS, work
        )
        verdicts = Verification(engine, settings, work).run(members)
        evidence = _sort_evidence(engine, ordered, verdicts, settings, work)
        return _write(folder, ordered, signatures, removed, evidence)

    already = open_stage(parent / stage.folder_name, stage.key) is not None
    folder, manifest, _ = run_stage(parent, stage, build)
    shutil.rmtree(work, ignore_errors=True)
    found = NearDuplicates(Dataset(folder, manifest), manifest["counts"], already)
    _check_losses(found, settings)
    return found


def list_evidence(params: Mapping[str, Any], verdicts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Evidence rows of the removed members, with the rank of their source first."""
    ranks = {key: rank for rank, key in enumerate(params["sources"])}
    for table in verdicts:
        table = table.filter(pc.equal(table["status"], REMOVED))  # pyright: ignore
        sizes = [np.asarray(table[name]) for name in ("n_removed", "n_kept", "n_shared")]
        own, other, shared = (size.astype(np.float64) for size in sizes)
        source = table["source"].to_pylist()
        columns = {
            "removed_id": table["id"],
            "removed_source": table["source"],
            "containment": pa.array(shared / own),
            "jaccard": pa.array(shared / (own + other - shared)),
            "chars_removed": pc.negate(table["negative_characters"]),  # pyright: ignore
            "chars_kept": table["kept_characters"],
            "split_level": table["level"],
            "truncated": table["kept_truncated"],
            "exempt": pa.array([key in params["exempt"] for key in source], pa.bool_()),
            "rule_version": pa.array([RULE_VERSION] * len(source), pa.string()),
        }
        rank = pa.array([ranks[key] for key in source], pa.int64())
        arrays = [
            columns[name] if name in columns else table[name] for name in EVIDENCE_SCHEMA.names
        ]
        yield pa.table([rank, *arrays], names=["source_number", *EVIDENCE_SCHEMA.names])


def _sort_evidence(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    verdicts: Sequence[Dataset],
    settings: FuzzySettings,
    work: Path,
) -> Dataset:
    """Evidence rows by source and removed document, in one shard."""
    params = {
        "sources": [source.key for source in sources],
        "exempt": sorted(settings.exempt_sources),
    }
    schema = pa.schema([pa.field("source_number", pa.int64(), nullable=False), *EVIDENCE_SCHEMA])
    listed = []
    for dataset in verdicts:
        stage = Stage("fuzzy_evidence", VERSION, params, (dataset.key,))
        listed.append(map_shards(engine, work, stage, list_evidence, [dataset], schema))
    stage = Stage("fuzzy_sorted_evidence", VERSION, {}, tuple(d.key for d in listed))
    return exchange(
        engine,
        work,
        stage,
        listed,
        key="source_number",
        partitions=1,
        order=("removed_id",),
    )


def _rows_by_source(evidence: Dataset) -> Iterator[tuple[str, pa.Table]]:
    for name in evidence.names:
        for table in evidence.read(name):
            changes = np.flatnonzero(np.diff(np.asarray(table["source_number"]))) + 1
            for begin, end in itertools.pairwise([0, *changes.tolist(), table.num_rows]):
                part = table.slice(begin, end - begin)
                yield part["removed_source"][0].as_py(), part.select(EVIDENCE_SCHEMA.names)


def _removed_rows(evidence: Dataset) -> Iterator[tuple[str, pa.Table]]:
    for key, table in _rows_by_source(evidence):
        ids = table.filter(pc.invert(table["exempt"]))["removed_id"]  # pyright: ignore
        yield key, pa.table([ids, pa.array([True] * len(ids), pa.bool_())], schema=FUZZY_SCHEMA)


def _write(
    folder: Path,
    sources: Sequence[NormalizedSource],
    signatures: Sequence[Dataset],
    removed: Sequence[Dataset],
    evidence: Dataset,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The attribute, the evidence, and what each source loses."""
    entries = write_by_shard(folder, sources, _removed_rows(evidence), FUZZY_SCHEMA)
    manifest = {"shards": list(entries)}
    entries += write_by_shard(
        folder,
        sources,
        _rows_by_source(evidence),
        EVIDENCE_SCHEMA,
        identifier="removed_id",
        within="evidence",
    )
    lost = Dataset(folder, manifest)
    proof = Dataset(folder, {"shards": entries})
    counts = {}
    for source, signed in zip(sources, signatures, strict=True):
        within = source_folder_name(source.key)
        totals = dict.fromkeys(_COUNTS, 0)
        for name in source.shard_names:
            taken = [d.read(name) for d in removed_of(removed, source)]
            _add_counts(totals, signed.read(name), taken, lost.within(within).read(name))
        for shard in proof.within(within).within("evidence").shards:
            for table in shard.read(["exempt"]):
                totals["exempt"] += pc.sum(table["exempt"]).as_py() or 0  # pyright: ignore
        counts[source.key] = totals
    return entries, {"counts": counts}


_COUNTS = (
    *("documents", "words", "removed", "removed_words"),
    *("exempt", "empty", "unsegmented", "truncated"),
)


def _add_counts(
    totals: dict[str, int],
    signatures: Iterator[pa.Table],
    removed: Sequence[Iterator[pa.Table]],
    lost: Iterator[pa.Table],
) -> None:
    taken = [listed_ids(attribute) for attribute in removed]
    gone = [listed_ids(lost)]
    for table in signatures:
        table = table.filter(pa.array(~is_taken(table["id"], taken)))
        words = np.asarray(table["words"])
        is_gone = is_taken(table["id"], gone)
        totals["documents"] += table.num_rows
        totals["words"] += int(words.sum())
        totals["removed"] += int(is_gone.sum())
        totals["removed_words"] += int(words[is_gone].sum())
        totals["empty"] += int((words == 0).sum())
        for name in ("unsegmented", "truncated"):
            totals[name] += int(np.asarray(table[name]).sum())


def _check_losses(found: NearDuplicates, settings: FuzzySettings) -> None:
    """Raise the alarm; a reviewed entry changes no byte, so it is not part of the stage's key."""
    allowed = {entry.source: entry.max_loss for entry in settings.reviewed_losses}
    lines = []
    for key, counts in found.counts.items():
        shares = [
            counts[part] / max(1, counts[whole])
            for part, whole in (("removed", "documents"), ("removed_words", "words"))
        ]
        if max(shares) > allowed.get(key, ALARM_LOSS):
            lines.append(
                f"{key}: {counts['removed']} of {counts['documents']} documents ({shares[0]:.1%}), "
                f"{shares[1]:.1%} of its words"
            )
    if lines:
        raise WipeOut(
            "near-duplicates would empty sources:\n    " + "\n    ".join(lines),
            remedy=f"look at the pairs in {found.removed.folder}; then exempt the source "
            "(data.fuzzy.exempt_sources) or add {source, reason, reviewer, max_loss} to "
            "data.fuzzy.reviewed_losses",
        )
