"""The table of an ablation: losses, effects, cost of every arm; written, recorded and printed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table as ConsoleTable

from portolan import accounting
from portolan.canonical import digest, stringify_floats
from portolan.console import console, say
from portolan.files import write_json_atomic
from portolan.pipeline.ablation_arms import ARMS, BASELINE, Arm
from portolan.pipeline.ablation_suite import (
    BASELINE_ARM,
    FLOPS,
    SAME_BUDGET,
    Budget,
    Suite,
    Trial,
    final_loss,
)
from portolan.pipeline.forecasting import HEADLINE
from portolan.pipeline.provenance import code_digest
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import is_finished, planned_runs
from portolan.processes import usable_cores
from portolan.project import RECIPE_FILE, Project
from portolan.recipe import load_recipe
from portolan.record.types import Check
from portolan.report.ablation import FOLDER, arms_table, build_page, read_table, width_tables
from portolan.scaling.ablation import (
    LEVEL,
    Effect,
    Interval,
    effective_speedup,
    fit_width_law,
    measure_effects,
)
from portolan.scaling.baseline import PowerLaw
from portolan.scaling.score import compute_equivalent

VERSION = 1
NAME_DIGITS = 16
FAST_SHARE = 0.1
"""Speed is that of the fastest tenth of the updates: others share the machine with the rest."""


def build_table(suite: Suite) -> dict[str, Any]:
    """Everything that a finished suite says, ready for JSON."""
    law = _law(suite)
    return stringify_floats(
        {
            "version": VERSION,
            "recipe": suite.project.recipe.digest(),
            "recipe_name": suite.project.recipe.name,
            "changes": _changes(suite.project),
            "all_arms": suite.arms == ARMS,
            "metric": HEADLINE,
            "level": LEVEL,
            "flops_convention": FLOPS,
            "same_budget": SAME_BUDGET,
            "fast_share": FAST_SHARE,
            "cores": usable_cores(),
            "seeds": list(suite.seeds),
            "data": {
                "store": suite.corpus.store_digest,
                "evaluation": suite.corpus.evaluation_digest,
                "tokenizer": suite.corpus.tokenizer_digest,
            },
            "law": None
            if law is None
            else {"asymptote": law.asymptote, "exponent": law.exponent, "scale": law.coefficient},
            "widths": [_width(suite, width, law) for width in suite.widths],
        }
    )


def _changes(project: Project) -> dict[str, Any]:
    """Dotted keys in which the recipe of the suite differs from the project's file."""

    def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    written = dict(leaves(load_recipe(project.root / RECIPE_FILE).canonical()))
    return {k: v for k, v in leaves(project.recipe.canonical()) if written.get(k) != v}


def _law(suite: Suite) -> PowerLaw | None:
    """Law through the baselines of the suite and the finished rungs of the project's ladder."""
    losses: dict[float, list[float]] = {}
    for width in suite.widths:
        for trial in _seeds(suite, BASELINE_ARM, width, "tokens").values():
            if (loss := final_loss(trial)) is not None:
                losses.setdefault(float(trial.run.rung.flops_no_head), []).append(loss)
    for run in planned_runs(suite.project, suite.corpus)[:-1]:
        if is_finished(suite.project, run):
            outcome = suite.project.read("runs", run.run_id, "finished.json")
            flops = float(run.rung.flops_no_head)
            losses.setdefault(flops, []).append(outcome["evaluation"][HEADLINE])
    return fit_width_law({flops: float(np.mean(found)) for flops, found in losses.items()})


def _seeds(suite: Suite, arm: Arm, width: int, budget: Budget) -> dict[int, Trial]:
    rate = suite.rate(arm, width)
    return {seed: suite.trial(arm, width, seed, budget, rate) for seed in suite.seeds}


def _losses(trials: Mapping[int, Trial]) -> dict[int, float]:
    """Final loss by seed of the runs that ended."""
    found = {seed: final_loss(trial) for seed, trial in trials.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None and loss < np.inf}


def _width(suite: Suite, width: int, law: PowerLaw | None) -> dict[str, Any]:
    base = _seeds(suite, BASELINE_ARM, width, "tokens")
    baseline = _losses(base)
    entry: dict[str, Any] = {
        "width": width,
        "baseline": _cost(suite, BASELINE_ARM, width, base)
        | {"steps": suite.baseline_rung(width).steps, "losses": _by_seed(baseline)},
    }
    rows = {arm.name: _arm_facts(suite, arm, width) for arm in suite.arms}
    distinct = [arm for arm in suite.arms if suite.twin(arm, width) is arm]
    for budget in ("tokens", "flops"):
        trials = {arm.name: _seeds(suite, arm, width, budget) for arm in distinct}
        losses = {name: _losses(found) for name, found in trials.items()}
        losses[BASELINE] = baseline
        references = {arm.name: reference_of(suite, arm) for arm in distinct}
        effects, noise = measure_effects(losses, references)
        entry[f"noise_{budget}"] = noise and {"sd": noise.sd, "freedom": noise.freedom}
        for name, found in trials.items():
            rows[name][budget] = {
                "steps": next(iter(found.values())).run.rung.steps,
                "losses": _by_seed(losses[name]),
                "diverged": sum(trial.diverged for trial in found.values()),
            }
            if name in effects:
                theirs = losses[references[name]]
                mean = float(np.mean([theirs[s] for s in losses[name] if s in theirs]))
                rows[name][budget] |= _effect(effects[name], mean, law)
    if law is not None:
        for arm in distinct:
            reference = rows.get(reference_of(suite, arm)) or entry["baseline"]
            rows[arm.name]["speedup"] = _speedup(rows[arm.name], reference, law)
        excess = float(np.mean(list(baseline.values()))) - law.asymptote
        entry["same_budget_nats"] = law.exponent * SAME_BUDGET * excess
    return entry | {"num_distinct": len(distinct), "arms": list(rows.values())}


def reference_of(suite: Suite, arm: Arm) -> str:
    """What an arm is compared with: the baseline when its own reference is not in the suite."""
    return arm.against if arm.against in {other.name for other in suite.arms} else BASELINE


def _by_seed(losses: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): loss for seed, loss in losses.items()}


def _arm_facts(suite: Suite, arm: Arm, width: int) -> dict[str, Any]:
    """What an arm is, what was reported of it, and what it costs at a width."""
    trials = _seeds(suite, arm, width, "tokens")
    facts: dict[str, Any] = {
        "arm": arm.name,
        "change": arm.change,
        "against": reference_of(suite, arm),
        "settings": dict(arm.settings),
        "reported": arm.reported,
        "scale": arm.scale,
        "source": arm.source,
    }
    if (twin := suite.twin(arm, width)) is not arm:
        facts["same_as"] = twin.name
    if arm.sweeps_rate:
        swept = suite.sweep(arm, width).values()
        losses = {trial.run.rung.rate_multiplier: final_loss(trial) for trial in swept}
        facts["sweep"] = {
            str(rate): "diverged" if loss == np.inf else loss for rate, loss in losses.items()
        }
    return facts | _cost(suite, arm, width, trials)


def _cost(suite: Suite, arm: Arm, width: int, trials: Mapping[int, Trial]) -> dict[str, Any]:
    first = next(iter(trials.values()))
    config, rung = first.run.rung.config, first.run.rung
    rate, program_bytes = _speed(trials.values())
    return {
        "total_params": rung.total_params,
        "active_params": rung.active_params,
        "flops_per_token": float(accounting.forward_flops_per_token(config, FLOPS)),
        "flops_ratio": suite.flops_ratio(arm, width),
        "rate": rung.rate_multiplier,
        "tokens_per_second": rate,
        "program_bytes": program_bytes,
    }


def _speed(trials: Any) -> tuple[float | None, int | None]:
    """Tokens per second of the fast updates of all seeds, and the memory of the programs."""
    from portolan.track.tracker import read_metrics

    key, seconds, tokens, memory = "throughput/step_seconds", [], 0, []
    for trial in trials:
        if trial.outcome:
            table = read_metrics(trial.project.runs / trial.run.run_id, keys=[key])
            seconds += table["value"].to_list()
            tokens = trial.run.rung.tokens_per_step
            memory.append(trial.outcome.get("program_bytes") or 0)
    if not seconds:
        return None, None
    return tokens / float(np.quantile(seconds, FAST_SHARE)), max(memory) or None


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _effect(effect: Effect, baseline: float, law: PowerLaw | None) -> dict[str, Any]:
    """Difference, intervals, and the compute that the baseline needs for the arm's loss.

    The interval of the compute is that of the paired differences, with the baseline's mean fixed.
    """
    facts: dict[str, Any] = {
        "difference": effect.difference,
        "num_seeds": effect.num_seeds,
        "own": _ends(effect.own),
        "joint": _ends(effect.joint),
        "resolved": effect.resolved,
    }
    if law is None:
        return facts

    def compute(difference: float) -> float | None:
        """Compute ratio at a difference; None below the asymptote, where the law has none."""
        if baseline + difference <= law.asymptote:
            return None
        return compute_equivalent(baseline, baseline + difference, law.asymptote, law.exponent)

    facts["compute"] = compute(effect.difference)
    if effect.own is not None:
        facts["compute_interval"] = [compute(effect.own.high), compute(effect.own.low)]
    return facts


def _speedup(row: Mapping[str, Any], baseline: Mapping[str, Any], law: PowerLaw) -> float | None:
    """Effective speed-up in time at equal tokens of an arm whose effect is resolved."""
    found, reference = row["tokens"], baseline.get("tokens", baseline)
    rates = (baseline["tokens_per_second"], row["tokens_per_second"])
    if not found.get("resolved") or None in rates:
        return None
    seeds = [seed for seed in found["losses"] if seed in reference["losses"]]
    old, new = (float(np.mean([x["losses"][s] for s in seeds])) for x in (reference, found))
    if new <= law.asymptote:
        return None

    def point(loss: float, facts: Mapping[str, Any], rate: float) -> tuple[float, float, float]:
        return loss, facts["flops_per_token"], facts["flops_per_token"] * rate

    first, second = point(old, baseline, rates[0]), point(new, row, rates[1])
    return effective_speedup(law, baseline=first, variant=second)


def write_table(project: Project, record: ProjectRecord, table: dict[str, Any]) -> Path:
    """Write the table under its digest, record it once, and build the page; the table's path."""
    path = project.root / FOLDER / f"{digest(table)[:NAME_DIGITS]}.json"
    if not path.is_file():
        write_json_atomic(path, table)
    name = f"ablation {path.stem}"
    if not record.find("artifact", name=name):
        num_arms = len(table["widths"][0]["arms"])
        resolved = {
            f"d{entry['width']}": " ".join(
                row["arm"] for row in entry["arms"] if row.get("tokens", {}).get("resolved")
            )
            or "none"
            for entry in table["widths"]
        }
        text = f"ablation of {num_arms} arms at widths {', '.join(resolved)}"
        artifact = record.artifact("eval_output", name, [path], text)
        record.journal.append(
            "check",
            Check(
                text=f"{text}: resolved at equal tokens: {'; '.join(resolved.values())}",
                refs=(artifact,),
                rule="ablation",
                version=str(VERSION),
                inputs={"table": digest(table)},
                result=resolved,
                tool_digest=code_digest(),
            ),
        )
        record.sign()
    build_page(project.root, path)
    return path


def print_table(table: Mapping[str, Any]) -> None:
    """Print the effects and the costs of every width."""
    found = read_table(table)
    for line in found.introduction:
        say(line)
    tables = [arms_table(found)]
    for width in found.widths:
        tables += width_tables(found, width)
    for text in tables:
        shown = ConsoleTable(title=text.caption, title_justify="left")
        for index, column in enumerate(text.columns):
            number = index > 0 and text.is_number(index)
            shown.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in text.rows:
            shown.add_row(*row)
        console.print(shown)
        if text.note:
            say(text.note)
