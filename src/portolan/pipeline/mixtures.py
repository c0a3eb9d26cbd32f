"""The verbs `mixture swarm` and `mixture propose`: evidence for mixtures, and a file from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from portolan.console import say
from portolan.data.mixture_design import (
    MixtureError,
    count_limits,
    round_to_lattice,
    sort_names,
    temperature_weights,
    unimax_weights,
)
from portolan.data.mixture_search.alternatives import Predictor, fit_exposure, fit_log_linear
from portolan.data.mixture_search.objective import Objective, fit_objective
from portolan.data.mixture_search.search import (
    NUM_DRAWS,
    Score,
    rank_correlation,
    search,
    search_later,
)
from portolan.data.mixture_search.space import Cells, ContentMap, fit_content
from portolan.files import read_json
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.mixing import (
    describe_epochs,
    phase_counts,
    readable_tokens,
    reference_tokens,
    shared_lattice,
    target_mixture,
)
from portolan.pipeline.mixture_view import print_mixture
from portolan.pipeline.plan import plan_width
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.stages import require_corpus
from portolan.pipeline.swarm import (
    FOLDER,
    Ground,
    baselines_of,
    finished_runs,
    run_swarm,
    write_evidence,
)
from portolan.project import Project

Method = Literal["proportional", "temperature", "unimax", "surrogate"]
Model = Literal["process", "log-linear", "exposure"]
DIGEST_DIGITS = 8
FEW_RUNS = 3
"""A rank correlation of fewer runs than these says nothing."""


@dataclass(frozen=True)
class SearchOptions:
    """How the surrogate searches; `from_phase` keeps the phases before it as they are."""

    model: Model = "process"
    acquisition: Literal["mean", "noisy-ei"] = "mean"
    targets: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    from_phase: str = ""
    seed: int = 0


def swarm(
    project: Project,
    *,
    num_designs: int,
    num_seeds: int,
    candidates: Sequence[Path],
    dry_run: bool,
    num_workers: int | None = None,
) -> None:
    """Train a swarm of small runs with designed mixtures."""
    run_swarm(
        Ground(project, require_corpus(project)),
        num_designs=num_designs,
        num_seeds=num_seeds,
        candidates=candidates,
        dry_run=dry_run,
        num_workers=num_workers,
    )


def propose(
    project: Project, method: Method, *, exponent: float, cap_epochs: float, options: SearchOptions
) -> None:
    """Write a checked mixture file and print its epochs per cell against the cap."""
    corpus = require_corpus(project)
    ground = Ground(project, corpus)
    if method == "surrogate":
        counts, how = _search(ground, options)
        cap_epochs = project.recipe.mixture.max_epochs
    else:
        cap_epochs = cap_epochs or project.recipe.mixture.max_epochs
        weights, how = _closed_form(corpus, method, exponent, cap_epochs)
        counts = dict.fromkeys(ground.phase_names, weights)
    mixture = target_mixture(
        corpus,
        counts,
        shared_lattice(project.recipe),
        name=f"{project.recipe.name}-{method}",
        cap_epochs=cap_epochs,
        provenance={"method": method, **how},
    )
    path = project.root / FOLDER / f"{method}-{mixture.digest[:DIGEST_DIGITS]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    mixture.save(path)
    record = ProjectRecord(project)
    name = f"mixture {mixture.digest[:16]}"
    if not record.find("artifact", kind="mixture", name=name):
        text = f"proposed mixture, {method}: {describe_epochs(mixture)}"
        record.artifact("mixture", name, [path], text, digests={"mixture": mixture.digest})
        record.sign()
    print_mixture(mixture)
    say(f"mixture: {project.relative(path)}")
    say(f'to use it, put file = "{project.relative(path)}" into [mixture] of the recipe')


def _closed_form(
    corpus: Corpus, method: Method, exponent: float, cap_epochs: float
) -> tuple[dict[str, int], dict[str, Any]]:
    """Counts of one phase, and what made them."""
    recipe, store = corpus.project.recipe, corpus.store.tokens_by_cell
    lattice, budget = shared_lattice(recipe), reference_tokens(recipe)
    how: dict[str, Any] = {"budget_tokens": budget, "cap_epochs": cap_epochs}
    if method == "proportional":
        return phase_counts(recipe, {}, store, lattice), how
    tokens = readable_tokens(recipe, store)
    if method == "temperature":
        how["exponent"] = exponent
        found = temperature_weights(tokens, exponent, budget_tokens=budget, cap_epochs=cap_epochs)
    else:
        found = unimax_weights(tokens, budget_tokens=budget, cap_epochs=cap_epochs)
    how["capped_cells"] = sort_names(found.capped)
    limits = count_limits(tokens, lattice, budget_tokens=budget, cap_epochs=cap_epochs)
    return round_to_lattice(found.weights, lattice, limits=limits), how


@dataclass(frozen=True)
class _Evidence:
    """A swarm ready for a surrogate: weights [n, S, C], objectives [n], metrics and identity."""

    key: str
    cells: Cells
    counts: np.ndarray
    weights: np.ndarray
    values: np.ndarray
    metrics: list[dict[str, float]]
    objective: Objective


def _evidence(ground: Ground, options: SearchOptions) -> list[_Evidence]:
    """Swarms of this project, that of the present store and plan first.

    Others join when they have as many phases, cells described alike, and the same metrics.
    """
    if any(True for _ in finished_runs(ground)):
        write_evidence(ground, ProjectRecord(ground.project))
    paths = sorted((ground.project.root / FOLDER).glob("swarm-*.json"))
    contents = sorted((read_json(path) for path in paths), key=lambda c: c["key"] != ground.key)
    if not contents or contents[0]["key"] != ground.key:
        raise MixtureError(
            f"no swarm {ground.key} of the present store and plan",
            remedy="train one with `portolan mixture swarm --designs 8`",
        )
    content_map, found = fit_content(ground.means), []
    for content in contents:
        try:
            found.append(_read_evidence(content, content_map, options))
        except MixtureError as error:
            if content["key"] == ground.key:
                raise
            say(f"swarm {content['key']} is left out: {error.message}")
    phases = len(ground.phase_names)
    return [e for e in found if e.weights.shape[1] == phases]


def _read_evidence(
    content: Mapping[str, Any], content_map: ContentMap, options: SearchOptions
) -> _Evidence:
    cells = list(content["cells"].values())
    means = np.array([cell["content"] for cell in cells])
    if means.shape[1] != len(content_map.center):
        raise MixtureError(f"its cells are described by {means.shape[1]} numbers each")
    objective = fit_objective(
        baselines_of(dict(content)),
        targets=options.targets,
        guards=options.guards,
    )
    counts = np.array([run["counts"] for run in content["runs"]], np.int64)
    metrics = [run["metrics"] for run in content["runs"]]
    return _Evidence(
        key=content["key"],
        cells=Cells(
            names=tuple(content["cells"]),
            tokens=np.array([cell["tokens"] for cell in cells], np.int64),
            contents=content_map(means, [cell["bucket"] for cell in cells]),
            budgets_tokens=np.array([p["budget_tokens"] for p in content["phases"]], np.int64),
        ),
        counts=counts,
        weights=counts / content["lattice"],
        values=np.array([objective(row) for row in metrics]),
        metrics=metrics,
        objective=objective,
    )


def _search(
    ground: Ground, options: SearchOptions
) -> tuple[dict[str, dict[str, int]], dict[str, Any]]:
    """Counts by phase of the best candidate, and what made them."""
    swarms, space = _evidence(ground, options), ground.space
    own = swarms[0]
    predict, score, correlation = _fit(swarms, options)
    if options.from_phase:
        current = _current_counts(ground)
        phase = _phase_number(ground, options.from_phase)
        found = search_later(space, score, current, phase=phase, seed=options.seed)
        best = found[0]
        expected = predict(space.weights(found))
        say(f"{len(found)} later phases, expected objective {_list(expected)}; the first is taken")
    else:
        best = search(space, score, own.counts, seed=options.seed)
    proportional = space.proportional
    values = predict(space.weights(np.stack([best, proportional])))
    say(
        f"expected objective {values[0]:+.3f}, of proportional {values[1]:+.3f}, of the best run "
        f"{own.values.min():+.3f} measured; lower is better"
    )
    say(
        f"leave-one-out rank correlation of the surrogate over {len(own.values)} runs: "
        f"{correlation:.2f}"
    )
    how = {
        "model": options.model,
        "acquisition": options.acquisition,
        "targets": list(own.objective.targets),
        "guards": list(own.objective.guards),
        "from_phase": options.from_phase,
        "seed": options.seed,
        "swarms": [swarm.key for swarm in swarms],
        "num_runs": [len(swarm.values) for swarm in swarms],
        "expected_objective": float(values[0]),
        "expected_objective_proportional": float(values[1]),
        "rank_correlation": correlation,
        "largest_epochs": float(space.max_epochs(best[None])[0]),
    }
    return ground.counts_by_phase(best), how


def _list(values: np.ndarray) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


def _fit(swarms: Sequence[_Evidence], options: SearchOptions) -> tuple[Predictor, Score, float]:
    """Expected objective, the score that the search minimises, and leave-one-out correlation."""
    own = swarms[0]
    if options.model == "process":
        from portolan.data.mixture_search.process import Swarm, fit_process

        process = fit_process(
            [Swarm(s.key, s.cells, s.weights, s.values) for s in swarms], seed=options.seed
        )
        number = len(own.values)
        correlation = rank_correlation(process.leave_one_out()[:number], -own.values)
        if options.acquisition == "mean":
            return process, process, correlation
        draws = process.noiseless_draws(NUM_DRAWS, options.seed)
        return process, lambda weights: -draws.expected_improvement(weights), correlation

    def fit(kept: np.ndarray) -> Predictor:
        if options.model == "exposure":
            return fit_exposure(own.cells, own.weights[kept], own.values[kept])
        metrics = [own.metrics[index] for index in np.flatnonzero(kept)]
        return fit_log_linear(own.weights[kept], metrics, own.objective)

    everything = np.ones(len(own.values), bool)
    left_out = [
        fit(np.arange(len(everything)) != index)(own.weights[index : index + 1])[0]
        for index in range(len(everything))
        if len(everything) > FEW_RUNS
    ]
    correlation = rank_correlation(np.array(left_out), own.values) if left_out else 0.0
    predict = fit(everything)
    return predict, predict, correlation


def _current_counts(ground: Ground) -> np.ndarray:
    recipe = ground.project.recipe
    mixture = ground.corpus.mixture(plan_width(recipe, recipe.model.width))
    if mixture.lattice != ground.space.lattice:
        raise MixtureError(
            f"the recipe's mixture has a lattice of {mixture.lattice}, the search one of "
            f"{ground.space.lattice}",
            remedy="propose the whole mixture",
        )
    rows = [[phase.counts[n] for n in ground.space.cells.names] for phase in mixture.phases]
    return np.array(rows, np.int64)


def _phase_number(ground: Ground, name: str) -> int:
    if name not in ground.phase_names[1:]:
        raise MixtureError(
            f"the recipe has no later phase {name!r}",
            remedy=f"use one of {', '.join(ground.phase_names[1:]) or 'none: it has one phase'}",
        )
    return ground.phase_names.index(name)
