"""The page of stages: where the documents of each source went, and every stage by its manifest."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portolan.report.canvas import finish, table, tips
from portolan.report.data_map.facts import SourceFlow, StageFacts, StepTime
from portolan.report.figures import Figure, Key, Table
from portolan.report.palette import colour
from portolan.report.words import MISSING, count, duration, percent, size

REASONS: Mapping[str, str] = {
    "not_chosen": "not chosen",
    "content_key_dup": "same content key",
    "source_dup": "duplicate in the source",
    "global_dup": "duplicate of another source",
    "contaminated": "holds a test item",
    "fuzzy_dup": "near-duplicate",
    "heldout": "held out",
    "near_heldout": "close to held-out text",
    "license_refused": "licence refused",
}
"""Words for the reasons that the stages write; others are shown as they are."""
TITLES: Mapping[str, str] = {
    "normalise": "Normalised documents",
    "dup_doc": "Exact duplicates",
    "heldout_documents": "Held-out documents",
    "heldout": "Close to held-out text",
    "eval_index": "Index of test items",
    "eval_hits": "Matches with test items",
    "contaminated": "Decontamination",
    "minhash": "MinHash signatures",
    "fuzzy_dup": "Near-duplicates",
    "embedding": "Embeddings",
    "domains": "Fit of the domains",
    "domain": "Domains of the documents",
    "quality": "Quality of the documents",
    "train": "Training documents",
    "store": "Token store",
}
"""Names of the stages for a person; others are shown as they are."""
NUM_REASONS = 6
KEPT_SERIES, REST_SERIES = 3, 7
REASON_SERIES = (1, 2, 4, 5, 6, 8)
MAX_SOURCES = 40
MAX_PARAMS = 3
"""Parameters differ between the sources of a stage at most by the source: three tell enough."""
REST = "other reasons"
KEPT = "kept for training"


@dataclass(frozen=True)
class StageBox:
    """The stages of one name as shown: a cross-source stage, or one of every source."""

    name: str
    title: str
    summary: str
    parts: Table
    numbers: Table
    inputs: tuple[str, ...]
    params: tuple[str, ...]


def word(reason: str) -> str:
    """A reason in words."""
    return REASONS.get(reason, reason.replace("_", " "))


def lead(flows: Sequence[SourceFlow]) -> str:
    """One sentence on what was read and what is left."""
    read, kept = sum(flow.read for flow in flows), sum(flow.kept for flow in flows)
    share = percent(kept / read) if read else MISSING
    adds_up = all(flow.is_complete for flow in flows)
    return f"{count(read)} documents were read, {count(kept)} ({share}) are kept for training. " + (
        "Each of the others is counted once, under the first reason that applied."
        if adds_up
        else "The counts of some source do not add up: see the table."
    )


def accounting_table(flows: Sequence[SourceFlow]) -> Table:
    """The identity: read = dropped for each reason + kept, by source."""
    reasons = ordered_reasons(flows)
    rows = [
        (
            flow.key,
            count(flow.read),
            count(flow.kept),
            *(count(flow.dropped[r]) if flow.dropped.get(r) else MISSING for r in reasons),
            "adds up" if flow.is_complete else "does not add up",
            count(flow.tokens),
        )
        for flow in flows
    ]
    columns = ("Source", "Read", "Kept", *(word(r).capitalize() for r in reasons), "Sum", "Tokens")
    return Table("Documents of each source", columns, tuple(rows))


def ordered_reasons(flows: Sequence[SourceFlow]) -> list[str]:
    """All reasons, the most frequent first."""
    totals: dict[str, int] = {}
    for flow in flows:
        for reason, number in flow.dropped.items():
            totals[reason] = totals.get(reason, 0) + number
    return sorted((r for r in totals if totals[r]), key=lambda r: (-totals[r], r))


def flow_figure(flows: Sequence[SourceFlow]) -> Figure | None:
    """Shares of the documents read of each source by what became of them."""
    import altair as alt

    shown = sorted((flow for flow in flows if flow.read), key=lambda flow: -flow.read)[:MAX_SOURCES]
    if not shown:
        return None
    most = ordered_reasons(shown)[:NUM_REASONS]
    order = [KEPT, *map(word, most), REST]
    numbers = (KEPT_SERIES, *REASON_SERIES[: len(most)], REST_SERIES)
    shades = [colour(f"series-{number}") for number in numbers]
    rows = [
        {
            "source": flow.key,
            "what": order[i],
            "order": i,
            "share": number / flow.read,
            "documents": number,
        }
        for flow in shown
        for i, number in enumerate(_parts(flow, most))
        if number
    ]
    used = {row["what"] for row in rows}
    keys = [
        Key(name, shade, "dot") for name, shade in zip(order, shades, strict=True) if name in used
    ]
    axis = alt.Axis(title="share of the documents read", format="%", tickCount=6, grid=False)
    names = alt.Axis(title=None, ticks=False, domain=False, labelLimit=170, labelPadding=6)
    chart = (
        alt.Chart(table(rows))
        .mark_bar(stroke=colour("paper"), strokeWidth=0.5)
        .encode(
            y=alt.Y("source:N", sort=[flow.key for flow in shown], axis=names),
            x=alt.X("share:Q", axis=axis, scale=alt.Scale(domain=[0, 1])),
            color=alt.Color(
                "what:N", scale=alt.Scale(domain=order, range=shades), legend=None
            ),
            order=alt.Order("order:Q"),
            tooltip=tips(source="source", what="what became of it", documents="documents|,d",
                         share="share|.1%"),
        )
    )  # fmt: skip
    left_out = sum(1 for flow in flows if flow.read) - len(shown)
    caption = "A bar is a source, ordered by documents read." + (
        f" {left_out} smaller sources are in the table only." if left_out else ""
    )
    return Figure(
        "flow-by-source",
        "Documents by what became of them",
        caption,
        lead(flows),
        finish(chart, "", max(110, 30 * len(shown) + 30)),
        tuple(keys),
    )


def _parts(flow: SourceFlow, reasons: Sequence[str]) -> list[int]:
    """Documents kept, dropped for each of the reasons, dropped for others."""
    known = [flow.dropped.get(reason, 0) for reason in reasons]
    return [flow.kept, *known, sum(flow.dropped.values()) - sum(known)]


def stage_boxes(stages: Sequence[StageFacts]) -> list[StageBox]:
    """The stages by name, in the order in which they depend on each other."""
    name_of = {stage.key: stage.name for stage in stages}
    groups: dict[str, list[StageFacts]] = {}
    for stage in stages:
        groups.setdefault(stage.name, []).append(stage)
    return [_box(name, group, name_of) for name, group in groups.items()]


def _box(name: str, group: Sequence[StageFacts], name_of: Mapping[str, str]) -> StageBox:
    numbers: Counter[str] = Counter()
    for stage in group:
        numbers.update(stage.counts)
    known = [stage.rows_in for stage in group if stage.rows_in is not None]
    into = f"{count(sum(known))} rows in, " if known else ""
    several = f"{len(group)} sources: " if len(group) > 1 else ""
    inputs = dict.fromkeys(name_of[key] for s in group for key in s.inputs if key in name_of)
    params = dict.fromkeys(
        json.dumps(dict(stage.params), indent=2, sort_keys=True, ensure_ascii=False)
        for stage in group
    )
    return StageBox(
        name,
        TITLES.get(name, name.replace("_", " ").capitalize()),
        f"{several}{into}{count(sum(stage.rows_out for stage in group))} out",
        _parts_table(group),
        Table(
            "Counts in the manifest",
            ("What", "Number"),
            tuple((word(what), count(number)) for what, number in sorted(numbers.items())),
        ),
        tuple(inputs),
        tuple(params)[:MAX_PARAMS],
    )


def _parts_table(group: Sequence[StageFacts]) -> Table:
    rows = [
        (
            stage.label,
            count(stage.rows_in),
            count(stage.rows_out),
            f"{stage.shards} ({stage.empty_shards} empty)"
            if stage.empty_shards
            else count(stage.shards),
            size(stage.bytes_out),
            stage.key,
            stage.folder,
        )
        for stage in group
    ]
    columns = ("Stage", "Rows in", "Rows out", "Shards", "Written", "Key", "Folder")
    return Table("Folders", columns, tuple(rows))


def step_table(steps: Sequence[StepTime]) -> Table:
    """What each step took when it last ran."""
    rows = [
        (
            step.name,
            count(step.documents),
            duration(step.seconds),
            count(round(step.documents / step.seconds)) if step.seconds else MISSING,
            f"{step.text_bytes / step.seconds / 1e6:.1f}" if step.seconds else MISSING,
        )
        for step in steps
    ]
    columns = ("Step", "Documents", "Time", "Documents/s", "MB/s of text")
    note = "Elapsed time on the machine that ran the step; kept outside the corpus."
    return Table("Time of each step when it last ran", columns, tuple(rows), note)
