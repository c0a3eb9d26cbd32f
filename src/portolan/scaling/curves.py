"""Evaluation curves of rungs on the common grid of 5 % marks."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from portolan.errors import UsageError
from portolan.scaling.ladder import NUM_MARKS, Rung, evaluation_marks

SNAP_TOLERANCE = 0.01
TAIL_MARKS = (12, 13, 14, 15, 16)
"""Marks 60..80 % through which the end of a truncated rung is extrapolated."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class RungCurve:
    """What a forecaster may know of one finished or truncated rung.

    `points` holds, per metric, (fraction of the planned steps, value) in order of time; `flops`
    is the training compute of the whole plan without the output head.
    """

    run_id: str
    width: int
    steps: int
    flops: float
    points: Mapping[str, Points]
    family: str
    tokens_per_active_param: float
    seed: int = 0
    lr_capped: bool = False
    beta2_guard: bool = False
    metric_identity: str = ""
    config_digest: str = ""
    evaluations_sha256: str = ""

    @classmethod
    def from_rung(
        cls,
        rung: Rung,
        *,
        run_id: str,
        evaluations: Mapping[str, Mapping[int, float]],
        seed: int = 0,
        metric_identity: str = "",
        config_digest: str = "",
        evaluations_sha256: str = "",
    ) -> "RungCurve":
        """A curve from `{metric: {completed updates: value}}` of a run planned by `derive`."""
        return cls(
            run_id=run_id,
            width=rung.width,
            steps=rung.steps,
            flops=rung.flops_no_head,
            points={
                name: points_from_completed(values, rung.steps)
                for name, values in evaluations.items()
            },
            family=rung.family,
            tokens_per_active_param=rung.tokens_per_active_param,
            seed=seed,
            lr_capped=rung.lr_capped,
            beta2_guard=rung.beta2_guard,
            metric_identity=metric_identity,
            config_digest=config_digest,
            evaluations_sha256=evaluations_sha256,
        )


@dataclass(frozen=True)
class TargetPlan:
    """The planned run whose evaluations are forecast; `flops` without the output head."""

    run_id: str
    width: int
    steps: int
    tokens: int
    tokens_per_step: int
    sequence_length: int
    flops: float
    family: str
    tokens_per_active_param: float
    lr_capped: bool = False
    beta2_guard: bool = False

    @classmethod
    def from_rung(cls, rung: Rung, *, run_id: str) -> "TargetPlan":
        """The target planned by `derive`."""
        return cls(
            run_id=run_id,
            width=rung.width,
            steps=rung.steps,
            tokens=rung.tokens,
            tokens_per_step=rung.tokens_per_step,
            sequence_length=rung.config.sequence_length,
            flops=rung.flops_no_head,
            family=rung.family,
            tokens_per_active_param=rung.tokens_per_active_param,
            lr_capped=rung.lr_capped,
            beta2_guard=rung.beta2_guard,
        )

    def until(self, steps: int) -> "TargetPlan":
        """This target with another horizon; its ratio stays the one that it was planned with."""
        return dataclasses.replace(
            self,
            steps=steps,
            tokens=steps * self.tokens_per_step,
            flops=round(self.flops * steps / self.steps),
        )

    def record(self) -> dict[str, Any]:
        """Fields of the `target` entry of a registration."""
        return {
            "lineage": self.run_id,
            "width": self.width,
            "family": self.family,
            "tokens_per_active_param": self.tokens_per_active_param,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.sequence_length,
            "flops": self.flops,
            "axis": "training FLOPs without the output head",
            "marks": [mark_label(k) for k in range(1, NUM_MARKS + 1)],
        }


def mark_label(mark: int) -> str:
    """`0.05` ... `1.00` for mark 1..20."""
    return f"{mark / NUM_MARKS:.2f}"


def points_from_completed(values: Mapping[int, float], steps: int) -> Points:
    """Points of a run evaluated after `completed` updates; planned marks get their exact fraction.

    At short runs the nearest update to a mark lies farther from it than a snap would accept.
    """
    exact: dict[int, float] = {}
    if steps >= NUM_MARKS:
        exact = {n: (k + 1) / NUM_MARKS for k, n in enumerate(evaluation_marks(steps))}
    return tuple(
        (exact.get(completed, completed / steps), float(value))
        for completed, value in sorted(values.items())
    )


def snap(points: Iterable[tuple[float, float]]) -> dict[int, float]:
    """Values at marks 1..20 from points in order of time; farther than 0.01 is rejected.

    Of two points at one mark the later one is kept.
    """
    values: dict[int, float] = {}
    for fraction, value in points:
        mark = round(fraction * NUM_MARKS)
        near = abs(fraction - mark / NUM_MARKS) <= SNAP_TOLERANCE + 1e-12
        if 1 <= mark <= NUM_MARKS and near:
            values[mark] = value
    return values


@dataclass(frozen=True)
class WidthCurve:
    """Curve of one width and one metric, averaged over seeds at each mark.

    `line` extrapolates marks past the end of a truncated rung; it has no constant added yet.
    """

    width: int
    steps: int
    flops: float
    values: Mapping[int, float]
    num_seeds: Mapping[int, int]
    line: Mapping[int, float]

    def value(self, mark: int, tail_constant: float) -> float:
        """Value at a mark, observed or extrapolated plus the constant."""
        observed = self.values.get(mark)
        return self.line[mark] + tail_constant if observed is None else observed

    def has(self, mark: int) -> bool:
        """Whether the mark is observed or extrapolated."""
        return mark in self.values or mark in self.line


def straight_line(values: Mapping[int, float]) -> tuple[float, float]:
    """Slope per unit fraction and intercept of the line through marks 60..80 %."""
    fractions = np.array(TAIL_MARKS) / NUM_MARKS
    losses = np.array([values[mark] for mark in TAIL_MARKS])
    centred = fractions - fractions.mean()
    slope = float(centred @ losses / (centred @ centred))
    return slope, float(losses.mean() - slope * fractions.mean())


def extend(values: Mapping[int, float]) -> dict[int, float]:
    """Line values for the marks after the last observed one, if 60..80 % were all observed."""
    last = max(values, default=0)
    if last == NUM_MARKS or not all(mark in values for mark in TAIL_MARKS):
        return {}
    slope, intercept = straight_line(values)
    missing = range(last + 1, NUM_MARKS + 1)
    return {mark: intercept + slope * mark / NUM_MARKS for mark in missing}


def by_width(curves: Sequence[RungCurve], metric: str) -> list[WidthCurve]:
    """Group repeated rungs by width, in order of compute, and average them at each mark."""
    groups: dict[int, list[RungCurve]] = {}
    for curve in curves:
        groups.setdefault(curve.width, []).append(curve)
    result = []
    for width, members in groups.items():
        if len({(member.flops, member.steps) for member in members}) > 1:
            raise UsageError(
                f"rungs of width {width} have different budgets",
                remedy="average only repetitions that differ in nothing but the seed",
            )
        snapped = [snap(member.points[metric]) for member in members]
        marks = sorted({mark for values in snapped for mark in values})
        columns = {mark: [v[mark] for v in snapped if mark in v] for mark in marks}
        values = {mark: float(np.mean(column)) for mark, column in columns.items()}
        counts = {mark: len(column) for mark, column in columns.items()}
        first = members[0]
        result.append(WidthCurve(width, first.steps, first.flops, values, counts, extend(values)))
    return sorted(result, key=lambda curve: curve.flops)


def pooled_seed_sd(curves: Sequence[RungCurve], metric: str, mark: int) -> float | None:
    """Standard deviation between seeds, pooled over widths and the marks within 10 % of `mark`.

    None when no width was repeated.
    """
    groups: dict[int, list[dict[int, float]]] = {}
    for curve in curves:
        groups.setdefault(curve.width, []).append(snap(curve.points[metric]))
    squares, freedom = 0.0, 0
    for members in groups.values():
        for near in range(max(1, mark - 2), min(NUM_MARKS, mark + 2) + 1):
            column = np.array([values[near] for values in members if near in values])
            if len(column) > 1:
                squares += float(((column - column.mean()) ** 2).sum())
                freedom += len(column) - 1
    return None if freedom == 0 else float(np.sqrt(squares / freedom))
