"""Curves of a run for the checklist: series by row, and the signals whose shape rungs share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DRIFT_PREFIX, PARAMETER_PREFIX = "norm/drift/", "norm/parameters/"
KEY_PREFIXES = (
    "train/cross_entropy",
    "norm/gradient/",
    PARAMETER_PREFIX,
    DRIFT_PREFIX,
    "router/entropy/",
    "router/drop_fraction/",
    "router/bias_",
    "rate/",
    "throughput/tokens_per_second",
    "throughput/mfu",
    "eval_",
)
"""Metrics that the checklist and the shapes read."""


@dataclass(frozen=True)
class Series:
    """Values of one metric at zero-based rows, in order."""

    rows: NDArray[np.int64]
    values: Array

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, first: float, last: float) -> "Series":
        """Rows with first <= completed updates <= last."""
        kept = (self.rows + 1 >= first) & (self.rows + 1 <= last)
        return Series(self.rows[kept], self.values[kept])


@dataclass(frozen=True)
class RunCurves:
    """A run with its metrics. `log_flops` is ln of the planned training FLOPs without head."""

    run_id: str
    label: str
    width: int
    steps: int
    log_flops: float
    num_experts: int
    series: Mapping[str, Series]
    completed: int = 0
    shapes: dict[str, Series] = field(default_factory=dict)

    @property
    def progress(self) -> float:
        """Completed share of the planned updates."""
        return self.completed / self.steps

    def shape(self, name: str) -> Series | None:
        """One of SHAPES, None when the run does not log it."""
        if name not in self.shapes and (found := SHAPES[name].build(self.series)) is not None:
            self.shapes[name] = found
        return self.shapes.get(name)

    @property
    def constrained(self) -> list[str]:
        """Leaves whose norm the optimizer holds: those whose drift is logged."""
        return sorted(
            k.removeprefix(DRIFT_PREFIX) for k in self.series if k.startswith(DRIFT_PREFIX)
        )


def read_curves(folder: Path, facts: Mapping[str, Any]) -> RunCurves:
    """Curves of a run folder described by its `run.json`."""
    import polars as pl

    from portolan.track.tracker import read_metrics

    frame = read_metrics(folder)
    wanted = pl.any_horizontal(pl.col("key").str.starts_with(p) for p in KEY_PREFIXES)
    completed = 0
    if trained := frame.filter(pl.col("key") == "train/cross_entropy")["completed"].to_list():
        completed = max(trained)
    series = {
        str(key): Series(part["row"].to_numpy().astype(np.int64), part["value"].to_numpy())
        for (key,), part in frame.filter(wanted).group_by("key", maintain_order=True)
    }
    plan = facts["plan"]
    width, seed = int(facts["width"]), int(facts.get("seed") or 0)
    return RunCurves(
        run_id=str(facts["id"]),
        label=f"d{width}" + (f" seed {seed}" if seed else ""),
        width=width,
        steps=int(plan["steps"]),
        log_flops=math.log(float(plan["flops_no_head"])),
        num_experts=int(facts["model"]["num_experts"]),
        series=series,
        completed=completed,
    )


# ---------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Shape:
    """A signal that is compared with the rungs at the same share of the run.

    `keys` are metrics, or prefixes when they end in `/`; `combine` joins those of one row.
    `tolerance` is the least half-width of a band: absolute, or relative to the centre.
    """

    title: str
    keys: tuple[str, ...]
    combine: str
    tolerance: float
    relative: bool
    advice: str

    def build(self, series: Mapping[str, Series]) -> Series | None:
        """The signal of a run, None when nothing of it is logged."""
        parts = [
            part
            for key, part in series.items()
            if any(key == k or (k.endswith("/") and key.startswith(k)) for k in self.keys)
        ]
        if not parts:
            return None
        if len(parts) == 1 and self.combine == "mean":
            return parts[0]
        rows = np.unique(np.concatenate([part.rows for part in parts]))
        total = np.zeros(len(rows))
        count = np.zeros(len(rows))
        for part in parts:
            place = np.searchsorted(rows, part.rows)
            if self.combine == "mean":
                total[place] += part.values
            else:
                total[place] = np.maximum(total[place], np.abs(part.values))
            count[place] += 1
        return Series(rows, total / count if self.combine == "mean" else total)


_GRADIENT_ADVICE = "a stronger logit z-loss, fewer drops, a lower rate of the group that grows"
_NORM_ADVICE = "weight decay on this group; first test it on the two cheapest rungs"

SHAPES: dict[str, Shape] = {
    "gradient norm": Shape(
        "gradient norm, all parameters", ("norm/gradient/global",), "mean", 0.25, True,
        _GRADIENT_ADVICE,
    ),
    "gradient of the head": Shape(
        "gradient norm of the output head", ("norm/gradient/head/proj",), "mean", 0.25, True,
        "probe the head's gradient from one checkpoint under two configurations before acting",
    ),
    "gradient of the router": Shape(
        "gradient norm of the router", ("norm/gradient/blocks/moe/router",), "mean", 0.25, True,
        _GRADIENT_ADVICE,
    ),
    "gradient of the head gate": Shape(
        "gradient norm of the attention gate", ("norm/gradient/blocks/attn/head_gate",), "mean",
        0.25, True, _GRADIENT_ADVICE,
    ),
    "drop fraction": Shape(
        "assignments dropped, mean over layers", ("router/drop_fraction/",), "mean", 0.01, False,
        "a larger capacity factor, or a dropless transport",
    ),
    "routing entropy": Shape(
        "entropy of the load, mean over layers", ("router/entropy/",), "mean", 0.01, False,
        "the layer with the largest load over mean, and its balance bias",
    ),
    "router bias": Shape(
        "largest balance bias", ("router/bias_max/", "router/bias_min/"), "largest", 0.25, True,
        "whether one expert starves: a bias that keeps growing does not reach it",
    ),
    "embedding norm": Shape(
        "norm of the embedding", ("norm/parameters/embed/table",), "mean", 0.05, True,
        _NORM_ADVICE,
    ),
    "router norm": Shape(
        "norm of the router", ("norm/parameters/blocks/moe/router",), "mean", 0.05, True,
        _NORM_ADVICE,
    ),
    "head-gate norm": Shape(
        "norm of the attention gate", ("norm/parameters/blocks/attn/head_gate",), "mean", 0.05,
        True, _NORM_ADVICE,
    ),
}  # fmt: skip
"""Signals whose shape over the run the rungs share."""


def by_width(curves: Sequence[RunCurves]) -> list[RunCurves]:
    """Runs from small to large, then by name."""
    return sorted(curves, key=lambda run: (run.log_flops, run.run_id))
