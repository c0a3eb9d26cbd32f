"""A swarm: small runs that differ in their mixture only, and the evidence that they leave.

Every run is one of the smallest rung, recorded like a rung, with simulated epoching; what is
finished is not trained again. Their results lie in `mixtures/swarm-<key>.json`, described by the
content of the cells, so that they still count when the store has other cells.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from portolan.canonical import digest, stringify_floats
from portolan.console import console, say
from portolan.data.mixture import Mixture, load_mixture, prefix_deviations
from portolan.data.mixture_search.content import bucket_of, mean_embeddings
from portolan.data.mixture_search.objective import MINIMUM_BASELINES, fit_objective
from portolan.data.mixture_search.search import Verdict, compare, spread_designs
from portolan.data.mixture_search.space import Cells, SearchSpace, fit_content
from portolan.errors import UsageError
from portolan.files import read_json, write_json_atomic
from portolan.pipeline.ablation_suite import DIVERGED, changed, train_or_mark
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.mixing import (
    check_target,
    epoch_prefixes,
    readable_tokens,
    reference_tokens,
    shared_lattice,
    simulated_epochs,
    target_phases,
)
from portolan.pipeline.plan import plan_width
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import MIXTURE_FILE, PlannedRun, describe, plan_run
from portolan.pipeline.side_by_side import Job, train_all
from portolan.project import Project
from portolan.timetable import MAIN_PHASE

FOLDER = "mixtures"
FORMAT, FORMAT_VERSION = "portolan-swarm", 1
ROLE = "swarm"
KEY_DIGITS = 8
METRIC_PREFIX, METRIC_SUFFIX = "eval_dropless/heldout/", "/bpb"
CONTENT_DIGITS = 6
PROPORTIONAL, CURRENT = "proportional", "recipe"


@dataclass(frozen=True)
class Member:
    """A mixture of the swarm: its label, the project that trains it, and its runs by seed."""

    label: str
    project: Project
    corpus: Corpus
    runs: dict[int, PlannedRun]

    def is_done(self, run: PlannedRun) -> bool:
        """Whether a run ended, well or by divergence."""
        folder = self.project.runs / run.run_id
        return (folder / "finished.json").is_file() or (folder / DIVERGED).is_file()

    @cached_property
    def mixture(self) -> Mixture:
        """Counts of every phase."""
        return self.corpus.mixture(next(iter(self.runs.values())).order)


@dataclass(frozen=True)
class Ground:
    """What all members share: the project, the space of their mixtures, and the plan of a run."""

    project: Project
    corpus: Corpus

    @cached_property
    def means(self) -> Any:
        """Mean embedding of each cell, [C, E]."""
        return mean_embeddings(self.corpus.store).round(CONTENT_DIGITS)

    @cached_property
    def space(self) -> SearchSpace:
        """Mixtures that a run of this project may use."""
        recipe, tokens = self.project.recipe, self.corpus.store.tokens_by_cell
        names = sorted(tokens, key=str.encode)
        readable = readable_tokens(recipe, tokens)
        cells = Cells(
            names=tuple(names),
            tokens=np.array([tokens[name] for name in names], np.int64),
            contents=fit_content(self.means)(self.means, [bucket_of(name) for name in names]),
            budgets_tokens=np.array([phase[2] for phase in target_phases(recipe)], np.int64),
        )
        return SearchSpace(
            cells,
            shared_lattice(recipe),
            recipe.mixture.max_epochs,
            np.array([readable[name] > 0 for name in names]),
        )

    @cached_property
    def phase_names(self) -> list[str]:
        """Phases of every mixture, the first one `main`."""
        return [MAIN_PHASE, *(phase.name for phase in self.project.recipe.mixture.phases)]

    @property
    def width(self) -> int:
        """Width of the smallest rung."""
        return self.project.recipe.ladder.widths[0]

    @cached_property
    def key(self) -> str:
        """Digest of everything but the mixture that changes what a run of the swarm shows."""
        recipe, rung = self.project.recipe, plan_width(self.project.recipe, self.width)
        identity = {
            "plan": rung.plan(),
            "shape": dataclasses.asdict(rung.config),
            "optimizer": recipe.optimizer.model_dump(mode="json"),
            "phases": target_phases(recipe),
            "store": self.corpus.store_digest,
            "heldout": self.corpus.evaluation_digest,
        }
        return digest(stringify_floats(identity))[:KEY_DIGITS]

    def counts_by_phase(self, counts: Any) -> dict[str, dict[str, int]]:
        """Counts [S, C] by the names of phases and cells."""
        rows = zip(self.phase_names, np.asarray(counts).tolist(), strict=True)
        return {phase: dict(zip(self.space.cells.names, row, strict=True)) for phase, row in rows}

    def member(self, label: str, settings: dict[str, Any], num_seeds: int) -> Member:
        """The member whose recipe has other `mixture` settings; its seeds count from the recipe's.

        Raises:
            UsageError: the settings cannot be.
        """
        changes = {f"mixture.{name}": value for name, value in settings.items()}
        recipe = changed(self.project.recipe, changes) if changes else self.project.recipe
        project = dataclasses.replace(self.project, recipe=recipe)
        corpus = Corpus(project, self.corpus.summary)
        first = recipe.seed
        runs = {
            seed: plan_run(project, corpus, self.width, ROLE, seed)
            for seed in range(first, first + num_seeds)
        }
        return Member(label, project, corpus, runs)

    def weighted(self, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
        """Recipe settings that give every phase these counts."""
        phases = [
            {
                "name": phase.name,
                "from_fraction": phase.from_fraction,
                "weights": counts.get(phase.name, {}),
            }
            for phase in self.project.recipe.mixture.phases
        ]
        return {"file": "", "weights": counts.get(MAIN_PHASE, {}), "phases": phases}


def plan_swarm(
    ground: Ground, *, num_designs: int, num_seeds: int, candidates: Sequence[Path]
) -> list[Member]:
    """Proportional and the recipe's own mixture, designs far apart, then the candidates.

    A longer list of designs begins with the shorter one. Designs train the first seed only.
    """
    members = [ground.member(PROPORTIONAL, ground.weighted({}), num_seeds)]
    own = ground.project.recipe.mixture
    if own.weights or any(phase.weights for phase in own.phases):
        members.append(ground.member(CURRENT, {}, num_seeds))
    designs = spread_designs(ground.space, num_designs, ground.project.recipe.seed)
    for number, counts in enumerate(designs, start=1):
        settings = ground.weighted(ground.counts_by_phase(counts))
        members.append(ground.member(f"design-{number}", settings, 1))
    for path in candidates:
        mixture = load_mixture(path)
        check_target(ground.corpus, mixture)
        counts = {phase.name: dict(phase.counts) for phase in mixture.phases}
        members.append(ground.member(path.stem, ground.weighted(counts), num_seeds))
    return members


def run_swarm(
    ground: Ground,
    *,
    num_designs: int,
    num_seeds: int,
    candidates: Sequence[Path],
    dry_run: bool,
    num_workers: int | None = None,
) -> None:
    """Train what is missing of a swarm, write its evidence and print what it shows."""
    if num_seeds < MINIMUM_BASELINES:
        raise UsageError(
            f"{num_seeds} seed of the proportional mixture does not show the noise",
            remedy=f"use --seeds {MINIMUM_BASELINES} or more",
        )
    members = plan_swarm(
        ground, num_designs=num_designs, num_seeds=num_seeds, candidates=candidates
    )
    missing = [(m, run) for m in members for run in m.runs.values() if not m.is_done(run)]
    _print_plan(ground, members, missing)
    if dry_run:
        return
    record = ProjectRecord(ground.project)
    for member, run in missing:
        say(f"{member.label}, seed {run.seed}: {run.run_id}")
    jobs = [Job(member.project, member.corpus, run) for member, run in missing]
    train_all(jobs, train_or_mark, record, num_workers=num_workers)
    path = write_evidence(ground, record)
    say(f"evidence: {ground.project.relative(path)}")
    _print_results(ground, members)


def _print_plan(
    ground: Ground, members: Sequence[Member], missing: Sequence[tuple[Member, PlannedRun]]
) -> None:
    rung = plan_width(ground.project.recipe, ground.width)
    total = sum(len(member.runs) for member in members)
    say(
        f"swarm {ground.key}: {len(members)} mixtures, {total} runs of width {ground.width}, "
        f"{len(missing)} missing: {len(missing) * rung.steps:,} updates, "
        f"{len(missing) * rung.tokens:,} tokens"
    )
    mixture = members[0].mixture
    simulated = simulated_epochs(rung, reference_tokens(ground.project.recipe))
    prefixes = epoch_prefixes(mixture, simulated)
    if simulated is not None and prefixes is not None:
        lengths = {n: t // mixture.sequence_length for n, t in mixture.cells.items()}
        errors = prefix_deviations(
            prefixes, lengths, experiment_tokens=simulated[0], target_tokens=simulated[1]
        )
        name = min(errors, key=lambda name: errors[name])
        say(
            f"simulated epochs: a run reads {simulated[0] / simulated[1]:.3%} of each cell; "
            f"rounding takes {-errors[name]:.1%} at most, of {name}"
        )


def finished_runs(ground: Ground) -> Iterator[dict[str, Any]]:
    """Run id, seed, counts [S, C] and metrics of every finished run of this swarm, by id."""
    like = describe(ground.project, ground.corpus, plan_run_of(ground))
    for folder in sorted(ground.project.runs.glob(f"{ROLE}-*")):
        if not (folder / "finished.json").is_file():
            continue
        run = read_json(folder / "run.json")
        if any(run[name] != like[name] for name in ("role", "model", "plan", "data")):
            continue
        mixture = load_mixture(folder / MIXTURE_FILE)
        names = [phase.name for phase in mixture.phases]
        if names != ground.phase_names or mixture.lattice != ground.space.lattice:
            continue
        evaluation = read_json(folder / "finished.json")["evaluation"]
        yield {
            "run_id": run["id"],
            "seed": run["seed"],
            "counts": [
                [phase.counts[name] for name in ground.space.cells.names]
                for phase in mixture.phases
            ],
            "metrics": {
                key.removeprefix(METRIC_PREFIX).removesuffix(METRIC_SUFFIX): value
                for key, value in sorted(evaluation.items())
                if key.startswith(METRIC_PREFIX) and key.endswith(METRIC_SUFFIX)
            },
        }


def plan_run_of(ground: Ground) -> PlannedRun:
    """Any run of the swarm: they share everything but mixture and seed."""
    return plan_run(ground.project, ground.corpus, ground.width, ROLE, ground.project.recipe.seed)


def write_evidence(ground: Ground, record: ProjectRecord) -> Path:
    """Write what all finished runs of the swarm show, and record it; returns the path."""
    cells = ground.space.cells
    proportional = ground.member(PROPORTIONAL, ground.weighted({}), 1).mixture
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "key": ground.key,
        "store_digest": ground.corpus.store_digest,
        "evaluation_digest": ground.corpus.evaluation_digest,
        "width": ground.width,
        "lattice": ground.space.lattice,
        "phases": [
            {"name": name, "budget_tokens": tokens}
            for name, _, tokens in target_phases(ground.project.recipe)
        ],
        "cells": {
            name: {
                "tokens": int(cells.tokens[index]),
                "bucket": bucket_of(name),
                "content": ground.means[index].tolist(),
            }
            for index, name in enumerate(cells.names)
        },
        "proportional": [
            [phase.counts[name] for name in cells.names] for phase in proportional.phases
        ],
        "runs": list(finished_runs(ground)),
    }
    path = ground.project.root / FOLDER / f"swarm-{ground.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or read_json(path) != content:
        write_json_atomic(path, content)
        text = f"{len(content['runs'])} runs of width {ground.width} with designed mixtures"
        name = f"swarm {ground.key} of {len(content['runs'])} runs"
        record.artifact("metrics", name, [path], text)
        record.sign()
    return path


def baselines_of(evidence: dict[str, Any]) -> list[dict[str, float]]:
    """Metrics of the proportional runs of a swarm."""
    proportional = evidence["proportional"]
    return [run["metrics"] for run in evidence["runs"] if run["counts"] == proportional]


def _print_results(ground: Ground, members: Sequence[Member]) -> None:
    """Objective, mean bits per byte and epochs of each member; the verdict on candidates."""
    evidence = read_json(ground.project.root / FOLDER / f"swarm-{ground.key}.json")
    objective = fit_objective(baselines_of(evidence))
    metrics = {run["run_id"]: run["metrics"] for run in evidence["runs"]}
    table = Table(title="Swarm", title_justify="left")
    for heading in ("mixture", "seeds", "objective", "mean bits per byte", "largest epochs"):
        table.add_column(heading, justify="left" if heading == "mixture" else "right")
    values: dict[str, dict[int, float]] = {}
    for member in members:
        found = {s: metrics[r.run_id] for s, r in member.runs.items() if r.run_id in metrics}
        values[member.label] = {seed: objective(row) for seed, row in found.items()}
        counts = [[p.counts[n] for n in ground.space.cells.names] for p in member.mixture.phases]
        epochs = float(ground.space.max_epochs(np.array(counts)[None])[0])
        mean = [np.mean(list(row.values())) for row in found.values()]
        shown = [f"{np.mean(list(values[member.label].values())):+.2f}", f"{np.mean(mean):.4f}"]
        table.add_row(
            member.label, str(len(found)), *(shown if found else ["-", "-"]), f"{epochs:.2f}"
        )
    console.print(table)
    say(
        f"objective: sum over {len(objective.targets)} held-out domains of the difference from "
        "proportional in units of its noise; lower is better"
    )
    old = CURRENT if CURRENT in values else PROPORTIONAL
    for member in members:
        if member.label not in (PROPORTIONAL, CURRENT) and len(member.runs) > 1:
            verdict = compare(values[old], values[member.label])
            say(f"{member.label} against {old}: {_describe(verdict)}")


def _describe(verdict: Verdict) -> str:
    word = "accepted" if verdict.accepted else "not accepted"
    return (
        f"{word}: difference {verdict.difference:+.2f} over {verdict.num_seeds} seeds, upper end "
        f"of the 95 % interval {verdict.upper:+.2f}; it takes 3 seeds and an upper end below 0"
    )
