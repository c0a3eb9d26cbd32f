"""Write docs/marin-forecast.json and docs/marin-forecast.md: F2's forecast of the public d6144 run.

Run `python docs/marin_forecast.py FOLDER`, where FOLDER holds ladder_eval_grid.csv: the published
evaluations of the four rungs. No evaluation of the target is read. `--check` only compares.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from portolan.canonical import digest, stringify_floats
from portolan.files import sha256_file
from portolan.scaling.baseline import sensitivity_table
from portolan.scaling.curves import RungCurve, TargetPlan, by_width, mark_label
from portolan.scaling.forecast import Forecast, MetricForecast, forecast_ladder
from portolan.scaling.interval import LEVELS
from portolan.scaling.ladder import NUM_MARKS, derive
from portolan.scaling.rung_backtests import backtest

DOCS = Path(__file__).parent
GRID = "ladder_eval_grid.csv"
METRIC = "eval_dropless/paloma/macro_loss"
FAMILY, RATIO, POLICY = "ladder", 791, "per_rack"
TARGET_WIDTH, TARGET_LAYERS = 6144, 48


def read_rungs(path: Path) -> list[RungCurve]:
    """The four public rungs, in the order of their evaluations."""
    points: dict[int, list[tuple[float, float]]] = {}
    steps: dict[int, int] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            width = int(row["rung"].removeprefix("d"))
            steps[width] = int(row["total_steps"])
            points.setdefault(width, []).append((float(row["exact_fraction"]), float(row["loss"])))
    curves = []
    for width, values in points.items():
        plan = derive(width, RATIO, FAMILY, POLICY)
        assert plan.steps == steps[width], (width, plan.steps, steps[width])
        curves.append(
            RungCurve(
                run_id=f"d{width}",
                width=width,
                steps=plan.steps,
                flops=plan.flops_no_head,
                points={METRIC: tuple(values)},
                family=FAMILY,
                tokens_per_active_param=RATIO,
                evaluations_sha256=sha256_file(path),
            )
        )
    return curves


def body(forecast: Forecast, beside: Forecast, path: Path) -> dict[str, Any]:
    """The frozen object: quantiles of every mark, method, inputs, and what stands beside it."""
    other = beside.metrics[METRIC]
    return stringify_floats(
        {
            "title": "Public d6144 run: dropless Paloma macro loss, forecast from its four rungs",
            "metric": {"name": METRIC, "unit": "nats per token"},
            "target": forecast.target.record(),
            "inputs": {"file": GRID, "sha256": sha256_file(path), "rungs": list(forecast.inputs)},
            "known_before": {
                "evaluations_used": 0,
                "retrospective": True,
                "statement": "The target had been published when this was made: figures up to "
                "40 % and a final figure. None of them is an input, but the method is not blind: a "
                "first version (median 2.0142) missed the evaluations at 5 and 10 %, after which "
                "the deviation of a run from the shared shape, its growth per decade and the "
                "weights of the two shapes were changed. That moved the early widths and the "
                "final median as well. It is not a pre-registration and proves no skill.",
            },
            "method": {"name": forecast.method, "parameters": forecast.parameters},
            "quantiles": forecast.quantiles_record()[METRIC],
            "baseline": forecast.baseline_record(),
            "beside": {
                "learnt from other families": {
                    "final": dict(
                        zip(map(str, LEVELS), (round(float(v), 6) for v in other.quantiles[-1]),
                            strict=True)
                    ),
                    "parameters": beside.parameters["law_prior"],
                },
            },
            "warnings": list(forecast.warnings),
        }
    )  # fmt: skip


def page(found: dict[str, Any], forecast: Forecast, rungs: list[RungCurve]) -> str:
    """The document: final, trajectory, back-tests on the rungs, sensitivity of F0."""
    lines = [
        "<!-- Written by docs/marin_forecast.py from the published evaluations of the rungs. -->",
        "",
        "# F2 on the public ladder",
        "",
        "The forecast of the d6144 run (marin #8435) that Portolan's F2 makes from the four public "
        "rungs alone. " + found["known_before"]["statement"],
        "",
        f"- Object: `docs/marin-forecast.json`, canonical SHA-256 `{digest(found)}`.",
        f"- Input: `{GRID}`, SHA-256 `{found['inputs']['sha256']}`.",
        "- Metric: dropless Paloma macro loss, nats per token; an evaluation with its noise.",
        "- The conditions of the public run (transport, mixture, decay, context) changed on the "
        "way; by the rules of the record a forecast is void from that step on.",
        *_final(found, forecast.metrics[METRIC]),
        *_bands(forecast.metrics[METRIC]),
        *_backtests(rungs),
        *_sensitivity(forecast, rungs),
    ]
    return "\n".join(lines) + "\n"


def _final(found: dict[str, Any], metric: MetricForecast) -> list[str]:
    curve = metric.curve
    assert curve is not None and metric.reference is not None
    other = found["beside"]["learnt from other families"]["final"]
    f1 = dict(zip(LEVELS, metric.reference, strict=True))
    levels = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)

    def row(name: str, values: Any) -> str:
        return f"| {name} | " + " | ".join(f"{float(values(q)):.4f}" for q in levels) + " |"

    lines = [
        "",
        "## End of the run",
        "",
        "| method | 2.5 % | 10 % | 25 % | 50 % | 75 % | 90 % | 97.5 % |",
        "|---|---|---|---|---|---|---|---|",
        row("**F2**, public asymptote (registered)", metric.quantile),
        row("F2, asymptote and drift learnt from other families", lambda q: other[str(q)]),
        row("F1", lambda q: f1[q]),
        f"| F0 (point) | | | | {metric.baseline[-1]:.4f} | | | |",
        "",
    ]
    for name, shape in curve.shapes.items():
        lines.append(
            f"- Shape `{name}`: prior weight 0.5, weight after the rungs {shape.weight:.3f}, "
            f"median {shape.medians[-1]:.4f}, exponent {shape.moments['slope'][0]:.4f} "
            f"+- {shape.moments['slope'][1]:.4f}."
        )
    for item in curve.completions:
        if item.last_mark < NUM_MARKS:
            low, median, high = (item.quantiles[LEVELS.index(q)] for q in (0.025, 0.5, 0.975))
            lines.append(
                f"- {item.run_id} stopped at {mark_label(item.last_mark)}; completed to "
                f"{median:.4f} ({low:.4f} to {high:.4f}, 95 %)."
            )
    return [*lines, f"- Noise of one evaluation: {curve.noise:.4f} nats; no rung was repeated."]


def _bands(metric: MetricForecast) -> list[str]:
    f0 = dict(zip(metric.baseline_marks, metric.baseline, strict=True))
    levels = (0.005, 0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975, 0.995)
    lines = [
        "",
        "## Bands",
        "",
        "| mark | 0.5 % | 2.5 % | 5 % | 25 % | 50 % | 75 % | 95 % | 97.5 % | 99.5 % | F0 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mark in metric.marks:
        values = " | ".join(f"{metric.quantile(q, mark):.4f}" for q in levels)
        lines.append(f"| {mark_label(mark)} | {values} | {f0[mark]:.4f} |")
    return lines


def _backtests(rungs: list[RungCurve]) -> list[str]:
    lines = [
        "",
        "## Back-tests on the rungs",
        "",
        "The same code, each rung from the smaller ones: three correlated tests, all far short of "
        "the 337 times of the target, so that they bound the error from below.",
        "",
        "| from | to | mark | error | its 95 % interval | rms from 50 % | rms below 25 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in backtest(rungs, asymptote="public"):
        gaps = [row[name] - row["outcome"] for name in ("low_95", "high_95")]
        lines.append(
            f"| {', '.join(f'd{w}' for w in row['from_widths'])} | d{row['width']} | {row['mark']} "
            f"| {row['error']:+.4f} | {gaps[0]:+.4f} to {gaps[1]:+.4f} | {row['late']['rms']:.4f} "
            f"| {row['early']['rms']:.4f} |"
        )
    return lines


def _sensitivity(forecast: Forecast, rungs: list[RungCurve]) -> list[str]:
    lines = [
        "",
        "## Sensitivity of F0",
        "",
        "| changed | A | exponent | final | rms of ln residuals |",
        "|---|---|---|---|---|",
    ]
    for what, law, value in sensitivity_table(by_width(rungs, METRIC), forecast.target.flops):
        lines.append(
            f"| {what} | {law.coefficient:.3f} | {law.exponent:.5f} | {value:.4f} | {law.rms:.5f} |"
        )
    return lines


def main() -> int:
    """Write both files, or say which differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    path = options.folder / GRID
    rungs = read_rungs(path)
    plan = derive(TARGET_WIDTH, RATIO, FAMILY, POLICY, overrides={"num_layers": TARGET_LAYERS})
    target = TargetPlan.from_rung(plan, run_id=f"d{TARGET_WIDTH}")
    forecast = forecast_ladder(rungs, target, asymptote="public")
    found = body(forecast, forecast_ladder(rungs, target), path)
    written = {
        "marin-forecast.json": json.dumps(found, indent=1, sort_keys=True) + "\n",
        "marin-forecast.md": page(found, forecast, rungs),
    }
    stale = []
    for name, text in written.items():
        if not options.check:
            (DOCS / name).write_text(text)
        elif (DOCS / name).read_text() != text:
            stale.append(name)
    print(f"canonical SHA-256 {digest(found)}" + (f"; out of date: {stale}" if stale else ""))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
