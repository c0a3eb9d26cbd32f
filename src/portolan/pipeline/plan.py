"""What a recipe costs, by arithmetic only."""

import dataclasses
import json
from typing import Any

from rich.table import Table

from portolan import accounting
from portolan.accounting import MemoryBytes
from portolan.console import console, say
from portolan.pipeline.course import plan_course
from portolan.pipeline.plan_mesh import MeshOptions, MeshReport, mesh_json, plan_mesh, print_mesh
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung, derive
from portolan.shapes import ModelConfig


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


def describe_target(recipe: Recipe, *, on_one_device: bool) -> list[tuple[str, str, str]]:
    """(quantity, value, convention) of the target; the memory of a step only `on_one_device`."""
    rung = plan_width(recipe, recipe.model.width)
    config = rung.config
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
        ("layers x width", f"{config.num_layers} x {config.width}", "all layers are alike"),
        _describe_feed_forward(config),
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
        *_describe_rates(recipe, rung),
        ("beta2, epsilon", f"{rung.beta2:.6g}, {rung.epsilon:.5g}", "Adam moments"),
        ("warm-up", f"{rung.warmup_steps:,} steps", "then linear to 5 % of the peak"),
        *_describe_memory(recipe, rung, on_one_device=on_one_device),
    ]
    share = ladder_share(recipe)
    rows.append(
        (
            "ladder share",
            f"{100 * share['no_head']:.3f} %",
            f"of the target's FLOPs without head; {100 * share['with_head']:.3f} % with head",
        )
    )
    course = plan_course(recipe, rung, extend=True)
    if len(course.stages) > 1:
        rows.append(("rows of an update", course.describe_stages(), "sequences x tokens"))
    if len(course.phases) > 1:
        rows.append(("mixture phases", course.describe_phases(), "first update of each"))
    return rows


def _describe_feed_forward(config: ModelConfig) -> tuple[str, str, str]:
    if config.mlp == "dense":
        return ("inner width", f"{config.dense_width:,}", "one SwiGLU a layer, no experts")
    return (
        "experts",
        f"{config.num_experts}, {config.experts_per_token} a token",
        f"and {config.num_shared_experts} shared",
    )


def _describe_rates(recipe: Recipe, rung: Rung) -> list[tuple[str, str, str]]:
    if recipe.optimizer.matrix == "adamw":
        return [("peak Adam rate", f"{rung.adam:.6g}", "every parameter")]
    return [
        ("peak rate", f"{rung.hyperball:.6g}", "constrained matrices and head"),
        ("peak Adam rate", f"{rung.adam:.6g}", "embedding, gains, taps, router, head gate"),
    ]


def estimate_memory(recipe: Recipe, rung: Rung, *, on_accelerator: bool) -> MemoryBytes:
    """Memory of an update of a run on one device."""
    return accounting.memory_bytes(
        rung.config,
        rung.batch_sequences,
        remat=recipe.train.remat,
        on_accelerator=on_accelerator,
        matrix=recipe.optimizer.matrix,
        gated_norm=recipe.optimizer.gated_norm,
    )


def _describe_memory(
    recipe: Recipe, rung: Rung, *, on_one_device: bool
) -> list[tuple[str, str, str]]:
    cpu = estimate_memory(recipe, rung, on_accelerator=False)
    device = estimate_memory(recipe, rung, on_accelerator=True)
    one = f"whole batch on one device, remat {recipe.train.remat!r}; an estimate"
    state = [
        ("parameter bytes", f"{cpu.parameters:,}", "float32"),
        ("optimizer bytes", f"{cpu.optimizer:,}", "float32 moments"),
        ("gradient bytes", f"{cpu.gradients:,}", "float32"),
    ]
    if not on_one_device:
        return state
    return [
        *state,
        ("saved activations", f"{cpu.saved_activations:,} bytes", f"float32, {one}"),
        ("logits block", f"{cpu.logits_block:,} bytes", "float32 on a CPU, with its gradient"),
        ("work of one layer", f"{cpu.layer_work:,} bytes", "expert rows or attention, float32"),
        ("peak of a step, CPU", f"{cpu.peak:,} bytes", f"float32, {one}"),
        ("peak of a step, GPU", f"{device.peak:,} bytes", f"bfloat16 activations, {one}"),
    ]


def print_plan(recipe: Recipe, options: MeshOptions | None = None, *, as_json: bool) -> None:
    """Print target, ladder, mesh and warnings as tables, or everything as JSON.

    Raises:
        UsageError: the target does not fit its mesh or the machine that `options` names.
    """
    widths = [*recipe.ladder.widths, recipe.model.width]
    rungs = [plan_width(recipe, width) for width in widths]
    mesh = plan_mesh(recipe, rungs[-1], options or MeshOptions())
    if as_json:
        say(json.dumps(_as_json(recipe, rungs, mesh), indent=2))
        return
    say(f"recipe {recipe.name}, digest {recipe.digest()[:16]}")
    target = Table(title="Target", title_justify="left")
    for heading in ("quantity", "value", "convention"):
        target.add_column(heading, justify="right" if heading == "value" else "left")
    for row in describe_target(recipe, on_one_device=mesh.plan.mesh.num_devices == 1):
        target.add_row(*row)
    console.print(target)
    console.print(_ladder_table(recipe, rungs))
    for rung in rungs:
        for warning in rung.warnings:
            say(f"warning, width {rung.width}: {warning}")
    print_mesh(mesh)


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
            f"{rung.adam if recipe.optimizer.matrix == 'adamw' else rung.hyperball:.4g}",
        )
    return table


def _as_json(recipe: Recipe, rungs: list[Rung], mesh: MeshReport) -> dict[str, Any]:
    target = rungs[-1]
    return {
        "recipe": recipe.name,
        "digest": recipe.digest(),
        "target": target.plan()
        | {
            "active_with_head": accounting.active_with_head_parameters(target.config),
            "matrices_only": accounting.matrices_only_parameters(target.config),
            "memory_bytes": {
                name: dataclasses.asdict(memory) | {"peak": memory.peak}
                for name, on in (("cpu", False), ("accelerator", True))
                for memory in [estimate_memory(recipe, target, on_accelerator=on)]
            },
        },
        "ladder": [rung.plan() for rung in rungs[:-1]],
        "ladder_share": ladder_share(recipe),
        "parallel": mesh_json(mesh),
    }
