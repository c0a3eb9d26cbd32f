"""Steps of curation between the held-out documents and the training documents."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from portolan.data.decontamination.contamination import find_contaminated
from portolan.data.decontamination.registry import open_registry
from portolan.data.dedup import NormalizedSource
from portolan.data.documents import MANIFEST
from portolan.data.domains.attribute import assign_domains, fit_domains
from portolan.data.embedding.attribute import embed_sources
from portolan.data.embedding.sampling import draw_sample
from portolan.data.engine import Dataset, Engine
from portolan.data.fuzzy.near_duplicates import find_near_duplicates
from portolan.data.heldout import HeldOut
from portolan.data.quality.buckets import bucket_sources, calibrate, summarize_sources
from portolan.data.quality.gates import SourceScores
from portolan.data.quality.labelling import label_sample
from portolan.data.quality.scorer import fit_scorer, score_sources
from portolan.data.training_documents import CONTAMINATED, FUZZY_DUP
from portolan.recipe import DataSettings


@dataclass(frozen=True)
class CurationProgress:
    """A finished step of curation: documents and text bytes it handled, and seconds it took."""

    step: str
    source: str
    documents: int
    text_bytes: int
    seconds: float
    skipped: bool


Report = Callable[[CurationProgress], None]


class StepClock:
    """Reports steps with the seconds since the step before, and whether they wrote a stage."""

    def __init__(self, corpus: Path, report: Report | None) -> None:
        self.corpus, self.report = corpus, report
        self.begin, self.skipped, self.known = time.monotonic(), True, self._stages()

    def _stages(self) -> set[Path]:
        return set(self.corpus.glob(f"*/*/{MANIFEST}"))

    def finish(self, step: str, source: str, documents: int, num_bytes: int) -> None:
        """Close a step."""
        now, stages = time.monotonic(), self._stages()
        skipped = stages <= self.known
        self.skipped &= skipped
        if self.report is not None:
            seconds = now - self.begin
            self.report(CurationProgress(step, source, documents, num_bytes, seconds, skipped))
        self.begin, self.known = now, stages


def find_copies(
    engine: Engine,
    settings: DataSettings,
    corpus: Path,
    sources: Sequence[NormalizedSource],
    removals: Mapping[str, Dataset],
    heldout: HeldOut,
    clock: StepClock,
) -> dict[str, Dataset]:
    """Documents that hold test items, then near-duplicates among those that are left."""
    found: dict[str, Dataset] = {}
    if settings.decontamination.enabled:
        own = [(source.key, path) for source in sources for path in heldout.paths(source.key)]
        registry = open_registry(settings.decontamination, corpus.parent, own)
        found[CONTAMINATED] = find_contaminated(
            engine, sources, list(removals.values()), registry, settings.decontamination, corpus
        ).flags
        clock.finish("decontamination", "", *text_size(sources))
    if settings.fuzzy.enabled:
        removed = [*removals.values(), *found.values()]
        near = find_near_duplicates(engine, sources, removed, settings.fuzzy, corpus)
        found[FUZZY_DUP] = near.removed
        clock.finish("near-duplicates", "", *text_size(sources))
    return found


@dataclass(frozen=True)
class DocumentMap:
    """Domain and quality of the documents by source, empty where the recipe asks for none."""

    domains: Mapping[str, Dataset] = field(default_factory=dict)
    buckets: Mapping[str, Dataset] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def map_documents(
    engine: Engine,
    settings: DataSettings,
    corpus: Path,
    sources: Sequence[NormalizedSource],
    removals: Mapping[str, Dataset],
    categories: Mapping[str, str],
    clock: StepClock,
    refit: bool,
) -> DocumentMap:
    """Embed all documents and give each a domain, and a bucket of quality if the recipe says so."""
    if settings.domains.count is None:
        return DocumentMap()
    removed = list(removals.values())
    sample = draw_sample(engine, sources, removed, settings.embedding, corpus, refit=refit)
    embeddings = embed_sources(engine, sources, sample, settings.embedding, corpus)
    clock.finish("embed", "", *text_size(sources))
    fit = fit_domains(engine, sample, embeddings, settings.domains, corpus)
    domains = assign_domains(engine, sources, embeddings, fit, corpus)
    clock.finish("domains", "", *text_size(sources))
    if settings.quality.labeller is None:
        return DocumentMap(domains)
    labels = label_sample(engine, sources, sample, categories, settings.quality, corpus)
    scorer = fit_scorer(engine, sources, labels, embeddings, settings.quality, corpus)
    scores = score_sources(engine, sources, embeddings, scorer, corpus)
    buckets = bucket_sources(engine, sources, scores, calibrate(scorer, corpus), corpus)
    clock.finish("quality", "", *text_size(sources))
    summaries = summarize_sources(engine, buckets).items()
    warnings = tuple(text for key, found in summaries for text in _quality_warnings(key, found))
    return DocumentMap(domains, buckets, warnings)


def _quality_warnings(key: str, found: SourceScores) -> list[str]:
    if found.state == "uninformative":
        return [f"source {key!r}: all documents have the same score of quality"]
    if found.state == "homogeneous":
        return [f"source {key!r}: nearly all documents are of one bucket of quality"]
    return []


def text_size(sources: Sequence[NormalizedSource]) -> tuple[int, int]:
    """Documents and text bytes of the normalised sources."""
    counts = [source.manifest["counts"] for source in sources]
    return sum(c["kept"] for c in counts), sum(c["kept_text_bytes"] for c in counts)
