"""The curve model's derivative, noise and shape against direct evaluations."""

import numpy as np
import pytest

from portolan.scaling import curve_fit, curve_model
from portolan.scaling.curve_model import SHAPES, CurveData, CurveModel, LawPrior

STEPS = np.array([1000.0, 1400.0, 2000.0, 40_000.0])
FLOPS = np.array([1e18, 8e18, 6e19, 1e22])


def make_model(shape, live=True):
    rows = [(run, k / 20, 3.0) for run in range(3) for k in range(1, 21 if run < 2 else 13)]
    rows += [(3, 0.08, 3.0), (3, 0.1, 3.0)] if live else []
    run, fraction, loss = (np.array(column) for column in zip(*rows, strict=True))
    data = CurveData(run, fraction, loss, STEPS, np.log(FLOPS))
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(0.003**2 * (np.eye(4) + 0.5))
    law = LawPrior(
        1.4, np.log(FLOPS[-1] / FLOPS), (0.09, 0.015), -0.5, root, 0.01, 0.03,
        0.05 * rng.standard_normal((4, 1)),
    )  # fmt: skip
    return CurveModel(data, law, shape, 0.004, 200.0)


def point(model):
    return 0.5 * np.random.default_rng(1).standard_normal(model.num_parameters)


@pytest.mark.parametrize("shape", SHAPES)
def test_derivative(shape):
    model = make_model(shape)
    z, step = point(model), 1e-6
    exact = model.jacobian(z)
    for column in range(model.num_parameters):
        shift = np.zeros_like(z)
        shift[column] = step
        numeric = (model.residuals(z + shift) - model.residuals(z - shift)) / (2 * step)
        np.testing.assert_allclose(exact[:, column], numeric, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_agree_with_trajectories_and_with_the_formula(shape):
    model = make_model(shape)
    z = point(model)
    loss, _ = model.predict(z)
    for run in range(4):
        chosen = model.data.run == run
        curve = model.trajectories(z[None], run, model.data.fraction[chosen])[0]
        np.testing.assert_allclose(loss[chosen], curve, rtol=1e-12)
    levels, drops, form, (size, steps), discrepancy = model._unpack(z)
    offset, tilt = (1.4 / (1 + np.exp(-1.5 * form)), 0) if shape == "offset" else (1.4, 0.02 * form)
    gap = np.log(FLOPS[1]) - np.log(FLOPS[:3]).mean()
    own = curve_model.OWN_SHAPE_SD * z[model.own_part.start + 1]
    growth = drops[9:].sum() + (tilt * gap + own) * 0.5 + size * np.exp(-700 / steps)
    expected = offset + (1.4 + np.exp(levels[1]) - offset) * np.exp(growth)
    assert model.trajectories(z[None], 1, np.array([0.5]))[0, 0] == pytest.approx(expected)
    ends = model.trajectories(z[None], 3, np.array([1.0]))[0, 0]
    decay = size * np.exp(-40_000 / steps)
    height = 1.4 + np.exp(levels[3]) - offset + discrepancy[0]
    assert ends == pytest.approx(offset + height * np.exp(decay))


def test_shape_falls_to_zero_and_is_linear_between_marks():
    model = make_model("offset")
    _, drops, *_ = model._unpack(point(model))
    fractions = np.array([0.05, 0.5, 0.525, 0.55, 1.0])
    rows = curve_model._Rows(np.zeros(5, int), fractions, STEPS, np.log(FLOPS))
    psi = rows.drop_map @ drops
    assert psi[0] == pytest.approx(drops.sum())
    assert psi[2] == pytest.approx(0.5 * (psi[1] + psi[3]))
    assert psi[-1] == 0
    assert np.all(np.diff(psi) < 0)


def test_whitening_inverts_the_covariance_of_a_run():
    model = make_model("offset", live=False)
    matrix = curve_model._whitener(model.data)
    runs = model.data.run
    lag = np.abs(np.arange(len(runs))[:, None] - np.arange(len(runs)))
    covariance = np.where(runs[:, None] == runs, curve_model.CORRELATION**lag, 0.0)
    np.testing.assert_allclose(matrix @ covariance @ matrix.T, np.eye(len(runs)), atol=1e-12)


def test_weighted_quantiles_are_those_of_repeated_values():
    rng = np.random.default_rng(0)
    values, counts = rng.standard_normal((50, 2)), rng.integers(1, 40, 50)
    found = curve_fit.weighted_quantiles(values, counts / counts.sum(), (0.1, 0.5, 0.9))
    repeated = np.repeat(values, counts, axis=0)
    expected = np.quantile(repeated, (0.1, 0.5, 0.9), axis=0).T
    np.testing.assert_allclose(found, expected, atol=0.15)
