"""Read a curated corpus into the facts of its pages; nothing is computed again in the corpus."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from portolan.data.documents import EMPTY
from portolan.data.provenance import read_provenance
from portolan.data.store import TokenStore
from portolan.errors import UsageError
from portolan.files import read_json
from portolan.project import CURATION_LOG
from portolan.report.data_map.contamination import read_contamination
from portolan.report.data_map.corpus_files import (
    EVIDENCE,
    NORMALISE,
    CorpusFiles,
    StageFolder,
    open_corpus,
)
from portolan.report.data_map.evidence import read_pair_strata, read_pairs
from portolan.report.data_map.facts import DataMap, SourceFlow, StageFacts, StepTime
from portolan.report.data_map.grid import read_overview
from portolan.report.values import as_count

IDENTITY_FIELDS = frozenset({"name", "version", "key", "label", "params", "inputs", "shards"})
COUNTS, READ, DOCUMENTS = "counts", "read", "documents"
DOCUMENT_STAGES = frozenset({NORMALISE, "heldout_documents", "train"})
ASIDE = frozenset({EVIDENCE, "dups", "removed"})
NEAR_DUPLICATES, CONTAMINATED = "fuzzy_dup", "contaminated"


def read_map(
    root: Path,
    name: str,
    mixtures: Sequence[Mapping[str, Any]] = (),
    *,
    labels_file: Path | None = None,
) -> DataMap:
    """Everything on the pages of the corpus of a project.

    Args:
        root: project folder.
        name: name of the project.
        mixtures: mixture files, that of the target first.
        labels_file: names of domains that a person gave.

    Raises:
        UsageError: nothing is curated there.
    """
    corpus = open_corpus(root)
    store = TokenStore(root / corpus.summary["store"]["path"])
    return DataMap(
        name=name,
        store_digest=store.digest,
        overview=read_overview(corpus, store, labels_file),
        pairs=read_pairs(corpus, fuzzy) if (fuzzy := corpus.named(NEAR_DUPLICATES)) else None,
        contamination=read_contamination(corpus, flags)
        if (flags := corpus.named(CONTAMINATED))
        else None,
        mixtures=tuple(mixtures),
        provenance=tuple(read_provenance(root / "corpus")),
        flows=tuple(_flow(row) for row in corpus.summary["sources"]),
        stages=tuple(read_stages(corpus)),
        steps=tuple(_read_steps(root)),
        problems=tuple(corpus.summary.get("warnings", ())),
    )


def read_strata(root: Path) -> tuple[str, Mapping[tuple[str, str, int], int]]:
    """Key of the evidence of near-duplicate removal, and the size of every stratum.

    Raises:
        UsageError: the corpus has no such evidence.
    """
    corpus = open_corpus(root)
    stage = corpus.named(NEAR_DUPLICATES)
    if stage is None:
        raise UsageError(
            f"the corpus of {root} was curated without a search for near-duplicates",
            remedy="set data.fuzzy.enabled = true and run `portolan curate`",
        )
    return stage.key, read_pair_strata(corpus, stage)


def _flow(row: Mapping[str, Any]) -> SourceFlow:
    return SourceFlow(
        key=row["key"],
        read=row["read"],
        dropped=dict(row["dropped"]),
        heldout=row["heldout_documents"],
        kept=row["documents"],
        tokens=row["tokens"],
    )


def _read_steps(root: Path) -> list[StepTime]:
    """Steps of curation in their order; none where the corpus came without its log."""
    path = root / CURATION_LOG
    rows = read_json(path) if path.is_file() else []
    return [
        StepTime(row["step"], row["documents"], row["text_bytes"], float(row["seconds"]))
        for row in rows
    ]


def read_stages(corpus: CorpusFiles) -> list[StageFacts]:
    """Every stage by its manifest; those that others depend on come first."""
    stages = {stage.key: stage for stage in corpus.stages}
    rows_of = {key: _rows(stage) for key, stage in stages.items()}
    depths = {key: _depth(key, stages) for key in stages}
    order = sorted(
        corpus.stages,
        key=lambda stage: (depths[stage.key], stage.name, stage.manifest["label"]),
    )
    return [_stage(corpus, stage, rows_of) for stage in order]


def _depth(key: str, stages: Mapping[str, StageFolder]) -> int:
    """Length of the longest chain of stages behind one."""
    inputs = [other for other in stages[key].manifest["inputs"] if other in stages]
    return 1 + max((_depth(other, stages) for other in inputs), default=0)


def _rows(stage: StageFolder) -> int:
    """Rows of the main shards; evidence and lists of what was left out lie beside them."""
    return sum(
        shard["rows"]
        for shard in stage.manifest["shards"]
        if not ASIDE.intersection(shard["name"].split("/"))
    )


def _stage(corpus: CorpusFiles, stage: StageFolder, rows_of: Mapping[str, int]) -> StageFacts:
    manifest, shards = stage.manifest, stage.manifest["shards"]
    return StageFacts(
        name=manifest["name"],
        label=manifest["label"],
        key=stage.key,
        folder=stage.folder.relative_to(corpus.root).as_posix(),
        inputs=tuple(manifest["inputs"]),
        rows_in=_rows_in(corpus, stage, rows_of),
        rows_out=rows_of[stage.key],
        bytes_out=sum(shard["bytes"] for shard in shards),
        shards=len(shards),
        empty_shards=sum(1 for shard in shards if shard["status"] == EMPTY),
        counts=_counts(manifest),
        params={"version": manifest["version"], **manifest["params"]},
    )


def _rows_in(corpus: CorpusFiles, stage: StageFolder, rows_of: Mapping[str, int]) -> int | None:
    """Documents that a stage says it read, or those of the stages of documents before it."""
    counts = stage.manifest.get(COUNTS, {})
    if (read := as_count(counts.get(READ))) is not None:
        return read
    looked_at = [part[DOCUMENTS] for part in counts.values()
                 if isinstance(part, Mapping) and DOCUMENTS in part]  # fmt: skip
    if looked_at:
        return sum(looked_at)
    inputs = set(stage.manifest["inputs"])
    before = [s for s in corpus.stages if s.key in inputs and s.name in DOCUMENT_STAGES]
    return sum(rows_of[other.key] for other in before) if before else None


def _counts(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of a manifest by name; those given by source are added up."""
    found: dict[str, int] = {}

    def add(name: str, number: Any) -> None:
        if isinstance(number, int) and not isinstance(number, bool):
            found[name] = found.get(name, 0) + number

    for field, value in manifest.items():
        if field in IDENTITY_FIELDS or not isinstance(value, Mapping):
            continue
        for name, part in value.items():
            if isinstance(part, Mapping):
                for inner, number in part.items():
                    add(inner, number)
            else:
                add(name if field == COUNTS else field, part)
    return found
