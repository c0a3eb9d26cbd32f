"""What a recipe costs, by arithmetic only."""

import json
from typing import Any

from rich.table import Table

from portolan import accounting
from portolan.console import console, say
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung, derive


def plan_width(recipe: Recipe, width: int) -> Rung:
    """The planned run of one width of a recipe."""
    budget = recipe.budget
    overrides = recipe.shape_overrides(width)
    return derive(
        width,
        budget.tokens_per_active_param,
        recipe.model.family,
        budget.batch_policy,
        racks=budget.racks.get(str(width)),
        batch=budget.batch_sequences,
        overrides=overrides,
        vocab_size=recipe.tokenizer.vocab_size,
        rate_multiplier=recipe.optimizer.rate_multiplier,
        beta2_guard=recipe.optimizer.beta2_guard,
    )


def ladder_share(recipe: Recipe) -> dict[str, float]:
    """Training FLOPs of all rungs, every seed, over the target's, on both axes."""
    target = plan_width(recipe, recipe.model.width)
    rungs = [
        (plan_width(recipe, width), recipe.ladder.seeds.get(str(width), 1))
        for width in recipe.ladder.widths
    ]
    return {
        "no_head": sum(r.flops_no_head * n for r, n in rungs) / target.flops_no_head,
        "with_head": sum(r.flops_with_head * n for r, n in rungs) / target.flops_with_head,
    }


def describe_target(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(quantity, value, convention) of the target."""
    rung = plan_width(recipe, recipe.model.width)
    config = rung.config
    state = accounting.state_bytes(config)
    causal = float(accounting.training_flops(config, rung.tokens, "causal"))
    rows = [
        ("total parameters", f"{rung.total_params:,}", "every stored number, balance biases too"),
        (
            "parameters in matrices",
            f"{accounting.matrices_only_parameters(config):,}",
            "without norms, gates, convolutions, biases",
        ),
        (
            "active parameters",
            f"{rung.active_params:,}",
            "per token, without embedding, head, norms, gates, convolutions; sets the budget",
        ),
        (
            "active with head",
            f"{accounting.active_with_head_parameters(config):,}",
            "active parameters and the output head",
        ),
        ("layers x width", f"{config.num_layers} x {config.width}", "every layer routes"),
        (
            "experts",
            f"{config.num_experts}, {config.experts_per_token} a token",
            f"and {config.num_shared_experts} shared",
        ),
        ("batch", f"{rung.batch_sequences:,} sequences", f"of {config.sequence_length:,} tokens"),
        ("steps", f"{rung.steps:,}", "round(ratio x active parameters / tokens per step)"),
        ("tokens", f"{rung.tokens:,}", "steps x batch x sequence length"),
        (
            "training FLOPs",
            f"{rung.flops_with_head:.4g}",
            "published convention: 3 forwards, head included, attention not causal",
        ),
        ("training FLOPs, no head", f"{rung.flops_no_head:.5g}", "axis of the loss forecast"),
        ("training FLOPs, causal", f"{causal:.4g}", "head included, attention priced causally"),
        ("6 N T", f"{rung.flops_6nt:.4g}", "rule of thumb, N = active parameters"),
        ("peak rate", f"{rung.hyperball:.6g}", "constrained matrices and head"),
        ("peak Adam rate", f"{rung.adam:.6g}", "embedding, gains, taps, router, head gate"),
        ("beta2, epsilon", f"{rung.beta2:.6g}, {rung.epsilon:.5g}", "Adam moments"),
        ("warm-up", f"{rung.warmup_steps:,} steps", "then linear to 5 % of the peak"),
        ("parameter bytes", f"{state.parameters:,}", "float32"),
        ("optimizer bytes", f"{state.optimizer:,}", "float32 moments"),
    ]
    share = ladder_share(recipe)
    rows.append(
        (
            "ladder share",
            f"{100 * share['no_head']:.3f} %",
            f"of the target's FLOPs without head; {100 * share['with_head']:.3f} % with head",
        )
    )
    return rows


def print_plan(recipe: Recipe, *, as_json: bool) -> None:
    """Print target, ladder and warnings as tables, or everything as JSON."""
    widths = [*recipe.ladder.widths, recipe.model.width]
    rungs = [plan_width(recipe, width) for width in widths]
    if as_json:
        say(json.dumps(_as_json(recipe, rungs), indent=2))
        return
    say(f"recipe {recipe.name}, digest {recipe.digest()[:16]}")
    target = Table(title="Target", title_justify="left")
    for heading in ("quantity", "value", "convention"):
        target.add_column(heading, justify="right" if heading == "value" else "left")
    for row in describe_target(recipe):
        target.add_row(*row)
    console.print(target)
    console.print(_ladder_table(recipe, rungs))
    for rung in rungs:
        for warning in rung.warnings:
            say(f"warning, width {rung.width}: {warning}")


def _ladder_table(recipe: Recipe, rungs: list[Rung]) -> Table:
    table = Table(title="Ladder and target", title_justify="left")
    headings = ("width", "seeds", "layers", "active", "batch", "steps", "tokens", "FLOPs no head")
    for heading in (*headings, "peak rate"):
        table.add_column(heading, justify="right", overflow="fold")
    for rung in rungs:
        target = rung.width == recipe.model.width
        seeds = "target" if target else str(recipe.ladder.seeds.get(str(rung.width), 1))
        table.add_row(
            str(rung.width),
            seeds,
            str(rung.config.num_layers),
            f"{rung.active_params:,}",
            f"{rung.batch_sequences:,}",
            f"{rung.steps:,}",
            f"{rung.tokens:,}",
            f"{rung.flops_no_head:.4g}",
            f"{rung.hyperball:.4g}",
        )
    return table


def _as_json(recipe: Recipe, rungs: list[Rung]) -> dict[str, Any]:
    target = rungs[-1]
    return {
        "recipe": recipe.name,
        "digest": recipe.digest(),
        "target": target.plan()
        | {
            "active_with_head": accounting.active_with_head_parameters(target.config),
            "matrices_only": accounting.matrices_only_parameters(target.config),
        },
        "ladder": [rung.plan() for rung in rungs[:-1]],
        "ladder_share": ladder_share(recipe),
    }
