"""What the page knows about a project: plain frozen records, each of which may be incomplete.

A field that the project folder does not answer is None (or empty), never zero.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from portolan.report.health import Health
from portolan.report.moments import Observed

LEVELS = (50, 80, 95)
"""Central intervals that the page shows, in per cent."""
FINAL_MARK = "1.00"


class Bucket(NamedTuple):
    """Consecutive metric rows drawn as one point; `completed` is the count of the last row."""

    completed: int
    mean: float
    low: float
    high: float


class Evaluation(NamedTuple):
    """One held-out evaluation after `completed` updates."""

    completed: int
    value: float


@dataclass(frozen=True)
class Source:
    """One source of the corpus after curation; counts are of training documents."""

    key: str
    category: str = ""
    license_spdx: str = ""
    license_class: str = ""
    num_documents: int | None = None
    num_bytes: int | None = None
    num_tokens: int | None = None
    num_heldout_documents: int | None = None
    num_heldout_tokens: int | None = None
    dropped: tuple[tuple[str, int], ...] = ()
    epochs: float | None = None


@dataclass(frozen=True)
class Corpus:
    """What the models read; cross-entropy of the unigram model in nats per token."""

    sources: tuple[Source, ...]
    vocab_size: int | None = None
    bytes_per_token: float | None = None
    tokenizer_digest: str = ""
    bos: str = ""
    eos: str = ""
    store_digest: str = ""
    num_store_tokens: int | None = None
    num_store_documents: int | None = None
    unigram_macro: float | None = None
    unigram_micro: float | None = None


@dataclass(frozen=True)
class Run:
    """One training run: its plan, its held-out evaluations and its condensed metrics.

    `flops` is the planned compute on `flops_axis`; `train_seconds` sums the time inside steps of
    the rows that count, without evaluation, saving, compilation outside a step or replayed rows.
    """

    id: str
    role: str
    width: int | None = None
    seed: int | None = None
    num_layers: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    total_parameters: int | None = None
    active_parameters: int | None = None
    num_steps: int | None = None
    stop_after: int | None = None
    tokens: int | None = None
    tokens_per_step: int | None = None
    flops: float | None = None
    flops_axis: str = ""
    rate_capped: bool = False
    completed: int = 0
    num_attempts: int = 0
    train_seconds: float | None = None
    evaluations: dict[str, tuple[Evaluation, ...]] = field(default_factory=dict)
    series: dict[str, tuple[Bucket, ...]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """All updates to be executed are done; a diagnostic may stop before its full plan."""
        planned = self.stop_after or self.num_steps
        return planned is not None and self.completed >= planned

    @property
    def fraction(self) -> float:
        """Completed share of the planned updates, 0 when the plan is unknown."""
        return min(1.0, self.completed / self.num_steps) if self.num_steps else 0.0

    @property
    def label(self) -> str:
        """Short name for charts: the width, with the seed unless it is 0."""
        if self.width is None:
            return self.id
        return f"d{self.width}" + (f" seed {self.seed}" if self.seed else "")

    @property
    def tokens_trained(self) -> int | None:
        """Tokens of the completed updates."""
        return self.completed * self.tokens_per_step if self.tokens_per_step else None

    @property
    def tokens_per_second(self) -> float | None:
        """Trained tokens over the seconds inside training steps."""
        if not self.tokens_trained or not self.train_seconds:
            return None
        return self.tokens_trained / self.train_seconds

    def final(self, key: str) -> float | None:
        """Value of a metric after the last planned update, None before that."""
        values = self.evaluations.get(key, ())
        if not values or self.num_steps is None or values[-1].completed < self.num_steps:
            return None
        return values[-1].value

    def latest(self, key: str) -> Evaluation | None:
        """Newest evaluation of a metric."""
        values = self.evaluations.get(key, ())
        return values[-1] if values else None


@dataclass(frozen=True)
class Law:
    """Loss = asymptote + scale * compute^(-exponent), compute on the named axis."""

    asymptote: float
    scale: float
    exponent: float

    def at(self, flops: float) -> float:
        """Loss at a compute."""
        return self.asymptote + self.scale * flops ** (-self.exponent)


@dataclass(frozen=True)
class Forecast:
    """A registered forecast. `quantiles[metric][mark][probability]` holds losses."""

    id: str
    made_at: str = ""
    title: str = ""
    metric: str = ""
    method: str = ""
    flops_axis: str = ""
    target_flops: float | None = None
    num_steps: int | None = None
    evaluations_known_before: int | None = None
    num_conditions: int | None = None
    retrospective: bool = False
    on_failure: str = ""
    quantiles: dict[str, dict[float, dict[float, float]]] = field(default_factory=dict)
    baseline: dict[float, float] = field(default_factory=dict)
    law: Law | None = None

    def median(self, mark: float = 1.0, metric: str = "") -> float | None:
        """Median at a mark (fraction of the run) of the metric of record, or of another one."""
        return self.quantiles.get(metric or self.metric, {}).get(mark, {}).get(0.5)

    def interval(
        self, level: int, mark: float = 1.0, metric: str = ""
    ) -> tuple[float, float] | None:
        """Central interval that holds `level` per cent, None when its quantiles are absent."""
        row = self.quantiles.get(metric or self.metric, {}).get(mark, {})
        tail = (100 - level) / 200
        low, high = row.get(round(tail, 4)), row.get(round(1 - tail, 4))
        return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class Score:
    """How the forecast did, in nats per token; the error is measured minus median.

    `standardised_error` is the normal score of the outcome in the forecast; the compute
    equivalent is the ratio of compute that the baseline law needs for the same difference.
    """

    outcome: float | None = None
    error: float | None = None
    standardised_error: float | None = None
    crps: float | None = None
    weighted_interval_score: float | None = None
    compute_equivalent: float | None = None
    coverage: tuple[tuple[str, float], ...] = ()
    num_scored: int | None = None
    num_void: int | None = None
    num_unverified: int | None = None
    bands: tuple[tuple[float, str], ...] = ()
    verdict: str = ""

    @property
    def is_void(self) -> bool:
        """The run has left the registered conditions: no difference from the forecast counts."""
        return bool(self.num_void) or self.verdict == "void"

    @property
    def is_unverified(self) -> bool:
        """Some conditions could not be checked, so no difference is shown either."""
        return bool(self.num_unverified) and not self.num_scored


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    seq: int
    id: str
    type: str
    time: str
    text: str
    kind: str = ""
    refs: tuple[str, ...] = ()
    supersedes: tuple[str, ...] = ()

    @property
    def short_id(self) -> str:
        """First ten digits of the digest in the id."""
        return self.id.rpartition(":")[2][:10]


class Claim(NamedTuple):
    """A published number, and how it stands to the figure it was compared with."""

    statement: str
    verdict: str
    against: str


@dataclass(frozen=True)
class Verification:
    """Result of checking the record: `state` is the verifier's word, e.g. `ok`."""

    state: str
    ok: bool
    problems: tuple[str, ...] = ()
    checked: tuple[tuple[str, int], ...] = ()
    files_checked: bool = False


@dataclass(frozen=True)
class Project:
    """Everything on the page."""

    name: str
    corpus: Corpus | None = None
    runs: tuple[Run, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    score: Score | None = None
    journal: tuple[Entry, ...] = ()
    order_grade: str = ""
    num_witnesses: int = 0
    verification: Verification | None = None
    claims: tuple[Claim, ...] = ()
    problems: tuple[str, ...] = ()
    has_ablation: bool = False
    has_map: bool = False
    observed: Observed = field(default_factory=Observed)
    health: Health | None = None

    @property
    def target(self) -> Run | None:
        """The run that the forecast is about."""
        return next((run for run in self.runs if run.role == "target"), None)

    @property
    def rungs(self) -> tuple[Run, ...]:
        """The small runs, from small to large, then by seed."""
        return tuple(run for run in self.runs if run.role == "rung")

    @property
    def forecast(self) -> Forecast | None:
        """The newest forecast; earlier ones stay listed."""
        return self.forecasts[-1] if self.forecasts else None
