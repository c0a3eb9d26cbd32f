"""The page of a reconciliation: every figure, verdict and calculation, one file, no network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portolan.record.audit.crosschecks import CrossCheck, Outcome
from portolan.record.audit.figures import Figure
from portolan.record.audit.formulas import show_value
from portolan.record.audit.reconciliation import CaseResult, Reconciliation
from portolan.record.verdicts import MEANINGS, VERDICTS, Finding, Verdict
from portolan.report.site import render_template
from portolan.report.words import count, plural

TONES: Mapping[Verdict, str] = {
    "agree": "good",
    "agree_within_rounding": "good",
    "explained_by_basis": "plain",
    "superseded": "plain",
    "explained_by_time": "plain",
    "pending": "caution",
    "unreachable": "caution",
    "unsupported": "caution",
    "conflict": "bad",
}
CHECK_TONES: Mapping[Outcome, str] = {
    "holds": "good",
    "fails": "bad",
    "refused": "caution",
    "no data": "plain",
}

RULES: tuple[tuple[str, str], ...] = (
    (
        "step 1",
        "A figure without a source is unsupported; one whose source is closed, unreachable.",
    ),
    ("step 2", "A figure about a later step waits for it."),
    ("step 3", "One basis and unit: equal, rounded, superseded, of another time, or in conflict."),
    ("step 4", "Two bases: each figure must follow from its own definition, or be documented."),
    ("step 5", "No basis: every formula of its unit is tried."),
    ("status", "Success is derived from all sources; one that says otherwise makes it disputed."),
    ("R1", "Only figures of one basis, scope and unit are compared; others need a known mapping."),
    ("R2", "Rounding: equal if they differ by at most half the place of the last stated digit."),
    ("R3", "A later launched value beats an earlier claim only through a record that says so."),
    ("R4", "Formulas tie figures together: tokens, devices, FLOPs, utilisation, steps, time."),
    ("R5", "An inferred explanation never makes two figures agree."),
    ("R6", "Every mismatch stands beside the number, with its source."),
    ("R7", "A percentage of progress names its denominator."),
    ("R8", "A sampled series says nothing about extremes."),
    ("R9", "Bytes that are cited by a hash and cannot be fetched are committed, not available."),
    ("R10", "A record is sealed with a conflict only if its owners publish the conflict."),
)


@dataclass(frozen=True)
class FigureRow:
    """A figure as shown."""

    id: str
    name: str
    value: str
    unit: str
    basis: str
    layer: str
    stated_by: str
    date: str
    source: str
    url: str
    rest: str


@dataclass(frozen=True)
class FindingRow:
    """A finding with the two sides in words."""

    verdict: Verdict
    label: str
    tone: str
    left: str
    right: str
    rule: str
    reason: str
    arithmetic: tuple[str, ...]


@dataclass(frozen=True)
class CaseRow:
    """A case as shown; `verdicts` are the words that the filter looks for."""

    result: CaseResult
    verdicts: tuple[Verdict, ...]
    badges: tuple[tuple[str, str], ...]
    findings: tuple[FindingRow, ...]
    variants: tuple[tuple[str, tuple[FindingRow, ...]], ...]
    figures: tuple[FigureRow, ...]


def render_audit(result: Reconciliation, *, home: str = "") -> str:
    """The HTML of a reconciliation; the same result gives the same bytes.

    Args:
        result: the reconciliation.
        home: address of the page it belongs to, empty for none.
    """
    return render_template(
        "audit.html",
        (),
        result=result,
        home=home,
        status=_status(result),
        cases=tuple(_case(case) for case in result.cases),
        filters=tuple(
            (verdict, verdict.replace("_", " "), number, TONES[verdict])
            for verdict, number in reversed(result.counts.items())
        ),
        checks=_checks(result),
        lineage=_lineage(result),
        meanings=tuple((verdict.replace("_", " "), MEANINGS[verdict]) for verdict in VERDICTS),
        rules=RULES,
    )


def _checks(result: Reconciliation) -> Sequence[tuple[CrossCheck, str]]:
    """The cross-checks; none when the figures are too few for any of them."""
    if all(check.outcome == "no data" for check in result.checks):
        return ()
    return [(check, CHECK_TONES[check.outcome]) for check in result.checks]


def _status(result: Reconciliation) -> str:
    conflicts = len(result.open_conflicts)
    words = f"{plural(len(result.findings), 'comparison')}, {plural(conflicts, 'open conflict')}"
    return words + (f", as of {result.as_of[:10]}" if result.as_of != "not_stated" else "")


def _case(case: CaseResult) -> CaseRow:
    by_id = {figure.id: figure for figure in case.figures}
    findings = tuple(_finding(finding, by_id) for finding in case.findings)
    variants = tuple(
        (variant.assumption, tuple(_finding(finding, by_id) for finding in variant.findings))
        for variant in case.variants
    )
    assumed = [row for _, rows in variants for row in rows]
    verdicts: list[Verdict] = [row.verdict for row in (*findings, *assumed)]
    badges = tuple(dict.fromkeys((row.label, row.tone) for row in findings))
    figures = tuple(_figure(figure) for figure in case.figures)
    return CaseRow(case, tuple(dict.fromkeys(verdicts)), badges, findings, variants, figures)


def _finding(finding: Finding, by_id: Mapping[str, Figure]) -> FindingRow:
    return FindingRow(
        finding.verdict,
        finding.label,
        TONES[finding.verdict],
        _side(finding.left, by_id),
        _side(finding.right, by_id) if finding.right else "",
        finding.rule,
        finding.reason,
        finding.arithmetic,
    )


def _side(identity: str, by_id: Mapping[str, Figure]) -> str:
    figure = by_id.get(identity)
    if figure is None:
        return identity
    unit = "" if figure.unit in ("category", "time") else f" {figure.unit}"
    place = figure.id if figure.id.startswith(figure.layer) else f"{figure.layer}, {figure.id}"
    return f"{figure.name}: {show_value(figure)}{unit} ({place})"


def _figure(figure: Figure) -> FigureRow:
    rest = [figure.scope] if figure.scope else []
    rest += [f"as of {count(figure.as_of)} updates"] if figure.as_of is not None else []
    rest += [f"due at {count(figure.due)} updates"] if figure.due is not None else []
    return FigureRow(
        figure.id,
        figure.name,
        show_value(figure),
        "" if figure.unit in ("category", "time") else figure.unit,
        figure.basis,
        figure.layer,
        figure.stated_by,
        figure.date,
        figure.arithmetic if figure.layer == "derived" else figure.source,
        figure.url if figure.url.startswith(("https://", "http://")) else "",
        ", ".join(rest),
    )


def _lineage(result: Reconciliation) -> Sequence[tuple[str, str, str, str, str]]:
    """Rows (run, role, fork, completed, canonical rows) of the lineage, those that count first."""
    view = result.lineage
    if view is None:
        return ()
    counted = [
        (run.name, "production", count(run.fork), count(run.completed), count(interval.num_rows))
        for run, interval in zip(view.runs, view.intervals, strict=True)
    ]
    others = [
        (run.name, run.role.replace("_", " "), count(run.fork), count(run.completed), "none")
        for run in view.excluded
    ]
    return (*counted, *others)
