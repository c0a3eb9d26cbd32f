"""Do two figures agree? The decision order of record.md 7, rules R1 to R10, all in decimal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from portolan.record.audit.expressions import show
from portolan.record.audit.figures import Figure
from portolan.record.audit.formulas import (
    FORMULAS,
    NATURAL_UNITS,
    Derivation,
    Index,
    derivations,
    show_value,
)
from portolan.record.audit.links import Links
from portolan.record.audit.telemetry import Series
from portolan.record.bases import BASES, NOT_STATED, same_basis
from portolan.record.completeness import speaks_of_extremes
from portolan.record.quantities import agree_within
from portolan.record.status import Signals, derive_status
from portolan.record.verdicts import Explanation, Finding, Verdict

Support = Literal["reproduced", "documented", "contradicted", "none"]


@dataclass(frozen=True)
class Decider:
    """What a decision rests on: the other figures, the links, and how far the run has come.

    `reached` counts completed updates, None if nothing says so; `unreachable` holds the sources
    and addresses that could not be fetched.
    """

    index: Index
    links: Links
    reached: int | None = None
    unreachable: frozenset[str] = frozenset()
    series: Sequence[Series] = field(default=())

    def compare(self, first: Figure, second: Figure) -> Finding:
        """The finding for two figures that are said of one thing."""
        for figure in (first, second):
            if early := self._before_values(figure, first, second):
                return early
        if NOT_STATED in (first.basis, second.basis):
            unstated = first if first.basis == NOT_STATED else second
            return self._without_basis(unstated, first, second)
        if _comparable(first, second):
            return self._same_basis(first, second)
        return self._different_bases(first, second)

    def examine(self, figure: Figure) -> Finding:
        """The finding for one figure alone: its source, its own definition, its evidence."""
        if early := self._before_values(figure, figure, None):
            return early
        if figure.basis == NOT_STATED:
            return self._without_basis(figure, figure, None)
        if finding := self._against_series(figure):
            return finding
        support, lines = self._support(figure)
        if support == "contradicted":
            reason = f"the definition of {figure.basis} gives another value than {figure.value}"
            return self._finding("conflict", "fact", "R4", reason, lines, figure, None)
        if support == "none":
            reason = (
                f"nothing documents a {figure.layer} figure of {figure.basis}, and no formula "
                "reaches it"
            )
            return self._finding("unsupported", "fact", "step 4", reason, lines, figure, None)
        reason = f"{support} by {'its own definition' if lines else f'its layer, {figure.layer}'}"
        return self._finding("agree", "fact", "R4", reason, lines, figure, None)

    # ------------------------------------------------------------ steps 1 and 2

    def _before_values(
        self, figure: Figure, first: Figure, second: Figure | None
    ) -> Finding | None:
        """A source that is missing or unreachable, or an event that has not happened."""
        if not figure.has_locator:
            reason = f"{figure.id} names no place where it was stated"
            return self._finding("unsupported", "fact", "step 1", reason, (), first, second)
        if self.unreachable & {figure.source, figure.url}:
            reason = f"the source of {figure.id} cannot be fetched: committed, not available"
            return self._finding("unreachable", "fact", "R9", reason, (), first, second)
        if figure.due is not None and (self.reached is None or self.reached < figure.due):
            at = "an unknown number of" if self.reached is None else f"{self.reached:,}"
            reason = f"{figure.id} speaks of {figure.due:,} updates; {at} are completed"
            if void := self.links.void(figure.id):
                reason += f". As a strict test it is void from step {void.from_step}: {void.text}"
            if second is not None and not _comparable(first, second):
                reason += f". R1 refuses the difference of {first.basis} and {second.basis}"
            lines = self._candidates(figure) if figure.basis == NOT_STATED else ()
            return self._finding("pending", "fact", "step 2", reason, lines, first, second)
        return None

    # ------------------------------------------------------------ step 3: one basis

    def _same_basis(self, first: Figure, second: Figure) -> Finding:
        if first.basis_name.startswith("status."):
            return self._opinions(first, second)
        lines = tuple(f.arithmetic for f in (first, second) if f.arithmetic)
        a, b = first.number, second.number
        if a is None or b is None:
            equal, line = first.value == second.value, f"{first.value} and {second.value}"
        else:
            equal, line = (
                a == b,
                f"|{show_value(first)} − {show_value(second)}| = {show(abs(a - b))}",
            )
        if equal:
            reason = f"{show_value(first)} = {show_value(second)}"
            return self._finding("agree", "fact", "step 3", reason, lines, first, second)
        lines = (*lines, line)
        if a is not None and b is not None:
            place = max(first.place, second.place)
            within = agree_within(a, b, place)
            sign, half = ("≤" if within else ">"), show(place / 2)
            limit = (
                f" {sign} {half}, half of the last stated digit" if place else ", both are exact"
            )
            lines = (*lines[:-1], lines[-1] + limit)
            if within:
                reason = "equal to the digits that are stated"
                return self._finding(
                    "agree_within_rounding", "fact", "R2", reason, lines, first, second
                )
        if link := self.links.superseding(first.id, second.id):
            return self._finding(
                "superseded", "fact" if link.is_fact else "inferred", "R3", link.text, lines,
                first, second,
            )  # fmt: skip
        if moments := _moments(first, second):
            unknown = NOT_STATED in (first.qualifier, second.qualifier)
            known: Explanation = "inferred" if unknown else "fact"
            reason = f"they are of {moments[0]} and of {moments[1]}"
            return self._finding("explained_by_time", known, "step 3", reason, lines, first, second)
        reason = "one basis, two values, and no record that one replaces the other"
        return self._finding("conflict", "fact", "R3", reason, lines, first, second)

    def _opinions(self, first: Figure, second: Figure) -> Finding:
        """Words of `status.*` are opinions of one group: they agree or the status is disputed."""
        lines = (f"{first.basis}: {first.value}; {second.basis}: {second.value}",)
        if first.says_success == second.says_success:
            reason = "both say the same of the end"
            return self._finding("agree", "fact", "step 3", reason, lines, first, second)
        log_fails = any(
            f.basis_name == "status.log" and not f.says_success for f in (first, second)
        )
        outside = [f.says_success for f in (first, second) if f.basis_name != "status.log"]
        status = derive_status(Signals(False, None, None, None, any(outside), log_fails))
        words = f"{status.word}{', disputed' if status.disputed else ''}"
        reason = f"the derived status is {words}: {', '.join(status.reasons)}"
        return self._finding("conflict", "fact", "status", reason, lines, first, second)

    # ------------------------------------------------------------ step 4: different bases

    def _different_bases(self, first: Figure, second: Figure) -> Finding:
        supports = [self._support(figure) for figure in (first, second)]
        lines = tuple(line for _, found in supports for line in found)
        for figure, (support, _) in zip((first, second), supports, strict=True):
            if support == "contradicted":
                reason = f"{figure.id} is not what its own definition, {figure.basis}, gives"
                return self._finding("conflict", "fact", "step 4", reason, lines, first, second)
        for figure, (support, _) in zip((first, second), supports, strict=True):
            if support == "none":
                reason = (
                    f"{figure.id}: no formula reaches it, and a {figure.layer} figure alone does "
                    f"not document {figure.basis}"
                )
                return self._finding("unsupported", "fact", "step 4", reason, lines, first, second)
        stated = [figure.id for figure in (first, second) if figure.layer != "derived"]
        link = self.links.defining(stated)
        known: Explanation = "fact" if link and link.is_fact else "inferred"
        reason = link.text if link else "both definitions hold, but no public record states them"
        if first.basis != second.basis:
            reason += f" ({first.basis} and {second.basis})"
        return self._finding("explained_by_basis", known, "R1", reason, lines, first, second)

    def _support(self, figure: Figure) -> tuple[Support, tuple[str, ...]]:
        """How far a figure is backed by its own definition or by its layer, and the arithmetic."""
        if figure.layer == "derived":
            return "reproduced", (figure.arithmetic,)
        found = [item for item in derivations(figure, self.index) if item.is_definition]
        for derivation in found:
            if _reproduces(figure, derivation):
                return "reproduced", (self._line(figure, derivation),)
        if found:
            return "contradicted", tuple(self._line(figure, item) for item in found)
        if self.links.registering(figure.id):
            return "documented", ()
        documented = figure.layer in BASES[figure.basis_name].documented_by
        return ("documented" if documented else "none"), ()

    # ------------------------------------------------------------ step 5: no basis

    def _without_basis(self, figure: Figure, first: Figure, second: Figure | None) -> Finding:
        lines = self._candidates(figure)
        fitting = [basis for basis, item in self._tries(figure) if _reproduces(figure, item)]
        if fitting:
            reason = f"{figure.id} states no basis; {' and '.join(fitting)} would give its value"
            return self._finding(
                "explained_by_basis", "inferred", "R5", reason, lines, first, second
            )
        reason = f"{figure.id} states no basis, and none of the registry gives {figure.value}"
        return self._finding("unsupported", "fact", "step 5", reason, lines, first, second)

    def _tries(self, figure: Figure) -> list[tuple[str, Derivation]]:
        """What every formula of the figure's unit gives."""
        found: list[tuple[str, Derivation]] = []
        for basis in dict.fromkeys(formula.basis for formula in FORMULAS):
            unit = NATURAL_UNITS.get(basis, "")
            probe = Figure(
                figure.id, basis, "0", unit, basis, "claimed",
                case=figure.case, scope=figure.scope,
            ) if unit else None  # fmt: skip
            if probe and probe.unit_key == figure.unit_key:
                found += [(basis, item) for item in derivations(probe, self.index)]
        return found

    def _candidates(self, figure: Figure) -> tuple[str, ...]:
        return tuple(f"{basis}: {item.arithmetic}" for basis, item in self._tries(figure))

    # ------------------------------------------------------------ telemetry

    def _against_series(self, figure: Figure) -> Finding | None:
        """A figure about a series that was read: its value at a step, or an extreme of it."""
        extreme = speaks_of_extremes(figure.name)
        if figure.number is None or not (extreme or figure.as_of is not None):
            return None
        for series in self.series:
            if series.basis != figure.basis or series.unit != figure.unit:
                continue
            if extreme:
                return self._extreme(figure, series)
            value = series.points.get(figure.as_of or 0)
            if value is not None:
                within = agree_within(figure.number, value, figure.place)
                lines = (f"{series.name} after {figure.as_of:,} updates: {show(value)}",)
                return self._finding(
                    "agree_within_rounding" if within else "conflict", "fact", "R2",
                    f"the series says {show(value)}", lines, figure, None,
                )  # fmt: skip
        return None

    def _extreme(self, figure: Figure, series: Series) -> Finding:
        if series.completeness != "full":
            reason = (
                f"{series.name} is {series.completeness}: it says nothing about extremes, nor "
                "that something never happened"
            )
            return self._finding("unsupported", "fact", "R8", reason, (), figure, None)
        lines = (
            f"{series.name}, {series.num_points:,} rows: {show(series.low)} to {show(series.high)}",
        )
        fits = any(
            agree_within(figure.number or series.low, value, figure.place)
            for value in (series.low, series.high)
        )
        verdict: Verdict = "agree_within_rounding" if fits else "conflict"
        return self._finding(verdict, "fact", "R2", "read from every row", lines, figure, None)

    # ------------------------------------------------------------ shared

    def _line(self, figure: Figure, item: Derivation) -> str:
        number = figure.number
        if number is None or number == item.value:
            return item.arithmetic
        same = "agrees with" if _reproduces(figure, item) else "is not"
        return f"{item.arithmetic}, {same} {show_value(figure)}"

    def _finding(
        self, verdict: Verdict, explanation: Explanation, rule: str, reason: str,
        lines: Sequence[str], first: Figure, second: Figure | None,
    ) -> Finding:  # fmt: skip
        ids = [first.id, *([second.id] if second else [])]
        return Finding(
            first.id,
            second.id if second else "",
            verdict,
            explanation,
            rule,
            reason,
            tuple(dict.fromkeys(lines)),
            published=verdict == "conflict" and self.links.published(ids),
        )


def _comparable(first: Figure, second: Figure) -> bool:
    """R1: same basis and unit, and scopes that differ at most in segment, window or as-of."""
    return (
        NOT_STATED not in (first.basis, second.basis)
        and same_basis(first.basis, second.basis)
        and first.unit_key == second.unit_key
        and first.subject == second.subject
    )


def _reproduces(figure: Figure, item: Derivation) -> bool:
    """R2 by the coarser of the stated digits and the digits that the inputs leave."""
    place = max(figure.place, item.place)
    return figure.number is not None and agree_within(figure.number, item.value, place)


def _moments(first: Figure, second: Figure) -> tuple[str, str] | None:
    """The windows, segments or steps of two figures if they differ, else None."""
    if first.qualifier != second.qualifier:
        return f"window {first.qualifier}", f"window {second.qualifier}"
    scopes = ["" if figure.scope == "plan" else figure.scope for figure in (first, second)]
    if scopes[0] != scopes[1]:
        return scopes[0] or "the whole run", scopes[1] or "the whole run"
    if first.as_of is not None and second.as_of is not None and first.as_of != second.as_of:
        return f"step {first.as_of:,}", f"step {second.as_of:,}"
    return None
