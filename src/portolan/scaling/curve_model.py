"""F2's model of whole evaluation curves: one shape for all rungs, one law for their ends.

For run r with final level Lstar_r, at the share f of its planned steps, u = f U_r steps done:

    ln(Lstar_r - E) = m + s z_r + rho_r
    mu_r(f) = E_s + (Lstar_r - E_s) exp(psi(f) + (t (x_r - xbar) + q_r) (1 - f) + b exp(-u / u0))

z_r is the distance from the target in the law's coordinate, psi falls to psi(1) = 0, q_r is a small
deviation of each run from the shared shape, and the last term is a transient that lasts a number
of *steps*: runs of other lengths do not share it. Under `offset` t = 0 and E_s is free in [0, E];
under `tilt` E_s = E and t is free. The target is a run like the others, with two discrepancies
that no rung can teach: of its level and of its shape.

All parameters are standard normal a priori, so that a fit is a least-squares problem.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from portolan.scaling.ladder import NUM_MARKS

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Shape = Literal["offset", "tilt"]
SHAPES: tuple[Shape, ...] = ("offset", "tilt")

LEVEL_SD = 3.0
"""Of m around a first guess: flat for every purpose."""
FIRST_DROP = (np.log(0.015), 1.5)
"""Median and log sd of the last drop of psi, from 95 to 100 %."""
DROP_STEP_SD = 0.3
EARLY_DROP_STEP_SD = 0.9
EARLY_MARKS = 4
"""Log drops of neighbouring marks differ by these; the early part of a run is steeper."""
OFFSET_LOGIT_SD = 1.5
TILT_SD = 0.02
TRANSIENT = (np.log(0.05), 1.0)
"""Median and log sd of b."""
OWN_SHAPE_SD = 0.005
"""Of q: completing each public rung from the others misses by up to 0.005 at its middle."""
TRANSIENT_STEPS_LOG_SD = 0.7
CORRELATION = 0.3
"""Of neighbouring evaluations of one run: the middle of the range 0 to 0.6."""
NUM_DROPS = NUM_MARKS - 1
MAX_EXPONENT = 20.0
"""A trial step of the optimiser may go far astray: exponents are cut off there."""


@dataclass(frozen=True)
class CurveData:
    """Evaluations of all runs, row by row; the last run is the target, with or without rows.

    Arrays over rows: `run`, `fraction`, `loss`. Arrays over runs: `steps`, `log_flops`.
    """

    run: Indices
    fraction: Array
    loss: Array
    steps: Array
    log_flops: Array

    @property
    def num_runs(self) -> int:
        """Rungs and the target."""
        return len(self.steps)


@dataclass(frozen=True)
class LawPrior:
    """Law across runs for one asymptote.

    Args:
        asymptote: E.
        distance: z of every run, 0 for the target.
        slope: mean and sd of s.
        level: first guess of m.
        root: Cholesky factor of the covariance of rho over all runs.
        level_discrepancy: sd in nats of the target's level beyond the law.
        shape_discrepancy: sd in nats, at the start, of the target's curve beyond the shared shape.
        extra: further columns [run, term] of the law, such as the ratio, with sd folded in.
    """

    asymptote: float
    distance: Array
    slope: tuple[float, float]
    level: float
    root: Array
    level_discrepancy: float
    shape_discrepancy: float
    extra: Array


class CurveModel:
    """Residuals, their derivative, and trajectories of the target, for one shape and law."""

    def __init__(
        self, data: CurveData, law: LawPrior, shape: Shape, noise: float, transient_steps: float
    ) -> None:
        self.data, self.law, self.shape = data, law, shape
        self.log_transient_steps = float(np.log(transient_steps))
        num_runs, num_extra = data.num_runs, law.extra.shape[1]
        sizes = [2 + num_extra, num_runs, NUM_DROPS, 1, 2, num_runs, 2]
        ends = np.cumsum(sizes)
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        _, self.rho_part, self.drop_part, self.form_part, self.transient_part = parts[:5]
        self.own_part, self.discrepancy_part = parts[5:]
        self.num_parameters = int(ends[-1])
        slope_mean, slope_sd = law.slope
        self._level_mean = law.level + slope_mean * law.distance
        self._level_map = np.concatenate(
            [
                np.full((num_runs, 1), LEVEL_SD),
                (slope_sd * law.distance)[:, None],
                law.extra,
                law.root,
            ],
            axis=1,
        )
        self._drop_mean, self._drop_map = _drop_prior()
        self._rows = _Rows(data.run, data.fraction, data.steps, data.log_flops)
        self._whiten = _whitener(data) / noise
        self._latest: tuple[Array, tuple[Array, Array]] | None = None

    def _unpack(self, z: Array) -> tuple[Array, Array, Array, Array, Array]:
        """ln(Lstar - E) of each run, drops, form, (b, u0), discrepancies; z is [..., parameter]."""
        levels = self._level_mean + z[..., : self.rho_part.stop] @ self._level_map.T
        drops = _exp(self._drop_mean + z[..., self.drop_part] @ self._drop_map.T)
        form = z[..., self.form_part.start]
        log_size, log_sd = TRANSIENT
        size = _exp(log_size + log_sd * z[..., self.transient_part.start])
        steps = _exp(
            self.log_transient_steps
            + TRANSIENT_STEPS_LOG_SD * z[..., self.transient_part.start + 1]
        )
        discrepancy = z[..., self.discrepancy_part] * np.array(
            [self.law.level_discrepancy, self.law.shape_discrepancy]
        )
        return levels, drops, form, np.stack([size, steps], axis=-1), discrepancy

    def _form(self, form: Array) -> tuple[Array, Array]:
        """E_s and t."""
        if self.shape == "tilt":
            return np.full_like(form, self.law.asymptote), TILT_SD * form
        return self.law.asymptote / (1 + _exp(-OFFSET_LOGIT_SD * form)), 0.0 * form

    def predict(self, z: Array) -> tuple[Array, Array]:
        """Losses at the rows and their derivative [row, parameter]."""
        # The optimiser asks for value and derivative at the same point, one after the other.
        if self._latest is None or not np.array_equal(self._latest[0], z):
            self._latest = z.copy(), self._predict(z)
        return self._latest[1]

    def _predict(self, z: Array) -> tuple[Array, Array]:
        rows, target = self._rows, self.data.num_runs - 1
        levels, drops, form, transient, discrepancy = self._unpack(z)
        offset, tilt = self._form(form)
        size, steps = transient
        at_target = rows.run == target
        excess = _exp(levels[rows.run])
        height = self.law.asymptote + excess - offset + at_target * discrepancy[0]
        decay = size * np.exp(-rows.steps_done / steps)
        own = OWN_SHAPE_SD * z[self.own_part][rows.run] * (1 - rows.fraction)
        growth = _exp(rows.drop_map @ drops + tilt * rows.tilt + own + decay)
        shape_gap = at_target * (1 - rows.fraction)
        loss = offset + height * growth + shape_gap * discrepancy[1]
        derivative = np.empty((len(loss), self.num_parameters))
        derivative[:, : self.rho_part.stop] = (excess * growth)[:, None] * self._level_map[rows.run]
        scaled = (height * growth)[:, None]
        derivative[:, self.drop_part] = scaled * (rows.drop_map * drops) @ self._drop_map
        derivative[:, self.form_part] = self._form_derivative(offset, growth, scaled[:, 0])
        derivative[:, self.transient_part.start] = scaled[:, 0] * decay * TRANSIENT[1]
        derivative[:, self.transient_part.start + 1] = (
            scaled[:, 0] * decay * rows.steps_done / steps * TRANSIENT_STEPS_LOG_SD
        )
        derivative[:, self.own_part] = (scaled[:, 0] * (1 - rows.fraction) * OWN_SHAPE_SD)[
            :, None
        ] * (rows.run[:, None] == np.arange(self.data.num_runs))
        derivative[:, self.discrepancy_part.start] = at_target * growth * self.law.level_discrepancy
        derivative[:, self.discrepancy_part.start + 1] = shape_gap * self.law.shape_discrepancy
        return loss, derivative

    def _form_derivative(self, offset: Array, growth: Array, scaled: Array) -> Array:
        if self.shape == "tilt":
            return (scaled * self._rows.tilt * TILT_SD)[:, None]
        share = offset / self.law.asymptote if self.law.asymptote > 0 else 0.0
        slope = OFFSET_LOGIT_SD * offset * (1 - share)
        return ((1 - growth) * slope)[:, None]

    def residuals(self, z: Array) -> Array:
        """Whitened residuals of the rows, then z itself: the prior."""
        loss, _ = self.predict(z)
        return np.concatenate([self._whiten @ (self.data.loss - loss), z])

    def jacobian(self, z: Array) -> Array:
        """Derivative of `residuals`."""
        _, derivative = self.predict(z)
        return np.concatenate([-self._whiten @ derivative, np.eye(self.num_parameters)])

    def trajectories(self, z: Array, run: int, fractions: Array) -> Array:
        """Losses [draw, fraction] of one run, for draws z [draw, parameter]."""
        data = self.data
        rows = _Rows(np.full(len(fractions), run), fractions, data.steps, data.log_flops)
        levels, drops, form, transient, discrepancy = self._unpack(z)
        offset, tilt = (part[:, None] for part in self._form(form))
        decay = transient[:, :1] * np.exp(-rows.steps_done / transient[:, 1:])
        own = OWN_SHAPE_SD * z[:, self.own_part.start + run, None] * (1 - fractions)
        growth = _exp(drops @ rows.drop_map.T + tilt * rows.tilt + own + decay)
        is_target = float(run == data.num_runs - 1)
        height = self.law.asymptote + _exp(levels[:, run])[:, None] - offset
        height = height + is_target * discrepancy[:, :1]
        return offset + height * growth + is_target * (1 - fractions) * discrepancy[:, 1:]

    def slope(self, z: Array) -> Array:
        """s of draws z [..., parameter]."""
        mean, sd = self.law.slope
        return mean + sd * z[..., 1]

    def form(self, z: Array) -> Array:
        """E_s under `offset`, t under `tilt`."""
        offset, tilt = self._form(z[..., self.form_part.start])
        return np.asarray(offset if self.shape == "offset" else tilt)


def _exp(exponent: Array) -> Array:
    return np.exp(np.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT))


class _Rows:
    """What the rows have in common for any parameters."""

    def __init__(self, run: Indices, fraction: Array, steps: Array, log_flops: Array) -> None:
        self.run, self.fraction = run, fraction
        self.steps_done = fraction * steps[run]
        self.tilt = (1 - fraction) * (log_flops[run] - log_flops[:-1].mean())
        # psi(f_k) is the sum of the drops after mark k; between marks it is linear in f.
        position = np.clip(fraction * NUM_MARKS, 1, NUM_MARKS) - 1
        self.drop_map = np.clip(np.arange(1, NUM_MARKS) - position[:, None], 0.0, 1.0)


def _drop_prior() -> tuple[Array, Array]:
    """Mean and map from standard normals of the log drops at marks 2..20.

    A random walk from the end of the run to its start.
    """
    step_sds = np.full(NUM_DROPS, DROP_STEP_SD)
    step_sds[:EARLY_MARKS] = EARLY_DROP_STEP_SD
    step_sds[-1] = FIRST_DROP[1]
    return np.full(NUM_DROPS, FIRST_DROP[0]), np.triu(np.ones((NUM_DROPS, NUM_DROPS))) * step_sds


def _whitener(data: CurveData) -> Array:
    """Matrix that turns errors with correlation between neighbours of one run into white ones."""
    size = len(data.loss)
    matrix = np.eye(size)
    follows = np.flatnonzero(np.diff(data.run) == 0) + 1
    scale = 1 / np.sqrt(1 - CORRELATION**2)
    matrix[follows, follows] = scale
    matrix[follows, follows - 1] = -CORRELATION * scale
    return matrix
