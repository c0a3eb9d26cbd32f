"""Sentences, verdicts and number formats, and the colours behind them."""

import itertools
from dataclasses import replace

import pytest

from portolan.report import palette, words
from portolan.report.canvas import log_ticks, power_labels
from portolan.report.facts import Forecast, Run, Score
from portolan.report.figures import forecast_figures
from portolan.report.gather import read_project


def forecast_of(median: float, unit: float) -> Forecast:
    row = {0.005: -2.6, 0.025: -2.0, 0.1: -1.3, 0.25: -0.7, 0.5: 0.0}
    row |= {round(1 - level, 4): -z for level, z in row.items()}
    quantiles = {level: median + unit * z for level, z in row.items()}
    return Forecast("forecast:x", metric="m", quantiles={"m": {1.0: quantiles}})


@pytest.mark.parametrize(
    ("value", "text", "tone"),
    [
        (3.0, "inside the 50 % interval", "good"),
        (3.1, "inside the 80 % interval", "good"),
        (2.82, "inside the 95 % interval", "good"),
        (3.25, "outside the 95 % interval", "caution"),
        (2.5, "far outside the 95 % interval", "bad"),
    ],
)
def test_verdict_names_the_smallest_interval(value, text, tone):
    assert words.verdict(forecast_of(3.0, 0.1), value) == words.Verdict(text, tone)


def test_stages_progress(project_at):
    states = {
        stage: [step.state for step in words.steps(read_project(project_at(stage)))]
        for stage in ("empty", "ladder", "registered", "finished")
    }
    assert states["empty"] == ["now", "next", "next", "next", "next", "next"]
    assert states["ladder"] == ["done", "now", "next", "next", "next", "next"]
    assert states["registered"] == ["done", "done", "done", "done", "now", "next"]
    assert states["finished"] == ["done"] * 6


def test_a_void_forecast_shows_no_difference(project_at):
    project = read_project(project_at("finished"))
    void = replace(project, score=Score(num_void=3, num_scored=17, verdict="void"))
    headline = words.headline(void)
    assert headline.verdict is None
    assert "Error" not in {tile.name for tile in headline.tiles}
    assert any("void" in note for note in headline.notes)
    drawn = forecast_figures(void)
    assert [figure.id for figure in drawn] == ["forecast-band"]
    assert {row[6] for row in drawn[0].table.rows} == {"void"}


def test_a_retrospective_forecast_is_called_so(project_at):
    project = replace(read_project(project_at("finished")), order_grade="retrospective")
    assert any("retrospective" in note for note in words.headline(project).notes)


def test_ladder_share_needs_every_cost(project_at, sample):
    project = read_project(project_at("finished"))
    expected = sum(run.flops for run in sample.RUNGS) / sample.TARGET.flops
    assert words.ladder_share(project) == pytest.approx(expected)
    unknown = replace(project, runs=(*project.runs, Run("r", "rung")))
    assert words.ladder_share(unknown) is None


def test_number_formats():
    assert words.count(1234567) == "1\u202f234\u202f567"
    assert words.scientific(1.3204e13) == "1.320 × 10¹³"
    assert words.scientific(2.5e-7) == "2.500 × 10⁻⁷"
    assert words.signed(-0.0123) == "−0.0123" and words.signed(0.5, 1) == "+0.5"
    assert words.size(999) == "999 bytes" and words.size(3 * 1024**2) == "3.0 MiB"
    assert words.duration(59) == "59.0 s" and words.duration(7200) == "2.0 h"
    assert words.percent(0.0298) == "3.0 %"
    assert {words.loss(None), words.count(None), words.size(None)} == {words.MISSING}


def test_log_axes():
    assert log_ticks(2e11, 3e14) == [1e12, 1e13, 1e14]
    assert log_ticks(0.9, 4.2) == [1.0, 1.5, 2.0, 3.0]
    assert "'10¹²'" in power_labels([1e12]) and "'5×10³'" in power_labels([5e3])


def luminance(colour: str) -> float:
    parts = [c / 255 for c in bytes.fromhex(colour[1:])]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_meets_wcag(scheme):
    """4.5:1 for text and 3:1 for marks: WCAG 2.2, criteria 1.4.3 and 1.4.11."""
    colours = palette.css_variables(scheme)
    texts = ("ink", "ink-soft", "link", "good", "caution", "bad")
    for name, ground in itertools.product(texts, ("paper", "panel")):
        assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    marks = [n for n in colours if n.split("-")[0] in ("series", "layer", "forecast", "measured")]
    for name in marks:
        assert contrast(colours[name], colours["paper"]) >= 3, name
    for step in range(1, palette.NUM_RAMP + 1):
        assert contrast(colours[f"rung-{step}"], colours["paper"]) >= 2.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forecast_and_measured_differ_without_red_or_green_cones(scheme):
    """Simulation of Vienot, Brettel and Mollon (1999): blue against orange stays apart."""
    colours = palette.css_variables(scheme)
    mixes = {"protanopia": (0.1124, 0.8876), "deuteranopia": (0.2928, 0.7072)}
    for red, green in mixes.values():
        seen = []
        for name in ("forecast", "measured"):
            r, g, b = (c / 255 for c in bytes.fromhex(colours[name][1:]))
            seen.append((red * r + green * g, b))
        distance = sum((x - y) ** 2 for x, y in zip(*seen, strict=True)) ** 0.5
        assert distance > 0.35


def test_unknown_colours_are_refused():
    with pytest.raises(KeyError, match="no colour"):
        palette.colour("pink")
