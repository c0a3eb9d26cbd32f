"""Figures of the page: a chart with its title, caption, legend and the numbers as a table.

The caption says what each number means and how points were condensed.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from portolan.report import charts, curves
from portolan.report.facts import LEVELS, Project, Run
from portolan.report.palette import BAND_OPACITY, colour, ramp_colours
from portolan.report.words import (
    MISSING,
    comparable,
    interval_text,
    loss,
    measured_final,
    metric_of_record,
    scientific,
    signed,
)

CONDENSED = "A point is the mean of up to 1/120 of the run."
DOMAIN_PREFIX = "eval_dropless/heldout/"


class Key(NamedTuple):
    """Entry of a legend; shape is line, dash, dot, diamond or band."""

    name: str
    colour: str
    shape: str = "line"
    opacity: float = 1.0


@dataclass(frozen=True)
class Table:
    """A table of text cells, the first of a row is its heading; `wraps` breaks long cells."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    wraps: bool = False

    def is_number(self, index: int) -> bool:
        """Whether a column holds numbers in at least one row and nothing else but dashes."""
        cells = [row[index] for row in self.rows if row[index] != MISSING]
        return bool(cells) and all(cell[:1] in "0123456789+−-" for cell in cells)


@dataclass(frozen=True)
class Figure:
    """A chart and its words. `description` is what a screen reader says instead of the drawing."""

    id: str
    title: str
    caption: str
    description: str
    chart: Any
    legend: tuple[Key, ...] = ()
    table: Table | None = None
    wide: bool = True


MEASURED = Key("measured, target", colour("measured"), "line")
MEDIAN = Key("forecast median", colour("forecast"), "dash")


def _band_keys() -> list[Key]:
    return [
        Key(f"{level} % interval", colour("forecast"), "band", BAND_OPACITY[level] + 0.08)
        for level in sorted(LEVELS)
    ]


def _rung_keys(
    rungs: Sequence[Run], shape: str = "line", drawn: Collection[str] | None = None
) -> list[Key]:
    """Legend entries of the rungs, or of those with the given ids; shades are the same for all."""
    shades = ramp_colours("rung", len(rungs)) if rungs else []
    return [
        Key(run.label, shade, shape)
        for run, shade in zip(rungs, shades, strict=True)
        if drawn is None or run.id in drawn
    ]


def _kept(figures: Iterable[Figure]) -> tuple[Figure, ...]:
    return tuple(figure for figure in figures if figure.chart is not None)


# ---------------------------------------------------------------- forecast


def strip_figure(project: Project) -> Figure | None:
    """Nested intervals of the final loss and the measured value, for the top of the page."""
    forecast, final = project.forecast, measured_final(project)
    if forecast is None or forecast.median() is None:
        return None
    keys = [*_band_keys(), Key("median", colour("forecast"), "line")]
    if final is not None:
        keys.append(Key("measured", colour("measured"), "diamond"))
    return Figure(
        "strip",
        "",
        "",
        f"Forecast of the final loss: median {loss(forecast.median())}, 95 % interval "
        f"{interval_text(forecast, 95)} nats per token"
        + (f"; measured {loss(final)}." if final is not None else "; not measured yet."),
        charts.interval_strip(forecast, final),
        tuple(keys),
    )


def forecast_figures(project: Project) -> tuple[Figure, ...]:
    """Band with the measured curve, and the differences from the median."""
    return _kept(_forecast_figures(project))


def _forecast_figures(project: Project) -> Iterator[Figure]:
    forecast, target, key = project.forecast, project.target, metric_of_record(project)
    rungs = project.rungs
    legend = [*(_band_keys() if forecast else []), *([MEDIAN] if forecast else [])]
    measured = bool(target and target.evaluations.get(key))
    yield Figure(
        "forecast-band",
        "The forecast and what was measured" if forecast else "Held-out loss so far",
        "Loss on held-out text along the run: macro mean over its domains, in nats per token, "
        "without token drops. Each rung is drawn over its own run.",
        "Forecast band of the held-out loss over the run"
        + (", with the measured values of the target." if measured else "; no measurement yet."),
        charts.forecast_band(forecast, target, rungs, key),
        (
            *legend,
            *([MEASURED] if measured else []),
            *_rung_keys(rungs, drawn={run.id for run in rungs if run.evaluations.get(key)}),
        ),
        _mark_table(project, key),
    )
    if forecast and target and measured and comparable(project):
        yield Figure(
            "residuals",
            "Difference from the forecast",
            "Measured loss minus the forecast median, with the same intervals drawn around zero. "
            "Between the registered marks the forecast is a straight line.",
            "Measured minus forecast median at each evaluation, in nats per token.",
            charts.residuals(forecast, target, key),
            (*_band_keys(), Key("measured − median", colour("measured"), "line")),
        )


def _mark_table(project: Project, key: str) -> Table | None:
    forecast, target = project.forecast, project.target
    if forecast is None:
        return None
    measured = {round(f, 2): v for f, v in charts.fractions(target, key)} if target else {}
    hidden = "void" if project.score and project.score.is_void else MISSING
    bands = dict(project.score.bands if project.score else _live_bands(project))
    rows = []
    for row in charts.forecast_rows(forecast):
        mark, value = round(row["f"], 2), measured.get(round(row["f"], 2))
        difference = None if value is None else value - row["median"]
        rows.append(
            (
                f"{mark:.0%}".replace("%", " %"),
                loss(row["median"]),
                *(interval_text(forecast, level, row["f"]) for level in LEVELS),
                loss(value),
                signed(difference) if comparable(project) else hidden,
                bands.get(mark, MISSING),
            )
        )
    columns = ("Run", "Median", *(f"{level} % interval" for level in LEVELS), "Measured",
               "Difference", "Band")  # fmt: skip
    return Table("Forecast and measurement at each mark, nats per token", columns, tuple(rows))


def _live_bands(project: Project) -> tuple[tuple[float, str], ...]:
    """Band of each evaluation so far, by `portolan watch`."""
    found = project.health.bands if project.health else ()
    return tuple((round(mark, 2), word.partition(":")[0]) for mark, word in found)


def ladder_figures(project: Project) -> tuple[Figure, ...]:
    """Loss against compute."""
    forecast, target, key = project.forecast, project.target, metric_of_record(project)
    law = forecast.law if forecast else None
    caption = (
        "Each dot is a rung at the end of its run; equal widths are seeds. Compute: "
        f"{flops_axis(project)}."
    )
    if law:
        caption += (
            f" Dashed: the baseline law loss = {law.asymptote:g} + {law.scale:.4g} · "
            f"C^−{law.exponent:.4g} at the end of the run; the intervals need not lie on it."
        )
    legend = [Key("rungs", colour("rung-6"), "dot")]
    if law:
        legend.append(Key("fitted law", colour("forecast"), "dash"))
    if forecast and forecast.interval(95):
        legend += _band_keys()
    if measured_final(project) is not None:
        legend.append(Key("measured, target", colour("measured"), "diamond"))
    return _kept(
        [
            Figure(
                "ladder-fit",
                "Loss against training compute",
                caption,
                "Final held-out loss of the rungs against their training compute, "
                "and the forecast at the compute of the target.",
                charts.ladder_fit(project.rungs, forecast, target, key),
                tuple(legend),
                _ladder_table(project, key),
            )
        ]
    )


def flops_axis(project: Project) -> str:
    """Name of the compute axis that the runs are counted on."""
    return next((run.flops_axis for run in project.runs if run.flops_axis), "training FLOPs")


def _ladder_table(project: Project, key: str) -> Table:
    law = project.forecast.law if project.forecast else None
    rows = []
    for run in (*project.rungs, *([project.target] if project.target else [])):
        fitted = law.at(run.flops) if law and run.flops else None
        rows.append(
            (run.label, run.role, scientific(run.flops), loss(run.final(key)), loss(fitted))
        )
    columns = ("Run", "Role", "Compute, FLOPs", "Final loss", "Law")
    return Table("Loss against compute, nats per token", columns, tuple(rows))


# ---------------------------------------------------------------- domains


def domain_names(run: Run, unit: str) -> list[str]:
    """Held-out domains that a run has values for; unit is `loss` or `bpb`."""
    keys = (key for key in run.evaluations if key.startswith(DOMAIN_PREFIX))
    return [key[len(DOMAIN_PREFIX) : -len(unit) - 1] for key in keys if key.endswith(f"/{unit}")]


def domain_rows(project: Project, unit: str) -> list[dict[str, Any]]:
    """Newest value of each domain: target (order -1) and rungs (order = index)."""
    rungs, rows = project.rungs, []
    shown = [*enumerate(rungs), *([(-1, project.target)] if project.target else [])]
    for order, run in shown:
        for domain in domain_names(run, unit):
            key = f"{DOMAIN_PREFIX}{domain}/{unit}"
            newest = run.latest(key)
            if newest is None:
                continue
            row = {"domain": domain, "value": newest.value, "run": run.label, "order": order}
            ends = project.forecast.interval(95, metric=key) if project.forecast else None
            if order == -1 and ends:
                row |= {"low": ends[0], "high": ends[1]}
            rows.append(row)
    return rows


def domain_figures(project: Project) -> tuple[Figure, ...]:
    """Final loss of each domain, per token and per byte."""
    units = (
        ("loss", "nats per token", "Loss of each domain",
         "Mean loss over the held-out tokens of the domain. Lower is better."),
        ("bpb", "bits per byte", "The same in bits per byte",
         "Bits that the model needs for a byte of the text; comparable between tokenizers."),
    )  # fmt: skip
    figures = []
    target = project.target
    for unit, name, title, caption in units:
        rows = domain_rows(project, unit)
        drawn = {project.rungs[row["order"]].id for row in rows if row["order"] >= 0}
        legend = _rung_keys(project.rungs, "dot", drawn)
        if any(row["order"] == -1 for row in rows):
            share = "" if target is None or target.finished else f" at {target.fraction:.0%}"
            legend.append(Key(f"target{share}", colour("measured"), "diamond"))
        if any("low" in row for row in rows):
            legend.append(Key("95 % forecast", colour("forecast"), "band", 0.3))
        figures.append(
            Figure(
                f"domains-{unit}",
                title,
                caption,
                f"{title}, {name}, for the target and the rungs; the table has the values.",
                charts.domain_dots(rows, len(project.rungs), name),
                tuple(legend),
                _domain_table(project, rows, name),
                wide=False,
            )
        )
    return _kept(figures)


def _domain_table(project: Project, rows: list[dict[str, Any]], unit: str) -> Table:
    runs = [*project.rungs, *([project.target] if project.target else [])]
    values = {(row["domain"], row["run"]): row["value"] for row in rows}
    body = tuple(
        (domain, *(loss(values.get((domain, run.label))) for run in runs))
        for domain in sorted({row["domain"] for row in rows})
    )
    return Table(f"Newest value by domain, {unit}", ("Domain", *(r.label for r in runs)), body)


# ---------------------------------------------------------------- inside the target


def training_figures(project: Project) -> tuple[Figure, ...]:
    """Training loss of all runs; routing, norms and rates of the target."""
    run = observed_run(project)
    if run is None:
        return ()
    return _kept([_loss_figure(project), *_router_figures(run), *_norm_figures(run), _rates(run)])


def observed_run(project: Project) -> Run | None:
    """Run whose insides are drawn: the target, before it starts the largest rung with metrics."""
    candidates = [*([project.target] if project.target else []), *reversed(project.rungs)]
    return next((run for run in candidates if run.series), None)


def _loss_figure(project: Project) -> Figure:
    key, rungs = "train/cross_entropy", project.rungs
    drawn = [
        curves.Line(run.label, shade, curves.run_curve(run, key))
        for run, shade in zip(rungs, ramp_colours("rung", len(rungs)) if rungs else [], strict=True)
    ]
    if project.target and project.target.series:
        points = curves.run_curve(project.target, key)
        drawn.append(curves.Line("target", colour("measured"), points))
    unigram = project.corpus.unigram_macro if project.corpus else None
    legend = _line_keys(drawn)
    if unigram is not None:
        legend = (*legend, Key("unigram reference, held-out text", colour("ink-soft"), "dash"))
    return Figure(
        "train-loss",
        "Training loss",
        f"Cross-entropy on the training batch, before its update, without the z-loss. {CONDENSED}",
        "Training cross-entropy of every run over its share, in nats per token.",
        curves.lines(
            drawn,
            "training cross-entropy, nats per token",
            reference=(unigram, "unigram reference") if unigram is not None else None,
            height=280,
        ),
        legend,
        _curve_table(drawn, "Training cross-entropy, nats per token"),
    )


def _line_keys(drawn: Sequence[curves.Line]) -> tuple[Key, ...]:
    return tuple(
        Key(line.name, line.colour, "dash" if line.dashed else "line")
        for line in drawn
        if line.points
    )


def _curve_table(drawn: Sequence[curves.Line], caption: str) -> Table:
    """First, extreme and last drawn values of each curve."""
    rows = []
    for line in drawn:
        values = [value for _, value in line.points]
        if values:
            numbers = (values[0], min(values), max(values), values[-1])
            rows.append((line.name, *(f"{v:.4g}".replace("-", "−") for v in numbers)))
    return Table(caption, ("Curve", "First", "Lowest", "Highest", "Last"), tuple(rows))


def _router_figures(run: Run) -> Iterator[Figure]:
    kinds = (
        ("router/load_max_over_mean/", "high", "Busiest expert",
         "Tokens of the busiest expert over those of the average expert; 1 is even. "
         "A point is the largest value of up to 1/120 of the run.",
         "load, max over mean", True),
        ("router/entropy/", "low", "Evenness of the load",
         _entropy_caption(run), "entropy of the load, nats", False),
        ("router/drop_fraction/", "high", "Dropped assignments",
         "Share of token-to-expert assignments that a full expert turned away. A point is the "
         "largest value of up to 1/120 of the run.", "share of assignments", False),
    )  # fmt: skip
    for prefix, take, title, caption, unit, log in kinds:
        drawn = curves.layer_curves(run, prefix, take)
        name = prefix.split("/")[1]
        if name == "drop_fraction" and not any(v for c in drawn for _, v in c.points):
            continue
        yield Figure(
            f"router-{name.replace('_', '-')}",
            title,
            caption,
            f"{title} in each layer of {run.label} over the run.",
            curves.lines(drawn, unit, log=log),
            _line_keys(drawn),
            _curve_table(drawn, f"{title}, {unit}"),
            wide=False,
        )


def _entropy_caption(run: Run) -> str:
    text = "Entropy of the shares of the load that the experts of a layer get"
    if run.num_experts:
        text += f"; at most ln {run.num_experts} = {math.log(run.num_experts):.3f}"
    return text + ". A point is the smallest value of up to 1/120 of the run."


def _norm_figures(run: Run) -> Iterator[Figure]:
    gradient = curves.norm_curves(run, "norm/gradient/")
    total = curves.run_curve(run, "norm/gradient/global")
    gradient.insert(0, curves.Line("all parameters", colour("ink"), total))
    yield Figure(
        "gradient-norms",
        "Gradient norms",
        f"Root of the sum of squares over a group of tensors; groups of free norm are dashed. "
        f"{CONDENSED}",
        f"Gradient norm of each parameter group of {run.label}, logarithmic axis.",
        curves.lines(gradient, "gradient norm (log scale)", log=True, height=280),
        _line_keys(gradient),
        _curve_table(gradient, "Gradient norms"),
    )
    kinds = (
        ("constrained", "Held norms", "The optimizer holds these norms constant: a curve that "
         "leaves 1 is a fault.", ".6f"),
        ("free", "Free norms", "These norms may grow slowly; a steady rise late in the run is a "
         "reason to look.", ".4f"),
    )  # fmt: skip
    for kind, title, caption, number_format in kinds:
        drawn = curves.norm_curves(run, f"norm/parameters/{kind}/", relative=True)
        yield Figure(
            f"norms-{kind}",
            title,
            f"Parameter norm of a group over its first logged value. {caption}",
            f"{title} of {run.label} relative to the start.",
            curves.lines(drawn, "norm ÷ first value", number_format=number_format, around=1.0),
            _line_keys(drawn),
            _curve_table(drawn, f"{title}, relative to the first value"),
            wide=False,
        )


def _rates(run: Run) -> Figure:
    names = {"rate/hyperball": "matrices (η)", "rate/adam": "Adam group"}
    shades = (colour("series-1"), colour("series-2"))
    drawn = [
        curves.Line(name, shade, curves.run_curve(run, key))
        for (key, name), shade in zip(names.items(), shades, strict=True)
    ]
    return Figure(
        "learning-rates",
        "Learning rates",
        "As used by each update: a short warm-up, then a straight fall to 5 % of the peak.",
        f"Learning rates of {run.label} over the run.",
        curves.lines(drawn, "learning rate", number_format=".3e", height=180),
        _line_keys(drawn),
        _curve_table(drawn, "Learning rates"),
    )
