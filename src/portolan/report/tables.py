"""Tables of the page: cost, corpus, mixture and the record."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from portolan.report.facts import Corpus, Entry, Project, Run, Source
from portolan.report.figures import Table, flops_axis
from portolan.report.words import (
    MISSING,
    count,
    duration,
    ladder_share,
    loss,
    metric_of_record,
    percent,
    scientific,
    signed,
    size,
)

QUIET_TYPES = frozenset({"artifact", "check", "observation", "evidence", "key"})
"""Record types that are many and say little to a reader; they are listed behind a fold."""
MAX_ENTRIES = 400


def cost_table(project: Project) -> Table | None:
    """What each run cost and brought; the ladder in sum at the end."""
    own = [run for run in project.runs if run.role != "imported"]
    if not own:
        return None
    target = project.target
    total = target.flops if target else None
    rows = [_cost_row(run, total, metric_of_record(project)) for run in own]
    seconds = [run.train_seconds for run in project.rungs]
    if project.rungs:
        rows.append(
            (
                "Ladder in all",
                MISSING,
                MISSING,
                count(sum(run.tokens or 0 for run in project.rungs)),
                scientific(sum(run.flops or 0.0 for run in project.rungs)),
                percent(ladder_share(project), 2),
                duration(sum(s for s in seconds if s)) if any(seconds) else MISSING,
                MISSING,
                MISSING,
            )
        )
    columns = ("Run", "All parameters", "Active", "Tokens", "Compute, FLOPs", "Of the target",
               "Time in steps", "Tokens/s", "Final loss")  # fmt: skip
    note = (
        f"Compute is planned and counted by formula: {flops_axis(project)}. Time is that inside "
        "training steps; evaluation, saving, start-up and repeated updates are left out. Active "
        "parameters leave out embedding, head, norms, gates and convolutions. Loss: held-out, "
        "macro, nats per token."
    )
    return Table("Cost of each run", columns, tuple(rows), note)


def _cost_row(run: Run, total: float | None, key: str) -> tuple[str, ...]:
    rate = run.tokens_per_second
    state = "" if run.finished else f" ({percent(run.fraction, 0)})"
    return (
        ("Target " if run.role == "target" else "") + run.label + state,
        count(run.total_parameters),
        count(run.active_parameters),
        count(run.tokens),
        scientific(run.flops),
        percent(run.flops / total, 2) if run.flops and total else MISSING,
        duration(run.train_seconds),
        count(round(rate)) if rate else MISSING,
        loss(run.final(key)),
    )


def score_table(project: Project) -> Table | None:
    """The score of the finished target in the terms of forecast verification."""
    score = project.score
    if score is None:
        return None
    rows = [
        ("Measured", loss(score.outcome), "nats per token at the end of the run"),
        ("Error", signed(score.error), "measured − forecast median, nats"),
        ("Standardised error z", signed(score.standardised_error, 2),
         "place of the measured value in the forecast, in standard deviations of a normal"),
        ("CRPS", loss(score.crps),
         "continuous ranked probability score, nats; 0 is perfect, lower is better"),
        ("WIS", loss(score.weighted_interval_score),
         "weighted interval score of the 50, 80 and 95 % intervals, nats; lower is better"),
        ("Compute equivalent", MISSING if score.compute_equivalent is None else
         f"{score.compute_equivalent:.3f}",
         "compute that the baseline law needs for the measured loss, over that for the median"),
        *((f"Coverage, {_level(name)}", percent(value, 0), "evaluations inside the interval")
          for name, value in score.coverage),
        ("Evaluations scored", count(score.num_scored), "those that met the registered conditions"),
        ("Void", count(score.num_void), "the run had left the registered conditions"),
        ("Unverified", count(score.num_unverified), "conditions could not be checked"),
    ]  # fmt: skip
    shown = tuple(row for row in rows if row[1] != MISSING)
    return (
        Table("Score of the forecast", ("Quantity", "Value", "Meaning"), shown) if shown else None
    )


def _level(name: str) -> str:
    """`0.5` and `50` as `50 %`."""
    try:
        value = float(name)
    except ValueError:
        return name
    return f"{100 * value if value <= 1 else value:.0f} %"


# ---------------------------------------------------------------- corpus


def corpus_tables(corpus: Corpus) -> tuple[Table, ...]:
    """Sources with licences and counts, and what was left out."""
    rows = [_source_row(source) for source in corpus.sources]
    if len(rows) > 1:
        rows.append(_source_row(_sum(corpus.sources)))
    columns = ("Source", "Kind", "Licence", "Documents", "Size", "Tokens", "Held-out documents",
               "Held-out tokens", "Epochs")  # fmt: skip
    note = (
        "Counts are what was kept; tokens include the marks at the ends of documents. Held-out "
        "documents were removed before training."
    )
    if any(source.epochs is not None for source in corpus.sources):
        note += " Epochs: how often the target reads the source."
    else:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    tables = [Table("Sources of the corpus", columns, tuple(rows), note)]
    reasons = sorted({reason for source in corpus.sources for reason, _ in source.dropped})
    if reasons:
        dropped = tuple(
            (source.key, *(count(dict(source.dropped).get(reason, 0)) for reason in reasons))
            for source in corpus.sources
        )
        names = tuple(reason.replace("_", " ").capitalize() for reason in reasons)
        tables.append(Table("Documents left out, by reason", ("Source", *names), dropped))
    return tuple(tables)


def _source_row(source: Source) -> tuple[str, ...]:
    license_text = source.license_spdx or MISSING
    if source.license_class and source.license_class != source.license_spdx:
        license_text += f" ({source.license_class})"
    return (
        source.key,
        source.category or MISSING,
        license_text,
        count(source.num_documents),
        size(source.num_bytes),
        count(source.num_tokens),
        count(source.num_heldout_documents),
        count(source.num_heldout_tokens),
        MISSING if source.epochs is None else f"{source.epochs:.2f}",
    )


def _sum(sources: tuple[Source, ...]) -> Source:
    def add(read: Callable[[Source], int | None]) -> int | None:
        known = [value for source in sources if (value := read(source)) is not None]
        return sum(known) if known else None

    return Source(
        key="All sources",
        num_documents=add(lambda s: s.num_documents),
        num_bytes=add(lambda s: s.num_bytes),
        num_tokens=add(lambda s: s.num_tokens),
        num_heldout_documents=add(lambda s: s.num_heldout_documents),
        num_heldout_tokens=add(lambda s: s.num_heldout_tokens),
    )


def corpus_facts(corpus: Corpus) -> tuple[tuple[str, str], ...]:
    """Tokenizer, store and reference losses as (name, value)."""
    facts = [
        ("Vocabulary", f"{count(corpus.vocab_size)} tokens" if corpus.vocab_size else ""),
        ("Bytes per token", f"{corpus.bytes_per_token:.3f}" if corpus.bytes_per_token else ""),
        ("Marks of a document", _marks(corpus)),
        ("Tokenizer digest", corpus.tokenizer_digest),
        ("Token store", f"{count(corpus.num_store_tokens)} tokens of "
         f"{count(corpus.num_store_documents)} documents" if corpus.num_store_tokens else ""),
        ("Store digest", corpus.store_digest),
        ("Unigram reference, macro", _nats(corpus.unigram_macro)),
        ("Unigram reference, micro", _nats(corpus.unigram_micro)),
    ]  # fmt: skip
    return tuple((name, value) for name, value in facts if value)


def _marks(corpus: Corpus) -> str:
    """Boundary tokens, or which boundaries have one when the summary only says yes or no."""
    marks = {"begin": corpus.bos, "end": corpus.eos}
    texts = (name if text == "true" else text for name, text in marks.items() if text != "false")
    return " … ".join(text for text in texts if text)


def _nats(value: float | None) -> str:
    return "" if value is None else f"{loss(value)} nats per token"


def claims_table(project: Project) -> Table | None:
    """What the project claims in numbers, and what each number agrees with."""
    if not project.claims:
        return None
    rows = tuple(
        (claim.statement, claim.verdict.replace("_", " "), claim.against or MISSING)
        for claim in project.claims
    )
    columns = ("Claim", "Verdict", "Compared with")
    return Table("Published numbers and what they were compared with", columns, rows, wraps=True)


# ---------------------------------------------------------------- record


@dataclass(frozen=True)
class Moment:
    """An entry of the journal as shown: time without milliseconds, digest shortened."""

    seq: int
    time: str
    type: str
    kind: str
    text: str
    short_id: str
    id: str
    superseded: bool


@dataclass(frozen=True)
class Timeline:
    """Entries that tell the story, all entries (the last MAX_ENTRIES), and counts by type."""

    story: tuple[Moment, ...]
    entries: tuple[Moment, ...]
    counts: tuple[tuple[str, int], ...]
    num_left_out: int


def timeline(project: Project) -> Timeline:
    """Journal entries in order."""
    replaced = {ref for entry in project.journal for ref in entry.supersedes}
    moments = tuple(_moment(entry, entry.id in replaced) for entry in project.journal)
    story = tuple(m for m in moments if m.type not in QUIET_TYPES and not _replaced_attempt(m))
    counts = Counter(entry.type for entry in project.journal)
    return Timeline(
        story=story[-MAX_ENTRIES:],
        entries=moments[-MAX_ENTRIES:],
        counts=tuple(sorted(counts.items())),
        num_left_out=max(0, len(moments) - MAX_ENTRIES),
    )


def _replaced_attempt(moment: Moment) -> bool:
    """The start of an attempt, which the record of its end replaces."""
    return moment.type == "attempt" and moment.superseded


def _moment(entry: Entry, superseded: bool) -> Moment:
    return Moment(
        seq=entry.seq,
        time=entry.time[:19].replace("T", " "),
        type=entry.type,
        kind=entry.kind,
        text=entry.text,
        short_id=entry.short_id,
        id=entry.id,
        superseded=superseded,
    )
