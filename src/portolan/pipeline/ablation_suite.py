"""The ablation suite: plan its runs, train what is missing, and hand the losses to the statistics.

Every arm is the project's recipe with a few keys changed. At equal tokens it takes as many updates
as the baseline; at equal FLOPs as many as its own FLOPs per token (convention FLOPS) allow. All
runs of a seed read the same data in the same order.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from portolan import accounting
from portolan.console import say
from portolan.errors import TrainingDiverged, UsageError
from portolan.files import write_json_atomic
from portolan.pipeline.ablation_arms import ARMS, BASELINE, Arm
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.forecasting import HEADLINE
from portolan.pipeline.plan import plan_width
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import PlannedRun, is_finished, plan_run, reference_tokens, train
from portolan.pipeline.side_by_side import Job, train_all
from portolan.project import Project
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

Budget = Literal["tokens", "flops"]

FLOPS: accounting.Convention = "full"
"""Counts what every arm really computes: causal attention, gates, convolutions, head."""
SAME_BUDGET = 0.02
"""Arms whose FLOPs per token differ by less than this share have one budget, not two."""
DIVERGED = "diverged.json"
BASELINE_ARM = Arm(BASELINE, "the recipe as it is")
FIRST_RATES = (0.5, 1.0, 2.0)
RATE_BOUNDS = (0.125, 8.0)
"""A sweep of the learning rate starts with these multiples and goes on by factors of two while
its best lies at an end, up to these bounds."""


@dataclass(frozen=True)
class Trial:
    """One run of the suite: the project with the arm's recipe, and the run planned from it."""

    arm: Arm
    project: Project
    run: PlannedRun

    @property
    def outcome(self) -> dict[str, Any] | None:
        """Content of the run's success mark, None before its end."""
        return self.project.read("runs", self.run.run_id, "finished.json")

    @property
    def diverged(self) -> bool:
        """Whether the run stopped for good before its end."""
        return (self.project.runs / self.run.run_id / DIVERGED).is_file()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        return is_finished(self.project, self.run) or self.diverged


@dataclass(frozen=True)
class Suite:
    """What to run: arms beside the baseline, widths, and seeds counted from the recipe's."""

    project: Project
    corpus: Corpus
    arms: tuple[Arm, ...]
    widths: tuple[int, ...]
    seeds: tuple[int, ...]

    def baseline_rung(self, width: int) -> Rung:
        """The plan that every arm of a width is measured against."""
        return plan_width(self.project.recipe, width)

    def twin(self, arm: Arm, width: int) -> Arm:
        """The first arm that trains the same model in the same way at a width, often itself.

        Small widths round away what sets some arms apart.
        """

        def essence(of: Arm) -> tuple[Any, ...]:
            recipe = arm_recipe(self.project.recipe, of)
            return recipe.shape(width), recipe.optimizer, recipe.train, of.sweeps_rate

        before = itertools.takewhile(lambda other: other != arm, (BASELINE_ARM, *self.arms))
        return next((other for other in before if essence(other) == essence(arm)), arm)

    def steps(self, arm: Arm, width: int, budget: Budget) -> int:
        """Updates of an arm under a budget."""
        baseline = self.baseline_rung(width)
        ratio = self.flops_ratio(arm, width)
        if budget == "tokens" or abs(ratio - 1) < SAME_BUDGET:
            return baseline.steps
        return max(1, round(baseline.steps / Fraction(ratio)))

    def flops_ratio(self, arm: Arm, width: int) -> float:
        """FLOPs per token of an arm over those of the baseline."""
        own = arm_recipe(self.project.recipe, arm).shape(width)
        forward = accounting.forward_flops_per_token
        return float(forward(own, FLOPS) / forward(self.baseline_rung(width).config, FLOPS))

    def trial(self, arm: Arm, width: int, seed: int, budget: Budget, rate: float = 1.0) -> Trial:
        """The run of an arm at a width, seed, budget and multiple of the learning rate."""
        arm = self.twin(arm, width)
        baseline, steps = self.baseline_rung(width), self.steps(arm, width, budget)
        recipe = arm_recipe(self.project.recipe, arm, rate)
        recipe = _with_budget(recipe, baseline, steps, reference_tokens(self.project))
        project = dataclasses.replace(self.project, recipe=recipe)
        run = plan_run(
            project, self.corpus, width, "ablation", seed, label=arm.name, order=baseline
        )
        assert run.rung.steps == steps
        return Trial(arm, project, run)

    def sweep(self, arm: Arm, width: int) -> dict[float, Trial]:
        """Runs at the first seed by rate; grows with their results until its best is inside."""
        rates = list(FIRST_RATES)
        while True:
            trials = {r: self.trial(arm, width, self.seeds[0], "tokens", r) for r in sorted(rates)}
            following = next_rate({rate: final_loss(trial) for rate, trial in trials.items()})
            if following is None:
                return trials
            rates.append(following)

    def rate(self, arm: Arm, width: int) -> float:
        """Best multiple of the learning rate found so far; 1 for an arm without a sweep."""
        if not arm.sweeps_rate:
            return 1.0
        losses = {r: final_loss(trial) for r, trial in self.sweep(arm, width).items()}
        found = {r: loss for r, loss in losses.items() if loss is not None}
        return min(found, key=lambda r: found[r]) if found else 1.0

    def trials(self, arm: Arm, width: int) -> Iterator[Trial]:
        """All runs of an arm at a width, in the order in which compiled programs serve longest."""
        if arm.sweeps_rate:
            yield from self.sweep(arm, width).values()
        rate = self.rate(arm, width)
        for budget in ("tokens", "flops"):
            for seed in self.seeds:
                yield self.trial(arm, width, seed, budget, rate)

    def missing(self, arm: Arm, width: int) -> list[Trial]:
        """Runs of an arm that are not done; those of its sweep come before the others are known."""
        if arm.sweeps_rate:
            open_rates = [t for t in self.sweep(arm, width).values() if not t.is_done]
            if open_rates:
                return open_rates
        trials = {t.run.run_id: t for t in self.trials(arm, width) if not t.is_done}
        return list(trials.values())


def make_suite(
    project: Project,
    corpus: Corpus,
    *,
    arms: Sequence[str],
    widths: Sequence[int],
    num_seeds: int,
) -> Suite:
    """The suite of the named arms (none: all) at widths (none: the two smallest rungs).

    Raises:
        UsageError: an arm is unknown.
    """
    known = {arm.name: arm for arm in ARMS}
    if unknown := sorted(set(arms) - {*known, BASELINE}):
        raise UsageError(f"arm {unknown[0]!r} is unknown", remedy=f"use some of {', '.join(known)}")
    chosen = tuple(arm for arm in ARMS if not arms or arm.name in arms)
    first = project.recipe.seed
    return Suite(
        project,
        corpus,
        chosen,
        tuple(widths) or project.recipe.ladder.widths[:2],
        tuple(range(first, first + num_seeds)),
    )


def arm_recipe(recipe: Recipe, arm: Arm, rate: float = 1.0) -> Recipe:
    """The recipe with the keys of an arm, its learning rates times `rate`."""
    changes = dict(arm.settings)
    if rate != 1.0:
        key = "optimizer.rate_multiplier"
        changes[key] = rate * changes.get(key, recipe.optimizer.rate_multiplier)
    return changed(recipe, changes)


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with other values at dotted keys, validated again."""
    # Only what was set explicitly: a default that an arm makes meaningless is not a contradiction.
    values = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in changes.items():
        *parents, last = key.split(".")
        table = values
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    found = Recipe.model_validate_json(json.dumps(values))
    for key, problem, remedy in found.contradictions():
        raise UsageError(f"{key} with {', '.join(changes)}: {problem}", remedy=remedy)
    return found


def _with_budget(recipe: Recipe, baseline: Rung, steps: int, reference: int) -> Recipe:
    """The recipe made to train `steps` updates of the baseline's batches."""
    tokens = steps * baseline.tokens_per_step
    active = accounting.active_parameters(recipe.shape(baseline.width))
    return changed(
        recipe,
        {
            "budget.tokens_per_active_param": tokens / active,
            "budget.batch_policy": "fixed",
            "budget.batch_sequences": baseline.batch_sequences,
            "budget.reference_tokens": reference,
        },
    )


def final_loss(trial: Trial) -> float | None:
    """Headline loss of a finished run, infinite for one that diverged, None before its end."""
    if outcome := trial.outcome:
        return float(outcome["evaluation"][HEADLINE])
    return math.inf if trial.diverged else None


def next_rate(losses: Mapping[float, float | None]) -> float | None:
    """The rate that a sweep tries next; None while runs are open or when its best is inside."""
    found = {rate: loss for rate, loss in losses.items() if loss is not None}
    if len(found) < len(losses) or min(found.values()) == math.inf:
        return None
    best = min(found, key=lambda rate: found[rate])
    following = {min(found): best / 2, max(found): best * 2}.get(best)
    low, high = RATE_BOUNDS
    return following if following is not None and low <= following <= high else None


def train_suite(suite: Suite, record: ProjectRecord, num_workers: int | None = None) -> int:
    """Train every missing run; their number.

    What a sweep of the rate asks for next is known when its runs have ended, so there are several
    rounds. A run that diverges is a result: it is marked and the suite goes on.
    """
    count = 0
    while jobs := missing_jobs(suite):
        count += len(jobs)
        train_all(jobs, train_or_mark, record, num_workers=num_workers)
    return count


def missing_jobs(suite: Suite) -> list[Job]:
    """What can be trained now, each run once."""
    found = {
        trial.run.run_id: Job(trial.project, suite.corpus, trial.run)
        for arm in (BASELINE_ARM, *suite.arms)
        for width in suite.widths
        for trial in suite.missing(arm, width)
    }
    return list(found.values())


def train_or_mark(job: Job, record: ProjectRecord, reporter: Any) -> None:
    """Train one run to its end, or mark it where it diverges: that is a result as well."""
    try:
        train(job.project, job.corpus, record, job.run, reporter=reporter)
    except TrainingDiverged as error:
        folder = job.project.runs / job.run.run_id
        write_json_atomic(folder / DIVERGED, {"reason": error.message})
        say(f"{job.run.run_id}: diverged: {error.message}")


def print_costs(suite: Suite) -> None:
    """Say what the suite needs and what of it is missing, without training."""
    for width in suite.widths:
        trials = {
            trial.run.run_id: trial
            for arm in (BASELINE_ARM, *suite.arms)
            for trial in (*suite.missing(arm, width), *suite.trials(arm, width))
        }
        missing = [trial for trial in trials.values() if not trial.is_done]
        tokens = sum(trial.run.rung.tokens for trial in missing)
        flops = sum(
            accounting.training_flops(t.run.rung.config, t.run.rung.tokens, FLOPS) for t in missing
        )
        programs = len({(trial.arm.name, trial.run.rung.steps) for trial in missing})
        say(
            f"width {width}: {len(trials)} runs, {len(missing)} missing: "
            f"{sum(t.run.rung.steps for t in missing):,} updates, {tokens:,} tokens, "
            f"{float(flops):.3g} FLOPs ({FLOPS}), {programs} shapes or schedules to compile"
        )
    sweeping = [arm.name for arm in suite.arms if arm.sweeps_rate]
    if sweeping:
        say(f"the sweeps of {', '.join(sweeping)} may add rates until the best lies inside")
