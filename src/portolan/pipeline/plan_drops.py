"""`plan --drops`: how many routed rows each rule would lose, from a random model of the router."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.table import Table

from portolan.console import console, say
from portolan.errors import UsageError
from portolan.files import read_json
from portolan.parallel.capacity import parse_capacity_factor
from portolan.parallel.planner.estimate import ParallelPlan
from portolan.parallel.planner.exchange import Routing, num_waves
from portolan.pipeline.plan_mesh import number_table
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

DEFAULT_SKEW = 0.1
DEFAULT_SENDER_SKEW = 0.2
"""Of a trained router over 64 senders (parallel.md 6.7)."""
NUM_DRAWS = 40
"""Random layers in all."""
RECORDED_SHARE = 0.25
"""The last part of a run whose recorded loads count."""
ENTROPY = "router/entropy/"


@dataclass(frozen=True)
class DropOptions:
    """Skews by hand, or None for what a finished run recorded and the default of senders."""

    skew: float | None = None
    sender_skew: float | None = None


@dataclass(frozen=True)
class Skews:
    """One skew a layer, and where they come from."""

    layers: tuple[Any, ...]
    source: str


def choose_skews(runs: Path | None, options: DropOptions) -> Skews:
    """Skews from the command line, from the widest finished run below `runs`, or the default.

    Raises:
        UsageError: a skew is negative.
    """
    from portolan.parallel.planner.drops import Skew

    for name, value in (("--skew", options.skew), ("--sender-skew", options.sender_skew)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} {value} is no spread", remedy="use 0 or more, such as 0.1")
    sender = DEFAULT_SENDER_SKEW if options.sender_skew is None else options.sender_skew
    if options.skew is None and runs is not None and (found := _widest_run(runs)):
        layers = tuple(Skew(skew, sender) for skew in _recorded_skews(*found))
        if layers:
            return Skews(layers, f"skew of each layer as {found[0].name} recorded it")
    skew = DEFAULT_SKEW if options.skew is None else options.skew
    return Skews((Skew(skew, sender),), "synthetic skew")


def _widest_run(runs: Path) -> tuple[Path, dict[str, Any]] | None:
    finished = [path.parent for path in runs.glob("*/finished.json")]
    described = [
        (folder, read_json(folder / "run.json"))
        for folder in finished
        if (folder / "run.json").is_file()
    ]
    routed = [one for one in described if one[1]["model"].get("num_experts")]
    return max(routed, key=lambda one: (one[1]["width"], one[0].name), default=None)


def _recorded_skews(folder: Path, run: dict[str, Any]) -> Iterator[float]:
    """The skew of every layer, from the entropy of its loads over the end of a run."""
    import polars as pl

    from portolan.parallel.planner.drops import fit_expert_skew
    from portolan.track.tracker import read_metrics

    model = run["model"]
    experts, chosen = model["num_experts"], model["experts_per_token"]
    rows = run["plan"]["tokens_per_step"] * chosen / experts
    keys = [f"{ENTROPY}{layer}" for layer in range(model["num_layers"])]
    table = read_metrics(folder, keys=keys)
    if table.is_empty():
        return
    first = table["row"].max() * (1 - RECORDED_SHARE)  # type: ignore[operator]
    means = table.filter(pl.col("row") >= first).group_by("key").agg(pl.col("value").mean())
    found = dict(means.iter_rows())
    for key in keys:
        if key in found:
            yield fit_expert_skew(found[key], experts, rows)


def predict_drops(
    recipe: Recipe, target: Rung, num_devices: int | None, skews: Skews
) -> tuple[Routing, list[Any]]:
    """Drop rates of the target's exchange by capacity factor.

    Raises:
        UsageError: the model is dense, or one device holds all experts.
    """
    from portolan.parallel.planner.drops import FACTORS, simulate_drops

    plan = ParallelPlan.of(recipe, target.config, target.batch_sequences, target.steps, num_devices)
    routing = plan.routing(plan.kernels("cuda"))
    if routing is None or plan.mesh.expert == 1:
        raise UsageError(
            "no rows are exchanged: "
            + ("the model is dense" if routing is None else "one device holds all experts"),
            remedy="plan for an expert axis, such as --set parallel.mesh.expert=8",
        )
    factors = {*FACTORS, parse_capacity_factor(recipe.parallel.capacity_factor)}
    rows = simulate_drops(
        routing.wire.shape,
        routing.rule,
        skews.layers,
        num_waves=num_waves(routing),
        factors=tuple(sorted(factors)),
        num_draws=max(1, round(NUM_DRAWS / len(skews.layers))),
        seed=recipe.seed,
    )
    return routing, rows


def print_drops(
    recipe: Recipe,
    target: Rung,
    num_devices: int | None,
    runs: Path | None,
    options: DropOptions,
    *,
    as_json: bool,
) -> None:
    """Predicted drop rates as a table or as JSON."""
    skews = choose_skews(runs, options)
    routing, rows = predict_drops(recipe, target, num_devices, skews)
    if as_json:
        say(json.dumps(_as_json(routing, rows, skews), indent=2))
        return
    shape = routing.wire.shape
    popularity = [skew.expert for skew in skews.layers]
    low, high = (f"{value:.3g}" for value in (min(popularity), max(popularity)))
    say(
        f"{shape.num_shards} senders x {shape.num_experts} experts, {shape.num_assignments:,} "
        "assignments each"
    )
    say(
        f"{skews.source}: {low if low == high else f'{low} to {high}'}; by sender "
        f"{skews.layers[0].sender:.3g}"
    )
    console.print(drop_table(rows, parse_capacity_factor(recipe.parallel.capacity_factor)))


def drop_table(rows: list[Any], own: Fraction) -> Table:
    """Per cent by capacity factor and rule; the spread over layers at the recipe's own factor."""
    table = number_table(
        "Expected drops, % of routed rows",
        "capacity",
        *rows[0].mean,
        caption="Q chunks, G experts in a group; +- is the standard deviation from layer to layer.",
        columns=10,
    )
    for row in rows:
        name = f"{float(row.capacity_factor):g}"
        table.add_row(name, *(f"{100 * rate:.3g}" for rate in row.mean.values()))
        if row.capacity_factor == own:
            spread = (f"+- {100 * value:.2g}" for value in row.spread.values())
            table.add_row("", *spread, style="dim")
    return table


def _as_json(routing: Routing, rows: list[Any], skews: Skews) -> dict[str, Any]:
    shape = routing.wire.shape
    return {
        "num_senders": shape.num_shards,
        "num_experts": shape.num_experts,
        "assignments_per_sender": shape.num_assignments,
        "num_waves": num_waves(routing),
        "source": skews.source,
        "skews": [{"expert": skew.expert, "sender": skew.sender} for skew in skews.layers],
        "drops": [
            {
                "capacity_factor": float(row.capacity_factor),
                "mean": row.mean,
                "spread": row.spread,
            }
            for row in rows
        ],
    }
