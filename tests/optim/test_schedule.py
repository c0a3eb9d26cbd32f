"""Rates against the published rungs of the public run (marin #7856, #8435)."""

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.optim.schedule import (
    HorizonEvent,
    PeakRates,
    Schedule,
    ScheduleError,
    count_warmup_steps,
    peak_rates,
    scale_rates,
)

HERO = 390_251

LADDER = """
384 128 12162 0.0142734 0.00329386 0.996006 1.0671e-15 121
512 256 15721 0.0131581 0.00303649 0.992028 1.2132e-15 157
512 1024 3930 0.0263169 0.00607312 0.968491 6.0659e-16 39
768 512 22840 0.0111857 0.00258132 0.984119 1.4623e-15 228
768 1024 11420 0.0158190 0.00365054 0.968491 1.0340e-15 114
1024 2048 15276 0.0144112 0.00332567 0.95 1.1959e-15 152
1280 1024 54937 0.0077015 0.00177727 0.968491 2.2679e-15 549
1536 6144 15128 0.0148894 0.00343602 0.95 1.1901e-15 151
2048 11264 20072 0.0134217 0.00309731 0.95 1.3709e-15 200
6144 11264 390251 0.0032905 0.00075934 0.95 6.0446e-15 3902
"""
SMALL = """
32 128 16 165 0.05 0.014640 0.9999 0.939394 1.243e-16
32 128 128 816 0.05 0.011594 0.99987 0.987745 2.764e-16
64 256 16 330 0.04372 0.010090 0.9999 0.969697 1.758e-16
64 256 128 1631 0.03463 0.007993 0.99975 0.993869 3.908e-16
128 512 16 780 0.02844 0.006563 0.9999 0.987179 2.702e-16
128 512 128 3856 0.02253 0.005199 0.9995 0.997407 6.008e-16
256 1024 32 2040 0.01987 0.004586 0.99975 0.995098 4.370e-16
256 1024 256 10085 0.01574 0.003633 0.998 same 9.717e-16
384 1024 64 2295 0.01846 0.004260 0.9995 0.995643 4.635e-16
384 1024 512 11346 0.01462 0.003374 0.99601 same 1.031e-15
"""
MICRO = """
32 16 380 0.0475 0.9737
48 32 398 0.0452 0.9749
64 32 680 0.0340 0.9853
96 64 735 0.0321 0.9864
192 128 1470 0.0221 0.9932
"""


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


def assert_printed(value: float, printed: str) -> None:
    """Equal to all printed digits, within one unit of the last."""
    mantissa, _, exponent = printed.partition("e")
    digits = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - digits)
    assert abs(value - float(printed)) <= 0.51 * unit, (value, printed)


@pytest.mark.parametrize("row", rows(LADDER), ids=lambda row: f"d{row[0]}-{row[1]}")
def test_law_on_the_public_ladder(row: list[str]) -> None:
    width, batch, horizon = map(int, row[:3])
    peak = peak_rates(horizon * batch * 4096, width, batch * 4096)
    for value, printed in zip(
        (peak.hyperball, peak.adam, peak.beta2, peak.epsilon), row[3:7], strict=True
    ):
        assert_printed(value, printed)
    assert Schedule(horizon).warmup == int(row[7])
    assert peak.beta1 == 0.90
    assert not peak.capped
    assert peak.extrapolated == (width < 512)
    guarded = peak_rates(horizon * batch * 4096, width, batch * 4096, beta2_guard=True)
    assert guarded == peak


@pytest.mark.parametrize("row", rows(SMALL), ids=lambda row: f"p{row[0]}-{row[2]}")
def test_law_at_small_width(row: list[str]) -> None:
    width, length, batch, horizon = map(int, row[:4])
    peak = peak_rates(horizon * batch * length, width, batch * length)
    guarded = peak_rates(horizon * batch * length, width, batch * length, beta2_guard=True)
    printed = (row[4], row[5], row[6], row[8])
    for value, text in zip(
        (peak.hyperball, peak.adam, peak.beta2, peak.epsilon), printed, strict=True
    ):
        assert_printed(value, text)
    assert peak.capped == (row[4] == "0.05")
    assert peak.extrapolated
    assert not peak.beta2_guarded
    if row[7] == "same":
        assert guarded.beta2 == peak.beta2
    else:
        # The reference table cuts after six digits (1 - 10/780 = 0.98717949), hence one unit.
        assert guarded.beta2 == pytest.approx(float(row[7]), abs=1e-6)
        assert guarded.beta2_guarded


@pytest.mark.parametrize("row", rows(MICRO), ids=lambda row: f"d{row[0]}")
def test_law_of_the_micro_ladder(row: list[str]) -> None:
    width, batch, horizon = map(int, row[:3])
    peak = peak_rates(horizon * batch * 128, width, batch * 128)
    assert_printed(peak.hyperball, row[3])
    guarded = peak_rates(horizon * batch * 128, width, batch * 128, beta2_guard=True)
    assert_printed(guarded.beta2, row[4])


def test_both_caps_and_both_beta2_clips() -> None:
    tiny = peak_rates(4096, 16, 4096)
    assert tiny.adam == tiny.hyperball == 0.05
    assert tiny.capped
    assert peak_rates(10**10, 512, 128).beta2 == 0.9999
    assert peak_rates(10**13, 512, 10**8).beta2 == 0.95
    assert peak_rates(5 * 4096, 16, 4096, beta2_guard=True).beta2 == 0.0


def test_may_law() -> None:
    tokens, width, batch = 4 * 10**10, 768, 2**20
    expected = 0.06602 * tokens**-0.395 * width**-0.150 * math.sqrt(batch)
    assert peak_rates(tokens, width, batch, "may").adam == pytest.approx(expected, rel=1e-12)


def test_law_refuses_missing_inputs() -> None:
    for tokens, batch in ((None, 4096), (10**9, None), (0, 4096)):
        with pytest.raises(ScheduleError, match="full planned run"):
            peak_rates(tokens, 512, batch)
    with pytest.raises(ScheduleError, match="'june' is unknown"):
        peak_rates(10**9, 512, 4096, "june")  # type: ignore[arg-type]


def test_sweep_multiplies_past_the_cap() -> None:
    peak = peak_rates(330 * 16 * 256, 64, 16 * 256)
    assert scale_rates(peak, 1.4).hyperball == pytest.approx(0.0612, abs=5e-5)
    assert scale_rates(peak, 1.4).epsilon == peak.epsilon


@pytest.mark.parametrize(
    ("step", "factor", "eta", "decay"),
    [
        (0, "0", "0", "0.02"),
        (1, "0.000256279", "8.43e-7", "0.01999995"),
        (1951, "0.5", "0.00164525", "0.0199000"),
        (3902, "1", "0.0032905", "0.0198000"),
        (58_014, "0.866943", "0.00285268", "0.0170268"),
        (100_000, "0.763703", "0.00251296", "0.0148751"),
        (200_000, "0.517811", "0.00170386", "0.00975019"),
        (312_192, "0.241941", "0.00079611", "0.00400045"),
        (390_250, "0.0500025", "0.00016453", "5.1e-8"),
    ],
)
def test_schedule_of_the_public_run(step: int, factor: str, eta: str, decay: str) -> None:
    schedule = Schedule(HERO)
    assert_printed(schedule.factor(step), factor)
    assert_printed(0.0032905 * schedule.factor(step), eta)  # the printed peak, not 0.00329045
    assert_printed(schedule.decay(step), decay)


@pytest.mark.parametrize(("horizon", "warmup"), [(1, 0), (50, 0), (99, 0), (100, 1), (200, 2)])
def test_short_horizons(horizon: int, warmup: int) -> None:
    schedule = Schedule(horizon)
    assert schedule.warmup == warmup
    assert schedule.factor(0) == (0.0 if warmup else 1.0)
    assert schedule.factor(warmup) == 1.0
    assert schedule.factor(horizon) == schedule.factor(horizon + 7) == 0.05
    last = schedule.factor(horizon - 1)
    assert last == pytest.approx(0.05 + 0.95 / (horizon - warmup), abs=1e-12)


def test_schedule_of_200_updates() -> None:
    schedule = Schedule(200)
    assert [schedule.factor(t) for t in range(3)] == [0.0, 0.5, 1.0]
    assert_printed(schedule.factor(3), "0.995202")
    assert_printed(schedule.factor(101), "0.525")
    assert_printed(schedule.factor(199), "0.054798")
    assert np.mean([schedule.factor(t) for t in range(200)]) == pytest.approx(0.525, abs=0.005)


@given(st.integers(1, 10**7))
def test_warmup_is_an_exact_percent(horizon: int) -> None:
    assert count_warmup_steps(horizon) == horizon // 100


def test_warmup_override() -> None:
    assert Schedule(200, warmup_steps=5).factor(1) == 0.2


@pytest.mark.parametrize(
    "bad",
    [
        {"horizon": 0},
        {"horizon": 10, "min_ratio": -0.1},
        {"horizon": 10, "min_ratio": 1.1},
        {"horizon": 10, "warmup_steps": 10},
        {"horizon": 10, "warmup_steps": -1},
        {"horizon": 1000, "events": ((9, 500),)},
        {"horizon": 1000, "events": ((500, 500),)},
        {"horizon": 1000, "events": ((500, 800), (400, 900))},
    ],
)
def test_refused_schedules(bad: dict) -> None:
    with pytest.raises(ScheduleError):
        Schedule(**bad)


def test_retiming_of_the_public_run() -> None:
    first = Schedule(HERO).retime(200_000, 292_688)
    assert_printed(first.factor(250_000), "0.265453")
    assert_printed(first.factor(292_687), "0.0500050")
    assert_printed(first.decay(250_000), "0.00449051")
    second = Schedule(HERO).retime(150_000, 312_201)
    assert_printed(second.factor(150_000), "0.640757")
    assert_printed(second.factor(250_000), "0.276544")
    assert_printed(Schedule(292_688).factor(200_000), "0.353882")


def test_retiming_is_continuous_and_ends_where_it_should() -> None:
    plain = Schedule(HERO)
    events = (HorizonEvent(100_000, 350_000), HorizonEvent(200_000, 300_000))
    schedule = Schedule(HERO, events=events)
    assert all(schedule.factor(t) == plain.factor(t) for t in (0, 3902, 99_999))
    assert schedule.factor(100_000) == pytest.approx(plain.factor(100_000), abs=1e-15)
    assert schedule.factor(200_000) == pytest.approx(
        Schedule(HERO, events=events[:1]).factor(200_000), abs=1e-15
    )
    assert schedule.factor(300_000) == schedule.factor(10**7) == 0.05
    assert schedule.decay(300_000) == schedule.decay(10**7) == 0.0
    assert schedule.final_horizon == 300_000
    assert schedule.retime(250_000, 290_000).events[:2] == events


def test_lengthening_warns_once_and_restores_quietly() -> None:
    with pytest.warns(UserWarning, match="lengthens the run"):
        longer = Schedule(1000).retime(500, 2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Schedule(1000, events=longer.events).factor(1999) > 0.05
        Schedule(1000).retime(500, 800)


@given(st.integers(100, 5000), st.data())
def test_factor_falls_between_its_bounds(horizon: int, data: st.DataObject) -> None:
    schedule = Schedule(horizon)
    start = data.draw(st.integers(schedule.warmup, horizon - 1))
    end = data.draw(st.integers(start + 1, horizon))
    schedule = schedule.retime(start, end)
    factors = [schedule.factor(t) for t in range(schedule.warmup, end + 3)]
    assert all(a >= b for a, b in itertools.pairwise(factors))
    assert factors[0] == 1.0
    assert factors[-1] == 0.05
    assert schedule.decay(end) == 0.0


def test_decay_start_reproduces_the_public_run() -> None:
    schedule = Schedule(HERO)
    assert schedule.decay(58_013, start=58_014) == 0.0
    assert_printed(schedule.decay(58_014, start=58_014), "0.0170268")
    assert schedule.decay(HERO) == schedule.decay(HERO + 1) == 0.0


def test_rates_are_float32_of_the_host_values() -> None:
    peak = PeakRates(hyperball=0.03, adam=0.01, beta1=0.9, beta2=0.99, epsilon=1e-15)
    schedule = Schedule(200)
    rates = schedule.rates(101, peak)
    assert all(isinstance(rate, np.float32) for rate in rates)
    assert rates.eta == np.float32(0.03 * schedule.factor(101))
    assert rates.decay == np.float32(0.02 * (1 - 101 / 200))
    assert schedule.rates(0, peak).eta == 0.0
