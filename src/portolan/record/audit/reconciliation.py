"""A whole reconciliation: cases with findings, cross-checks, lineage, and the worst verdict."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

from portolan.errors import UsageError
from portolan.recipe import find_recipe, load_recipe
from portolan.record.audit.crosschecks import CrossCheck, cross_check
from portolan.record.audit.decide import Decider
from portolan.record.audit.expressions import evaluate_rounded, names_in, show, substitute
from portolan.record.audit.figures import Figure
from portolan.record.audit.folder import Audit, CaseTable, SumTable, pair_of, read_audit
from portolan.record.audit.formulas import (
    Derivation,
    Index,
    derive,
    derived_figure,
    shape_figures,
    show_value,
)
from portolan.record.audit.links import Link, Links
from portolan.record.audit.telemetry import Series, read_telemetry
from portolan.record.bases import BASES, LAYERS
from portolan.record.lineage_view import LineageView, RunSpan, view_lineage
from portolan.record.quantities import agree_within
from portolan.record.verdicts import VERDICTS, Finding, Verdict, exit_code, worst

RUN_WIDE = (
    "batch.",
    "seq.",
    "steps.",
    "tokens.planned",
    "tokens_per_",
    "params.",
    "racks",
    "tasks",
)
"""Bases with one value for a whole run, unlike a step, a loss or a window."""


@dataclass(frozen=True)
class Note:
    """A remark beside the verdicts, tagged `fact` or `inferred`."""

    text: str
    status: str


@dataclass(frozen=True)
class Variant:
    """The findings of a case if an assumed link were there."""

    assumption: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class CaseResult:
    """One question: its figures, the findings about them, arithmetic and remarks."""

    id: str
    title: str
    question: str
    figures: tuple[Figure, ...]
    findings: tuple[Finding, ...]
    variants: tuple[Variant, ...] = ()
    arithmetic: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def worst(self) -> Verdict:
        """The worst verdict of its findings, without assumptions."""
        return worst(finding.verdict for finding in self.findings)


class Heading(TypedDict):
    """What a reconciliation is about."""

    title: str
    subject: str
    introduction: str
    as_of: str


@dataclass(frozen=True)
class Reconciliation:
    """Everything that a reconciliation says."""

    title: str
    subject: str
    introduction: str
    as_of: str
    cases: tuple[CaseResult, ...]
    checks: tuple[CrossCheck, ...] = ()
    lineage: LineageView | None = None
    series: tuple[Series, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, in order of their cases."""
        return tuple(finding for case in self.cases for finding in case.findings)

    @property
    def exit_code(self) -> int:
        """Worst verdict as an exit code; a cross-check that fails counts as a conflict."""
        failed: list[Verdict] = ["conflict" for check in self.checks if check.outcome == "fails"]
        return exit_code([*(finding.verdict for finding in self.findings), *failed])

    @property
    def counts(self) -> dict[Verdict, int]:
        """Number of findings of each verdict that occurs, from harmless to worst."""
        found = Counter(finding.verdict for finding in self.findings)
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}

    @property
    def open_conflicts(self) -> tuple[Finding, ...]:
        """Conflicts that the owners have not published: sealing is refused while there is one."""
        return tuple(f for f in self.findings if f.verdict == "conflict" and not f.published)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON of everything but the points of the series."""
        skipped = {"lineage", "series"}
        value = {
            field.name: [_plain(item) for item in getattr(self, field.name)]
            if field.name in ("cases", "checks")
            else getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in skipped
        }
        if self.lineage:
            value["lineage"] = _plain(self.lineage)
        counts = {str(verdict): number for verdict, number in self.counts.items()}
        return value | {"counts": counts, "exit_code": self.exit_code}


def reconcile_folder(folder: Path, unreachable: Iterable[str] = ()) -> Reconciliation:
    """Reconcile a folder that holds a table of claims and, if there are any, telemetry and links.

    Args:
        folder: see `portolan.record.audit.folder.read_audit`.
        unreachable: sources or addresses that could not be fetched.
    """
    audit = read_audit(folder)
    shape: list[Figure] = []
    if audit.table.recipe:
        recipe = load_recipe(find_recipe(audit.table.recipe))
        shape = shape_figures(recipe.shape(recipe.model.width), f"recipe {recipe.name}")
    wanted = frozenset(f.as_of for f in audit.figures if f.as_of is not None)
    series = read_telemetry(audit.telemetry, wanted)
    runs = [RunSpan(run.name, run.role, run.fork, run.completed) for run in audit.table.run]
    lineage = view_lineage(audit.table.subject or audit.table.title, runs) if runs else None
    return reconcile(
        audit.figures,
        audit.links,
        cases=audit.table.case or cases_of(audit.figures),
        shared=frozenset(audit.table.shared) or shared_of(audit.figures),
        shape=shape,
        series=series,
        lineage=lineage,
        unreachable=frozenset(unreachable),
        heading=_heading(audit),
    )


def reconcile(
    figures: Sequence[Figure],
    links: Sequence[Link],
    *,
    cases: Sequence[CaseTable],
    shared: frozenset[str],
    heading: Heading,
    shape: Sequence[Figure] = (),
    series: Sequence[Series] = (),
    lineage: LineageView | None = None,
    unreachable: frozenset[str] = frozenset(),
) -> Reconciliation:
    """Decide every case; links that are assumptions make a second set of findings of their case."""
    index = Index([*figures, *shape], shared)
    reached = _reached(figures, series, lineage)
    decider = Decider(index, Links(()), reached, unreachable, series)
    by_case: dict[str, list[Figure]] = {}
    for figure in figures:
        by_case.setdefault(figure.case, []).append(figure)
    known = {figure.id: figure for figure in [*figures, *shape]}
    results = [
        _decide_case(case, by_case.get(case.id, []), _Resolver(case, index, known), decider, links)
        for case in cases
    ]
    times = [f for f in figures if f.basis == "time.wall" and f.unit == "time"]
    checks = [*cross_check(index, times, reached), *_lineage_check(lineage, reached)]
    return Reconciliation(
        **heading,
        cases=tuple(results),
        checks=tuple(checks),
        lineage=lineage,
        series=tuple(series),
    )


def _decide_case(
    case: CaseTable,
    own: Sequence[Figure],
    resolver: "_Resolver",
    decider: Decider,
    links: Sequence[Link],
) -> CaseResult:
    """The findings of a case without assumptions, and those with each assumption about it."""
    sums = tuple(resolver.sum(item) for item in case.sums)
    pairs = [pair_of(text) for text in case.compare] or automatic_pairs(own, decider.index)
    ids = {name for pair in pairs for name in pair if name}
    about = [link for link in links if ids & set(link.figures)]
    facts = tuple(link for link in about if not link.assumption)

    def decide(used: tuple[Link, ...]) -> tuple[Finding, ...]:
        chosen = dataclasses.replace(decider, links=Links(used))
        return tuple(_decide(chosen, resolver.find, left, right) for left, right in pairs)

    variants = [Variant(a.text, decide((*facts, a))) for a in about if a.assumption]
    mine = {figure.id for figure in own}
    others = [resolver.find(name, "") for name in sorted(ids - mine)]
    return CaseResult(
        case.id,
        case.title,
        case.question,
        (*own, *others),
        decide(facts),
        tuple(variants),
        sums,
        tuple(Note(note.text, note.status) for note in case.notes),
    )


def cases_of(figures: Sequence[Figure]) -> tuple[CaseTable, ...]:
    """One case for each group of claims, titled by its first claim."""
    groups: dict[str, Figure] = {}
    for figure in figures:
        groups.setdefault(figure.case, figure)
    return tuple(
        CaseTable(id=case, title=first.name[:1].upper() + first.name[1:])
        for case, first in groups.items()
    )


def shared_of(figures: Sequence[Figure]) -> frozenset[str]:
    """Claims usable outside their own case: of a run-wide basis that only one case speaks of."""
    cases: dict[tuple[str, str], set[str]] = {}
    for figure in figures:
        cases.setdefault((figure.basis, figure.unit), set()).add(figure.case)
    return frozenset(
        f.id for f in figures if f.basis.startswith(RUN_WIDE) and len(cases[f.basis, f.unit]) == 1
    )


def automatic_pairs(figures: Sequence[Figure], index: Index) -> list[tuple[str, str]]:
    """Each figure against the weightiest one of its kind and unit, or else alone.

    The kind is the first word of the basis, so that tokens meet tokens and devices devices; a
    value that a formula gives outweighs prose. One comparison a figure.
    """
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        kind = figure.basis_name.partition(".")[0].rstrip("@()")
        groups.setdefault((kind, figure.unit_key), []).append(figure)
    pairs: list[tuple[str, str]] = []
    for (kind, unit), members in groups.items():
        if unit == "time":
            pairs += [(figure.id, "") for figure in members]
            continue
        reference = max(members, key=lambda figure: LAYERS.index(figure.layer))
        for figure in members:
            derived = kind and derive(figure.basis, figure.unit, index, figure.case)
            if derived and figure.number is not None and figure.basis in BASES:
                place = max(figure.place, derived.place)
                within = agree_within(figure.number, derived.number or figure.number, place)
                if within and figure.qualifier == "":
                    pairs.append((figure.id, f"={figure.basis}"))
            if figure is not reference:
                pairs.append((figure.id, reference.id))
        if len(members) == 1 and not any(left == members[0].id for left, _ in pairs):
            pairs.append((members[0].id, ""))
    return pairs


@dataclass
class _Resolver:
    """Figures by id within a case: stated ones, sums of the auditor, and `=basis` by formula."""

    case: CaseTable
    index: Index
    known: Mapping[str, Figure]
    sums: dict[str, Figure] = field(default_factory=dict)

    def find(self, name: str, unit: str) -> Figure:
        if name in self.sums or name in self.known:
            return self.sums.get(name) or self.known[name]
        basis = name.removeprefix("=")
        if name.startswith("=") and (found := derive(basis, unit, self.index, self.case.id)):
            return found
        raise UsageError(
            f"case {self.case.id} names {name}, which is no figure and follows from no formula"
        )

    def sum(self, item: SumTable) -> str:
        """Evaluate a line of arithmetic, add its value to the figures, return it as text."""
        parts = {name: self.find(name, "") for name in names_in(item.expression)}
        numbers = {name: f.number for name, f in parts.items() if f.number is not None}
        places = {name: figure.place for name, figure in parts.items()}
        value, place = evaluate_rounded(item.expression, numbers, places)
        texts = {name: show_value(figure) for name, figure in parts.items()}
        text = f"{substitute(item.expression, texts)} = {show(value, item.digits)}"
        line = f"{item.text}: {text}{f' {item.unit}' if item.unit else ''}"
        if item.id:
            found = Derivation(item.basis, value, place, text)
            self.sums[item.id] = derived_figure(
                item.id, item.text, item.unit, item.basis, found, self.case.id
            )
        return line


def _decide(decider: Decider, find: Callable[[str, str], Figure], left: str, right: str) -> Finding:
    first = find(left, "")
    if not right:
        return decider.examine(first)
    return decider.compare(first, find(right, first.unit))


def _reached(
    figures: Sequence[Figure], series: Sequence[Series], lineage: LineageView | None
) -> int | None:
    """Completed updates by the furthest observation."""
    steps = [item.last for item in series]
    for figure in figures:
        if figure.layer == "observed" and figure.number is not None and not figure.subject:
            if figure.basis == "step.row":
                steps.append(int(figure.number) + 1)
            elif figure.basis == "step.completed":
                steps.append(int(figure.number))
    if lineage and lineage.runs:
        steps.append(max(run.completed for run in lineage.runs))
    return max(steps, default=None)


def _lineage_check(lineage: LineageView | None, reached: int | None) -> list[CrossCheck]:
    if lineage is None or reached is None:
        return []
    name = "updates in the canonical intervals = updates completed"
    lengths = " + ".join(f"{interval.num_rows:,}" for interval in lineage.intervals)
    line = f"{lengths} = {lineage.num_rows:,}"
    first = lineage.runs[0].fork if lineage.runs else 0
    holds = lineage.num_rows == reached - first
    reason = f"{reached:,} updates are completed"
    return [CrossCheck(name, "holds" if holds else "fails", reason, (line,))]


def _plain(item: Any) -> dict[str, Any]:
    """A dataclass as JSON, decimals as text."""
    return dataclasses.asdict(
        item,
        dict_factory=lambda pairs: {
            name: str(value) if isinstance(value, Decimal) else value for name, value in pairs
        },
    )


def _heading(audit: Audit) -> Heading:
    table = audit.table
    return {
        "title": table.title,
        "subject": table.subject,
        "introduction": table.introduction,
        "as_of": table.as_of,
    }
