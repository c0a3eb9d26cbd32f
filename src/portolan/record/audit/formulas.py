"""The formulas of record.md (R4): what one basis is worth, computed from figures of others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from portolan.accounting import (
    active_parameters,
    forward_flops_per_token,
    total_parameters,
)
from portolan.errors import UsageError
from portolan.record.audit.expressions import evaluate_rounded, names_in, show, substitute
from portolan.record.audit.figures import Figure, strongest, unit_key
from portolan.shapes import ModelConfig

STEP_TOKENS = "{batch.sequences} * {seq.tokens}"
TOKENS = f"{{steps.planned}} * {STEP_TOKENS}"


@dataclass(frozen=True)
class Formula:
    """`basis` (in `unit`, empty for any) equals `expression`, over figures of other bases.

    A name in braces is a basis, or `basis|unit` where a basis comes in several units; `den` is the
    number in the parentheses of the basis itself. `is_definition` is False for a way to reach a
    number that its definition does not demand, so that a mismatch contradicts nothing.
    """

    basis: str
    expression: str
    unit: str = ""
    is_definition: bool = True


FORMULAS: tuple[Formula, ...] = (
    Formula("tokens.planned", TOKENS),
    Formula(
        "steps.planned",
        f"round({{tokens_per_active_param}} * {{params.active}} / ({STEP_TOKENS}))",
    ),
    Formula("steps.planned", f"floor({{tokens.planned}} / ({STEP_TOKENS}))"),
    Formula("tokens.nominal", f"({{step.row}} + 1) * {STEP_TOKENS}"),
    Formula("tokens.nominal", f"{{step.completed}} * {STEP_TOKENS}"),
    Formula("tokens.nominal", TOKENS),
    Formula("tokens_per_active_param", f"round({TOKENS} / {{params.active}})"),
    Formula("step.completed", "{step.row} + 1"),
    Formula("step.row", "{step.completed} - 1"),
    Formula("devices.installed", "{racks} * {devices.installed|devices/rack}", "devices"),
    Formula("devices.mesh", "{tasks} * {devices.mesh|devices/task}", "devices"),
    Formula("devices.mesh", "{racks} * {devices.mesh|devices/rack}", "devices"),
    Formula("flops.6nd", f"6 * {{params.active}} * {TOKENS}"),
    Formula("flops.model.fwd_bwd", f"{{flops.per_token}} * {TOKENS}"),
    Formula("progress.tokens()", f"100 * {{step.row}} * {STEP_TOKENS} / {{den}}", "%"),
    Formula("progress.tokens()", f"100 * ({{step.row}} + 1) * {STEP_TOKENS} / {{den}}", "%"),
    Formula("progress.steps()", "100 * {step.row} / {den}", "%"),
    Formula("progress.steps()", "100 * {step.completed} / {den}", "%"),
    Formula("ckpt.bytes_per_param", "{ckpt.bytes} / {params.total}"),
    Formula("duration.compute", "{steps.planned} * {time.step@} / 86400", "days"),
    Formula(
        "flops.model.fwd_bwd", "{flops.per_token} * {tokens.mixture_reference}", is_definition=False
    ),
    Formula("flops.hardware", f"{{flops.per_token}} * {TOKENS} * 4 / 3", is_definition=False),
)  # fmt: skip


NATURAL_UNITS: Mapping[str, str] = {
    "tokens.planned": "tokens",
    "tokens.nominal": "tokens",
    "steps.planned": "steps",
    "tokens_per_active_param": "tokens/parameter",
    "step.completed": "updates",
    "step.row": "row",
    "devices.installed": "devices",
    "devices.mesh": "devices",
    "flops.6nd": "FLOP",
    "flops.model.fwd_bwd": "FLOP",
    "flops.hardware": "FLOP",
    "ckpt.bytes_per_param": "bytes/parameter",
    "duration.compute": "days",
    "rungs.finished": "rungs",
}
"""Unit of what the formulas give; a figure without a basis is tried against those of its unit."""


@dataclass(frozen=True)
class Derivation:
    """A value that a formula gives, the place it is known to, and the calculation as text."""

    basis: str
    value: Decimal
    place: Decimal
    arithmetic: str
    is_definition: bool = True


@dataclass
class Index:
    """Figures by basis, looked up within a case first, then among those of the whole run.

    `shared` are the ids that may be used outside their own case.
    """

    figures: Sequence[Figure]
    shared: frozenset[str]
    _own: dict[tuple[str, str], list[Figure]] = field(init=False, default_factory=dict)
    _shared: dict[str, list[Figure]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Group once, so that no lookup runs over all figures."""
        for figure in self.figures:
            if figure.is_numeric and figure.basis_name:
                self._own.setdefault((figure.basis_name, figure.case), []).append(figure)
                if figure.id in self.shared or figure.layer == "derived":
                    self._shared.setdefault(figure.basis_name, []).append(figure)

    def find(self, basis: str, case: str, subject: str, but: str = "") -> list[Figure]:
        """Figures of a basis (`basis|unit`), in-case ones if there are any, else shared ones."""
        name, _, unit = basis.partition("|")
        for group in (self._own.get((name, case), ()), self._shared.get(name, ())):
            found = [
                figure
                for figure in group
                if figure.id != but
                and figure.subject == subject
                and (not unit or figure.unit_key == unit_key(unit))
            ]
            if found:
                return found
        return []

    def in_case(self, basis: str, case: str) -> Sequence[Figure]:
        """Figures of a basis in one case, whatever their subject."""
        return self._own.get((basis, case), ())


def derivations(figure: Figure, index: Index) -> Iterator[Derivation]:
    """Every value that a formula gives for the basis and unit of a figure, without using it."""
    for formula in FORMULAS:
        if formula.basis == figure.basis_name and (
            not formula.unit or unit_key(formula.unit) == figure.unit_key
        ):
            yield from _apply(formula, figure, index)
    if figure.scope.partition(":")[0] not in ("segment", "attempt"):
        yield from _sum_of_segments(figure, index)
    yield from _finished_rungs(figure, index)


def derive(basis: str, unit: str, index: Index, case: str = "") -> Figure | None:
    """A derived figure of a basis, by the first formula whose inputs are known.

    An empty unit means the one that the formulas give.
    """
    unit = unit or NATURAL_UNITS.get(basis, "")
    wanted = Figure(f"={basis}", "by formula", "0", unit, basis, "derived", case=case)
    for found in derivations(wanted, index):
        return derived_figure(wanted.id, wanted.name, unit, basis, found, case)
    return None


def derived_figure(
    identity: str, name: str, unit: str, basis: str, found: Derivation, case: str
) -> Figure:
    """A figure of layer `derived` with its calculation; its value is exact."""
    return Figure(
        identity,
        name,
        f"{found.value:f}",
        unit,
        basis,
        "derived",
        stated_by="formula",
        source="formula",
        case=case,
        rounding="exact",
        arithmetic=found.arithmetic,
        known_to=found.place,
    )


def shape_figures(config: ModelConfig, source: str) -> list[Figure]:
    """Derived figures of a model's shape: parameters, and operations of one token."""
    forward = forward_flops_per_token(config)
    per_token = Decimal(3 * forward.numerator) / Decimal(forward.denominator)
    rows: Mapping[str, tuple[str, Decimal, str]] = {
        "params.active": ("parameters", Decimal(active_parameters(config)), "active parameters"),
        "params.total": ("parameters", Decimal(total_parameters(config)), "all parameters"),
        "flops.per_token": ("FLOP/token", per_token, "operations of a token, 3 x forward"),
    }
    return [
        Figure(
            f"={basis}", name, f"{value:f}", unit, basis, "derived", source, source=source,
            rounding="exact", arithmetic=f"{name} by the shape of {source} = {show(value)}",
        )
        for basis, (unit, value, name) in rows.items()
    ]  # fmt: skip


def _apply(formula: Formula, figure: Figure, index: Index) -> Iterator[Derivation]:
    """One derivation per time window of the inputs; usually one."""
    inputs: dict[str, Figure] = {}
    windows: list[Figure] = []
    for name in names_in(formula.expression):
        if name == "den":
            continue
        found = index.find(name, figure.case, figure.subject, but=figure.id)
        if not found:
            return
        if name.endswith("@"):
            windows = found
        elif (chosen := strongest(found)) is not None:
            inputs[name] = chosen
    numbers = {name: item.number or Decimal(0) for name, item in inputs.items()}
    places = {name: item.place for name, item in inputs.items()}
    texts = {name: show_value(item) for name, item in inputs.items()}
    if "{den}" in formula.expression:
        denominator = _denominator(figure)
        if denominator is None:
            return
        numbers["den"], texts["den"] = denominator, figure.qualifier
    for window in windows or [None]:
        if window is not None:
            name = window.basis_name
            numbers[name], texts[name] = window.number or Decimal(0), show_value(window)
            places[name] = window.place
        try:
            value, place = evaluate_rounded(formula.expression, numbers, places)
        except UsageError:
            continue
        text = f"{substitute(formula.expression, texts)} = {show(value)}"
        yield Derivation(formula.basis, value, place, text, formula.is_definition)


def _denominator(figure: Figure) -> Decimal | None:
    try:
        number = Decimal(figure.qualifier)
    except ArithmeticError:
        return None
    return number if number.is_finite() and number > 0 else None


def _sum_of_segments(figure: Figure, index: Index) -> Iterator[Derivation]:
    """A whole is the sum of its segments in the same case, where the basis adds up."""
    if not figure.basis_name.startswith(("tokens.", "flops.", "duration.")):
        return
    parts = [
        part
        for part in index.find(figure.basis_name, figure.case, figure.subject, but=figure.id)
        if part.case == figure.case
        and part.unit_key == figure.unit_key
        and part.scope.startswith("segment:")
    ]
    if len(parts) > 1:
        total = sum((part.number or Decimal(0) for part in parts), Decimal(0))
        text = f"{' + '.join(show_value(part) for part in parts)} = {show(total)}"
        place = sum((part.place for part in parts), Decimal(0))
        yield Derivation(figure.basis_name, total, place, text)


def _finished_rungs(figure: Figure, index: Index) -> Iterator[Derivation]:
    """Rungs that reached 100 % of their steps, if the case states the progress of enough rungs."""
    if figure.basis_name != "rungs.finished":
        return
    progress = [f for f in index.in_case("progress.steps()", figure.case) if f.unit == "%"]
    if not progress or len(progress) < (figure.number or 0):
        return
    done = [found for found in progress if (found.number or Decimal(0)) >= 100]
    short = ", ".join(
        f"{found.subject.removeprefix('lineage:') or found.id} at {show_value(found)} %"
        for found in progress
        if found not in done
    )
    text = f"{len(done)} of {len(progress)} rungs at 100 %" + (f"; {short}" if short else "")
    yield Derivation("rungs.finished", Decimal(len(done)), Decimal(0), text)


def show_value(figure: Figure) -> str:
    """The value as it was stated, with separators in long whole numbers."""
    number = figure.number
    if number is None or not figure.value.lstrip("-").isdigit():
        return figure.value if figure.layer != "derived" else show(number or Decimal(0))
    return f"{int(number):,}"
