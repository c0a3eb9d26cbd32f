"""What the pages of the corpus show: plain facts, free of files and of markup."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple


class Count(NamedTuple):
    """Documents and training tokens of a group."""

    documents: int = 0
    tokens: int = 0

    def __add__(self, other: tuple[int, ...]) -> "Count":  # pyright: ignore
        return Count(self.documents + other[0], self.tokens + other[1])


class Example(NamedTuple):
    """A document as shown: the start of its text."""

    source: str
    id: str
    text: str
    is_cut: bool


@dataclass(frozen=True)
class Domain:
    """A row of the map. `origin` says who named it: keywords, llm, imported, human or source."""

    name: str
    label: str
    keywords: tuple[str, ...]
    origin: str

    @property
    def other_words(self) -> tuple[str, ...]:
        """Keywords that the label does not hold."""
        return tuple(word for word in self.keywords if word not in self.label)


@dataclass(frozen=True)
class Overview:
    """The grid: counts by (domain, bucket), and by bucket of each source and content type.

    `cells` and `examples` are keyed by (domain name, bucket index); `cuts` holds the raw scores
    between the buckets by content type; `by_domain_source` counts by (domain name, source).
    """

    domains: tuple[Domain, ...]
    num_buckets: int
    cells: Mapping[tuple[str, int], Count]
    by_source: Mapping[str, tuple[Count, ...]]
    by_type: Mapping[str, tuple[Count, ...]]
    by_domain_source: Mapping[tuple[str, str], Count]
    cuts: Mapping[str, tuple[float, ...]]
    examples: Mapping[tuple[str, int], tuple[Example, ...]]
    store_digest: str

    @cached_property
    def by_bucket(self) -> tuple[Count, ...]:
        """Everything in each bucket."""
        return tuple(
            sum((self.cell(domain.name, b) for domain in self.domains), Count())
            for b in range(self.num_buckets)
        )

    @cached_property
    def total(self) -> Count:
        """The whole store."""
        return sum(self.by_bucket, Count())

    def cell(self, domain: str, bucket: int) -> Count:
        """One cell; a cell without documents counts nothing."""
        return self.cells.get((domain, bucket), Count())

    def row(self, domain: str) -> tuple[Count, ...]:
        """The buckets of a domain."""
        return tuple(self.cell(domain, b) for b in range(self.num_buckets))

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Q0, Q1, ...; without buckets of quality there is one for all."""
        return tuple(f"Q{b}" for b in range(self.num_buckets)) if self.num_buckets > 1 else ("all",)


@dataclass(frozen=True)
class Pair:
    """One evidence row of near-duplicate removal, with both texts aligned (`differences`)."""

    removed_id: str
    removed_source: str
    kept_id: str
    kept_source: str
    containment: float
    jaccard: float
    new_words: int
    chars_removed: int
    chars_kept: int
    component_size: int
    is_exempt: bool
    segments: tuple[tuple[Any, ...], ...]

    @property
    def stratum(self) -> tuple[str, str, int]:
        """Removed source, kept source, containment in steps of .05."""
        return self.removed_source, self.kept_source, containment_bin(self.containment)


def containment_bin(containment: float) -> int:
    """Twentieths: 19 holds .95 up to 1, and 1 itself."""
    return min(19, int(containment * 20 + 1e-9))


@dataclass(frozen=True)
class Pairs:
    """The sample of evidence rows, the size of every stratum, and what the bands can find."""

    evidence_key: str
    rows: tuple[Pair, ...]
    strata: Mapping[tuple[str, str, int], int]
    per_stratum: int
    threshold: float
    bands: int
    band_rows: int
    shingle: str
    losses: tuple[tuple[str, int, int, bool], ...] = ()
    """Source, documents removed, documents before, exempt."""

    @property
    def num_evidence(self) -> int:
        """All evidence rows."""
        return sum(self.strata.values())


@dataclass(frozen=True)
class EvaluationSetFacts:
    """A registered evaluation set: `state` is required, searched for, excluded or not there."""

    name: str
    version: str
    license_spdx: str
    rows: int | None
    ngrams: int | None
    state: str


class Match(NamedTuple):
    """One evidence row of decontamination: the folded words of a document that an item holds."""

    source: str
    document: str
    evaluation_set: str
    item: str
    rule: str
    score: float
    matched: str


@dataclass(frozen=True)
class Contamination:
    """Flags by source and set, the sets, a sample of the evidence, and recall by injection."""

    key: str
    flags: Mapping[tuple[str, str], int]
    flagged: Mapping[str, int]
    documents: Mapping[str, int]
    sets: tuple[EvaluationSetFacts, ...]
    matches: tuple[Match, ...]
    num_evidence: int
    recall: tuple[tuple[str, int, int], ...] = ()
    """Layout, items injected, items found."""


class StepTime(NamedTuple):
    """A step of curation when it last ran: documents and text bytes it handled, seconds."""

    name: str
    documents: int
    text_bytes: int
    seconds: float


@dataclass(frozen=True)
class StageFacts:
    """A stage as its manifest tells it."""

    name: str
    label: str
    key: str
    folder: str
    inputs: tuple[str, ...]
    rows_in: int | None
    rows_out: int
    bytes_out: int
    shards: int
    empty_shards: int
    counts: Mapping[str, int]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class SourceFlow:
    """Where the documents of a source went: reasons in the order in which they apply, then kept."""

    key: str
    read: int
    dropped: Mapping[str, int]
    heldout: int
    kept: int
    tokens: int

    @property
    def is_complete(self) -> bool:
        """Whether every document read is accounted for."""
        return self.read == sum(self.dropped.values()) + self.kept


@dataclass(frozen=True)
class DataMap:
    """Everything on the pages of a corpus; what curation did not do is None or empty."""

    name: str
    store_digest: str
    overview: Overview
    pairs: Pairs | None
    contamination: Contamination | None
    mixtures: tuple[Mapping[str, Any], ...]
    provenance: tuple[Mapping[str, Any], ...]
    flows: tuple[SourceFlow, ...]
    stages: tuple[StageFacts, ...]
    steps: tuple[StepTime, ...] = ()
    problems: tuple[str, ...] = field(default=())
