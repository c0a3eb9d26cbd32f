"""The mixture of a run: from the recipe's weights or its mixture file to counts on the store."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.data.mixture import (
    Mixture,
    budget_phases,
    check_continuation,
    check_mixture,
    load_mixture,
    require_consistent,
    simulated_prefixes,
)
from portolan.data.mixture_design import (
    count_limits,
    proportional_counts,
    round_to_lattice,
    sort_names,
)
from portolan.errors import UsageError
from portolan.pipeline.course import Course, plan_course
from portolan.pipeline.plan import plan_width
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

if TYPE_CHECKING:
    from portolan.pipeline.corpus import Corpus

SIMULATION_MAX_FLOPS = 1e23
"""Runs of more training FLOPs have epochs of their own (data.md 12)."""


def reference_tokens(recipe: Recipe) -> int:
    """Tokens that mixture weights and simulated epochs refer to: the target's, unless stated."""
    stated = recipe.budget.reference_tokens
    return stated or plan_width(recipe, recipe.model.width).tokens


def shared_lattice(recipe: Recipe) -> int:
    """Smallest mixture block of the runs: every run reads the cells in exactly the same shares."""
    widths = (*recipe.ladder.widths, recipe.model.width)
    return min(plan_width(recipe, width).mixture_block for width in widths)


def readable_tokens(recipe: Recipe, tokens: Mapping[str, int]) -> dict[str, int]:
    """Tokens of each cell; 0 for one of which the smallest run would not keep a sequence."""
    rungs = [plan_width(recipe, width) for width in (*recipe.ladder.widths, recipe.model.width)]
    smallest = min(rungs, key=lambda rung: rung.tokens)
    length = smallest.config.sequence_length
    target = max(reference_tokens(recipe), smallest.tokens)
    kept = {name: count // length * smallest.tokens // target for name, count in tokens.items()}
    return {name: count if kept[name] else 0 for name, count in tokens.items()}


def phase_counts(
    recipe: Recipe, weights: Mapping[str, float], tokens: Mapping[str, int], lattice: int
) -> dict[str, int]:
    """Weights by cell, or without any the tokens, as counts on the lattice.

    Without weights every cell that a run can read and the cap allows has a count of at least 1.
    """
    if not weights:
        budget, cap, total = (
            reference_tokens(recipe),
            recipe.mixture.max_epochs,
            sum(tokens.values()),
        )
        if budget > cap * total:
            raise UsageError(
                f"the target reads {budget:,} tokens, {budget / total:.1f} epochs of the {total:,} "
                f"in the store; mixture.max_epochs is {cap:g}",
                remedy="curate more text, raise mixture.max_epochs or lower the budget",
            )
        limits = count_limits(tokens, lattice, budget_tokens=budget, cap_epochs=cap)
        readable = readable_tokens(recipe, tokens)
        return proportional_counts(readable, lattice, limits=limits, at_least_one=True)
    if unknown := sorted(set(weights) - set(tokens)):
        raise UsageError(
            f"mixture weights name {unknown[0]!r}, which is not a cell of the store",
            remedy=f"use {', '.join(tokens)}",
        )
    return round_to_lattice({name: weights.get(name, 0.0) for name in tokens}, lattice)


def target_phases(recipe: Recipe) -> list[tuple[str, int, int]]:
    """(name, first update, tokens) of the phases of the target as planned.

    The tokens of all phases are those that the mixture refers to, split as the run splits its own.
    """
    target = plan_width(recipe, recipe.model.width)
    course = plan_course(recipe, target, extend=True)
    starts = [(phase.name, phase.start_step, {}) for phase in course.phases]
    phases = budget_phases(starts, steps=target.steps, tokens_per_step=target.tokens_per_step)
    reference = reference_tokens(recipe)
    return [
        (phase.name, phase.start_step, phase.budget_tokens * reference // target.tokens)
        for phase in phases
    ]


def target_mixture(
    corpus: "Corpus", counts: Mapping[str, Mapping[str, int]], lattice: int, **fields: Any
) -> Mixture:
    """A mixture of the target from counts by phase; `fields` are further fields of Mixture."""
    from portolan.data.mixture import Phase

    recipe = corpus.project.recipe
    target = plan_width(recipe, recipe.model.width)
    mixture = Mixture(
        cells=dict(corpus.store.tokens_by_cell),
        tokenizer_digest=corpus.tokenizer_digest,
        store_digest=corpus.store_digest,
        phases=tuple(
            Phase(name, start, budget, dict(counts[name]))
            for name, start, budget in target_phases(recipe)
        ),
        sequence_length=target.config.sequence_length,
        block_sequences=target.mixture_block,
        lattice=lattice,
        **fields,
    )
    check_target(corpus, mixture)
    return mixture


def check_target(corpus: "Corpus", mixture: Mixture) -> None:
    """Refuse a mixture that is not one for the target of this project (data.md 11).

    Raises:
        MixtureError: names everything that differs.
    """
    recipe = corpus.project.recipe
    target = plan_width(recipe, recipe.model.width)
    check_mixture(
        mixture,
        tokenizer_digest=corpus.tokenizer_digest,
        store_digest=corpus.store_digest,
        store_tokens=corpus.store.tokens_by_cell,
        sequence_length=target.config.sequence_length,
        phases=target_phases(recipe),
        cap_epochs=recipe.mixture.max_epochs,
    )


def named_mixture(corpus: "Corpus") -> Mixture | None:
    """The checked mixture file that the recipe names, if it names one."""
    name = corpus.project.recipe.mixture.file
    if not name:
        return None
    mixture = load_mixture(corpus.project.root / name)
    check_target(corpus, mixture)
    return mixture


def build_mixture(corpus: "Corpus", rung: Rung, course: Course) -> Mixture:
    """Counts per cell of every phase of a run. The counts of a mixture file are taken as they are;
    otherwise the lattice is the one that all runs share.
    """
    recipe = corpus.project.recipe
    tokens = corpus.store.tokens_by_cell
    named = named_mixture(corpus)
    lattice = named.lattice if named else shared_lattice(recipe)
    provenance = {"file": recipe.mixture.file, "digest": named.digest} if named else {}
    mixture = Mixture(
        name=named.name if named else recipe.name,
        cells=dict(tokens),
        tokenizer_digest=corpus.tokenizer_digest,
        store_digest=corpus.store_digest,
        phases=budget_phases(
            [
                (phase.name, phase.start_step, phase_counts(recipe, phase.weights, tokens, lattice))
                for phase in course.phases
            ],
            steps=course.num_updates,
            tokens_per_step=course.tokens_per_step,
        ),
        sequence_length=rung.config.sequence_length,
        block_sequences=course.block_sequences,
        lattice=lattice,
        cap_epochs=recipe.mixture.max_epochs,
        dropped_cells=named.dropped_cells if named else (),
        provenance=provenance,
    )
    require_consistent(mixture)
    return mixture


def save_mixture(mixture: Mixture, path: Path, completed_steps: int) -> None:
    """Write the mixture of a run, unless that would alter what its completed updates read.

    Raises:
        MixtureError: a phase that has begun differs from the file's.
    """
    if completed_steps and path.is_file():
        check_continuation(load_mixture(path), mixture, completed_steps=completed_steps)
    mixture.save(path)


def simulated_epochs(rung: Rung, reference: int) -> tuple[int, int] | None:
    """(tokens of a small run, tokens of the run whose epochs it repeats); None for a large one."""
    if rung.flops_with_head > SIMULATION_MAX_FLOPS:
        return None
    return rung.tokens, max(reference, rung.tokens)


def epoch_prefixes(mixture: Mixture, simulated: tuple[int, int] | None) -> dict[str, int] | None:
    """Sequences of each cell that a run with simulated epochs may read; None: all of them."""
    if simulated is None:
        return None
    length = mixture.sequence_length
    return simulated_prefixes(
        {name: tokens // length for name, tokens in mixture.cells.items()},
        experiment_tokens=simulated[0],
        target_tokens=simulated[1],
        weighted=[n for n in mixture.cells if any(p.counts[n] for p in mixture.phases)],
    )


def describe_epochs(mixture: Mixture) -> str:
    """`epochs per cell 0.41 to 1.20, most of web (cap 8); not read: a, b`."""
    epochs = mixture.epochs()
    read = {name: value for name, value in epochs.items() if value}
    most = max(sort_names(read), key=read.__getitem__)
    text = (
        f"epochs per cell {min(read.values()):.2f} to {read[most]:.2f}, most of {most} "
        f"(cap {mixture.cap_epochs:g})"
    )
    unread = sort_names(set(epochs) - set(read))
    return f"{text}; not read: {', '.join(unread)}" if unread else text
