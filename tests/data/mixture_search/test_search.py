"""The surrogate search on synthetic truths, and the parts that it is made of."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process.kernels import Matern

from portolan.data.mixture import MixtureError
from portolan.data.mixture_search.alternatives import divergence, fit_exposure, fit_log_linear
from portolan.data.mixture_search.objective import fit_objective
from portolan.data.mixture_search.process import MixtureKernel, Swarm, fit_process
from portolan.data.mixture_search.search import (
    LATER_APART,
    LATER_VARIATION,
    compare,
    draw_candidates,
    rank_correlation,
    search,
    search_later,
    spread_designs,
    total_variation,
)
from portolan.data.mixture_search.space import Cells, SearchSpace, fit_content

NUM_CELLS, LATTICE, CAP = 12, 256, 4.0


def make_space(phases=1, seed=0, cap=CAP):
    """Twelve cells whose content is a point of the plane; the budget reads all 1.2 times."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(10**6, 10**8, NUM_CELLS)
    means = rng.normal(size=(NUM_CELLS, 5))
    budget = 1.2 * tokens.sum()
    budgets = np.array([budget] if phases == 1 else [0.8 * budget, 0.2 * budget]).astype(np.int64)
    content = fit_content(means, 2)(means, np.arange(NUM_CELLS) % 5)
    names = tuple(f"c{i // 5:02d}q{i % 5}" for i in range(NUM_CELLS))
    cells = Cells(names, tokens, content, budgets)
    return SearchSpace(cells, LATTICE, cap, np.ones(NUM_CELLS, bool))


def make_truth(space):
    """Objective without noise: usefulness of content, saturating in epochs; lower is better."""
    useful = np.exp(1.2 * space.cells.contents[:, 0] + 0.5 * space.cells.contents[:, 2])

    def truth(weights):
        epochs = space.cells.epochs(weights).sum(axis=1)
        return -10 * (space.cells.shares * useful * (1 - np.exp(-0.7 * epochs))).sum(axis=-1)

    return truth


def observe(space, truth, counts, rng, noise=0.02):
    return truth(space.weights(counts)) + noise * rng.normal(size=len(counts))


@pytest.mark.parametrize(("phases", "seed"), [(1, 0), (1, 1), (2, 2)])
def test_search_beats_proportional_within_twenty_evaluations(phases, seed):
    space = make_space(phases, seed)
    truth, rng = make_truth(space), np.random.default_rng(seed)
    proportional = space.proportional[None]
    counts = np.concatenate([proportional, proportional, spread_designs(space, 12, seed)])
    values = observe(space, truth, counts, rng)
    while len(counts) < 20:
        process = fit_process([Swarm("s", space.cells, space.weights(counts), values)], seed=seed)
        found = search(space, process, counts, seed=len(counts), num=2_048)
        assert space.max_epochs(found[None])[0] <= CAP + 1e-8
        assert (found.sum(axis=-1) == LATTICE).all() and found.min() >= 0
        counts = np.concatenate([counts, found[None]])
        values = np.concatenate([values, observe(space, truth, found[None], rng)])
    again = fit_process(
        [Swarm("s", space.cells, space.weights(counts[:-1]), values[:-1])], seed=seed
    )
    assert (search(space, again, counts[:-1], seed=19, num=2_048) == found).all()
    gain = truth(space.weights(proportional))[0] - truth(space.weights(found[None]))[0]
    pool = np.concatenate(list(draw_candidates(space, counts[:0], 8_192, 9)))
    possible = truth(space.weights(proportional))[0] - truth(space.weights(pool)).min()
    assert gain > 0.6 * possible > 0.1
    assert rank_correlation(process.leave_one_out(), -values[:-1]) > 0.6


def test_other_models_and_noisy_improvement_beat_proportional_too():
    space = make_space(2, 3)
    truth, rng = make_truth(space), np.random.default_rng(3)
    counts = np.concatenate([space.proportional[None], spread_designs(space, 27, 0)])
    weights = space.weights(counts)
    values = observe(space, truth, counts, rng)
    bpb = [{"all": 2 + value / 100} for value in values]
    process = fit_process([Swarm("s", space.cells, weights, values)])
    draws = process.noiseless_draws(64, 0)
    objective = fit_objective([{"all": 2.0}, {"all": 2.02}])
    scores = {
        "noisy-ei": lambda w: -draws.expected_improvement(w),
        "exposure": fit_exposure(space.cells, weights, values),
        "log-linear": fit_log_linear(weights, bpb, objective),
    }
    for name, score in scores.items():
        found = search(space, score, counts, seed=1, num=2_048)[None]
        assert space.max_epochs(found)[0] <= CAP + 1e-8
        assert truth(space.weights(found))[0] < truth(weights[:1])[0] - 0.3, name
    assert rank_correlation(scores["exposure"](weights), values) > 0.8
    assert rank_correlation(scores["log-linear"](weights), values) > 0.7


def test_evidence_of_another_store_helps():
    """Runs over other cells tell what content is useful, through content vectors alone."""
    old, new = make_space(1, 5), make_space(1, 6)
    truth = make_truth(new)
    far = spread_designs(old, 24, 0)
    near = np.concatenate([new.proportional[None], spread_designs(new, 3, 0)])
    swarms = [
        Swarm("new", new.cells, new.weights(near), truth(new.weights(near))),
        Swarm("old", old.cells, old.weights(far), make_truth(old)(old.weights(far))),
    ]
    test = spread_designs(new, 40, 7)
    measured = truth(new.weights(test))
    alone = rank_correlation(fit_process(swarms[:1])(new.weights(test)), measured)
    joined = rank_correlation(fit_process(swarms)(new.weights(test)), measured)
    assert joined > max(alone + 0.2, 0.7)


def test_later_phases_stay_near_and_apart_and_leave_the_earlier_one():
    space = make_space(2, 1)
    truth, current = make_truth(space), space.proportional
    found = search_later(space, truth, current, phase=1, seed=0, num=8_192)
    weights, base = space.weights(found), space.weights(current)
    assert 2 <= len(found) <= 10
    assert (found[:, 0] == current[0]).all()
    assert total_variation(weights, base).max() <= LATER_VARIATION
    for first, second in itertools.combinations(weights, 2):
        assert total_variation(first[None], second)[0] >= LATER_APART
    scores = truth(weights)
    assert (np.diff(scores) >= 0).all() and scores[0] < truth(base[None])[0]
    assert (space.max_epochs(found) <= CAP + 1e-8).all()
    again = search_later(space, truth, current, phase=1, seed=0, num=8_192)
    assert (again == found).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(1, 2), st.floats(2, 8))
def test_every_candidate_is_on_the_lattice_under_the_cap_and_readable(seed, phases, cap):
    space = make_space(phases, seed, cap)
    readable = np.arange(NUM_CELLS) != seed % NUM_CELLS
    space = SearchSpace(space.cells, LATTICE, cap, readable)
    for counts in draw_candidates(space, space.proportional[None], 64, seed, piece=32):
        assert (counts.sum(axis=-1) == LATTICE).all() and (counts >= 0).all()
        assert (counts[..., ~readable] == 0).all()
        assert (space.max_epochs(counts) <= cap * (1 + 1e-9)).all()


def test_a_budget_that_no_mixture_can_hold_is_refused():
    with pytest.raises(MixtureError, match=r"1\.1 epochs of the readable cells"):
        make_space(cap=1.1).proportional  # noqa: B018


def test_designs_are_far_apart_and_a_longer_list_begins_alike():
    space = make_space()
    few, many = spread_designs(space, 4, 0), spread_designs(space, 9, 0)
    assert (many[:4] == few).all()
    weights = space.weights(many)
    pairs = [total_variation(a[None], b)[0] for a, b in itertools.combinations(weights, 2)]
    assert min(pairs) > 0.2


def test_objective_counts_gains_of_guards_only_up_to_epsilon():
    baselines = [{"a": 1.0, "b": 2.0, "c": 5.0}, {"a": 1.2, "b": 2.2, "c": 5.0}]
    objective = fit_objective(baselines, targets=["a"], guards=["b"])
    deviation = np.std([1.0, 1.2], ddof=1)
    assert objective({"a": 0.9, "b": 1.0}) == pytest.approx(-0.2 / deviation)
    assert objective({"a": 0.9, "b": 2.4}) == pytest.approx(0.1 / deviation)
    lenient = fit_objective(baselines, targets=["a"], guards=["b"], epsilon=0.5)
    assert lenient({"a": 1.1, "b": 1.0}) == pytest.approx(-0.5)
    with pytest.raises(MixtureError, match="do not show the noise"):
        fit_objective(baselines[:1])
    with pytest.raises(MixtureError, match="agree on c"):
        fit_objective(baselines)
    with pytest.raises(MixtureError, match="no metric 'z'"):
        fit_objective(baselines, targets=["z"])


def test_kernel_is_matern_and_its_gradient_is_right():
    rng = np.random.default_rng(0)
    rows = np.concatenate([np.array([[0.0]] * 3 + [[1.0]] * 2), rng.normal(size=(5, 6))], axis=1)
    single = MixtureKernel([0.8], [0.3], 1.7, 0.2)
    matern = Matern(1.7, nu=2.5)(rows[:, 1:])
    same = rows[:, :1] == rows[:, 0]
    assert np.allclose(single(rows), (0.64 + 0.3) * matern + 0.2 * same * matern)
    kernel = MixtureKernel(np.array([0.8, 0.5]), np.array([0.3, 0.6]), 1.7, 0.2)
    assert np.allclose(np.diag(kernel(rows)), kernel.diag(rows))
    _, gradient = kernel(rows, eval_gradient=True)
    for index, step in enumerate(1e-6 * np.eye(len(kernel.theta))):
        high, low = (kernel.clone_with_theta(kernel.theta + sign * step)(rows) for sign in (1, -1))
        assert np.allclose(gradient[..., index], (high - low) / 2e-6, atol=1e-7)


def test_leave_one_out_equals_refitting_without_the_run():
    space = make_space(1, 4)
    counts = np.concatenate([space.proportional[None], spread_designs(space, 9, 0)])
    values = make_truth(space)(space.weights(counts))
    process = fit_process([Swarm("s", space.cells, space.weights(counts), values)])
    kernel, kept = process.regressor.kernel_, np.arange(10) != 3
    covariance = kernel(process.inputs) + 1e-8 * np.eye(10)
    residual = process.utilities - process.basis @ process.coefficients
    guess = covariance[3, kept] @ np.linalg.solve(covariance[np.ix_(kept, kept)], residual[kept])
    expected = process.basis[3] @ process.coefficients + guess
    assert process.leave_one_out()[3] == pytest.approx(expected)
    assert (process.coefficients[1:] >= 0).all()


def test_content_vectors_are_principal_components_and_quality():
    rng = np.random.default_rng(0)
    means = rng.normal(size=(9, 20))
    content = fit_content(means, 3)(means, np.arange(9) % 5)
    centred = means - means.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    scale = np.sqrt((centred**2).sum(axis=1).mean())
    assert np.allclose(np.abs(content[:, :3]), np.abs(left[:, :3] * values[:3] / scale))
    assert content[:, 3].tolist() == [0, 0.25, 0.5, 0.75, 1, 0, 0.25, 0.5, 0.75]


def test_divergence_from_proportional():
    cells = make_space().cells
    assert np.allclose(divergence(cells, cells.shares[None, None]), 0)
    one = np.eye(NUM_CELLS)[:1, None]
    assert divergence(cells, one)[0, 0] == pytest.approx(-np.log(cells.shares[0]))


def test_a_win_on_one_seed_is_only_a_candidate():
    old = {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.0}
    assert not compare(old, {0: -5.0}).accepted
    assert not compare(old, {0: -5.0, 1: -5.1}).accepted
    better = compare(old, {0: 0.5, 1: 0.55, 2: 0.45})
    assert better.accepted and better.difference == pytest.approx(-0.5)
    assert not compare(old, {0: 0.5, 1: 1.7, 2: 0.4}).accepted


def test_too_few_or_equal_runs_are_refused():
    space = make_space()
    weights = space.weights(spread_designs(space, 5, 0))
    with pytest.raises(MixtureError, match="at least 4 runs"):
        fit_process([Swarm("s", space.cells, weights[:3], np.arange(3.0))])
    with pytest.raises(MixtureError, match="one value"):
        fit_process([Swarm("s", space.cells, weights, np.ones(5))])
