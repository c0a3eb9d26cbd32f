"""The page of an ablation: what is called an effect, what is not, and the page in a browser."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from portolan.errors import UsageError
from portolan.report.ablation import NOT_RESOLVED, build_page, effect_rows, read_table, width_tables
from portolan.report.gather import read_project
from portolan.report.site import render

HOSTILE = "</script><script>window.hacked=1</script>"


def effect(difference: float, half: float, *, resolved: bool) -> dict[str, Any]:
    ends = [str(difference - half), str(difference + half)]
    return {
        "steps": 304,
        "losses": {"0": str(4.2 + difference), "1": str(4.3 + difference)},
        "diverged": 0,
        "difference": str(difference),
        "num_seeds": 2,
        "own": ends,
        "joint": ends,
        "resolved": resolved,
        "compute": "0.81",
        "compute_interval": ["0.74", None],
    }


def arm(name: str, tokens: dict | None, **facts: Any) -> dict[str, Any]:
    budgets = {} if tokens is None else {"tokens": tokens, "flops": tokens}
    return {
        "arm": name, "against": "baseline", "change": "something else", "rate": "1.0",
        "reported": "-0.0222 = 1.18x", "scale": "d768", "source": "#8227",
        "settings": {"model.conv.sites": ["k"]},
        "total_params": 171_008, "active_params": 38_912, "flops_per_token": "152700.0",
        "flops_ratio": "1.0", "tokens_per_second": "12500.4", "program_bytes": 13_946_060,
    } | budgets | facts  # fmt: skip


@pytest.fixture
def facts() -> dict[str, Any]:
    arms = [
        arm("clear", effect(0.09, 0.03, resolved=True), speedup="0.7"),
        arm("faint", effect(0.01, 0.03, resolved=False)),
        arm("burst", effect(0.01, 0.03, resolved=False) | {"diverged": 2, "resolved": False}),
        arm("twin", None, same_as="clear"),
        arm("swept", effect(-0.02, 0.01, resolved=True), rate="0.5",
            sweep={"0.5": "4.1", "1.0": "4.2", "2.0": "diverged"}),
    ]  # fmt: skip
    baseline = arm("baseline", None) | {"steps": 304, "losses": {"0": "4.2", "1": "4.3"}}
    noise = {"sd": "0.006", "freedom": 4}
    width = {"width": 32, "baseline": baseline, "arms": arms, "num_distinct": 4,
             "noise_tokens": noise, "noise_flops": noise}  # fmt: skip
    return {
        "recipe_name": "pocket", "changes": {"optimizer.rate_multiplier": "4.0"},
        "all_arms": False, "seeds": [0, 1], "level": "0.95", "flops_convention": "full",
        "same_budget": "0.005", "fast_share": "0.1", "cores": 2, "widths": [width],
        "law": {"asymptote": "1.6", "exponent": "0.23", "scale": "40.0"},
    }  # fmt: skip


def build(root: Path, facts: dict[str, Any]) -> Path:
    path = root / "ablations" / "0123456789abcdef.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(facts))
    return build_page(root, path)


def test_difference_is_printed_only_when_it_is_resolved(facts):
    found = read_table(facts)
    tokens, flops, *_ = width_tables(found, found.widths[0])
    cells = {row[0]: row for row in tokens.rows}
    assert cells["clear"][1:] == (
        "+0.0900", "+0.0600 to +0.1200", "+0.0600 to +0.1200", "0.81 (0.74 to ∞)",
        "-0.0222 = 1.18x (d768, #8227)",
    )  # fmt: skip
    assert cells["faint"][1] == NOT_RESOLVED and cells["faint"][4] == "–"
    assert "+0.0100" not in cells["faint"]
    assert cells["burst"][1] == "diverged (2 runs)"
    assert cells["twin"][1] == "as clear"
    assert {row[1] for row in flops.rows} == {"304", "–"}
    assert "0.0060 nats (4 degrees of freedom); joint over 4 arms" in tokens.note


def test_cost_and_sweep_of_an_arm(facts):
    found = read_table(facts)
    _, _, cost, sweep = width_tables(found, found.widths[0])
    cells = {row[0]: row for row in cost.rows}
    assert list(cells) == ["baseline", "clear", "faint", "burst", "twin", "swept"]
    assert cells["clear"][4:] == ("1.000", "12\u202f500", "13.3 MiB", "0.70", "× 1")
    assert sweep.columns == ("Arm", "× 0.5", "× 1", "× 2")
    assert sweep.rows == (("swept", "4.1000", "4.2000", "diverged"),)


def test_words_say_scale_law_and_level(facts):
    text = " ".join(read_table(facts).introduction)
    assert "95 % Student t" in text and "Bonferroni" in text
    assert "Recipe pocket with optimizer.rate_multiplier = 4.0." in text
    assert "E = 1.6000" in text and "a million times the compute" in text
    facts["law"] = None
    assert "baseline losses at two widths" in " ".join(read_table(facts).introduction)


def test_without_intervals_nothing_is_an_effect(facts):
    single = copy.deepcopy(facts)
    for row in single["widths"][0]["arms"]:
        for budget in ("tokens", "flops"):
            if budget in row:
                row[budget] |= {"own": None, "joint": None, "resolved": False}
    single["widths"][0] |= {"noise_tokens": None, "noise_flops": None}
    found = read_table(single)
    tokens = width_tables(found, found.widths[0])[0]
    assert {row[1] for row in tokens.rows} == {NOT_RESOLVED, "diverged (2 runs)", "as clear"}
    assert "Too few seeds" in tokens.note
    assert all("own_low" not in row for row in effect_rows(found.widths[0], "tokens"))


def test_missing_table_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no table"):
        build_page(tmp_path, tmp_path / "ablations" / "none.json")


def test_project_page_leaves_the_runs_out_and_links_to_the_page(facts, project_at, tmp_path):
    before = read_project(project_at("finished"))
    root = Path(shutil.copytree(project_at("finished"), tmp_path / "project"))
    run = root / "runs" / "dense-d32-s0-00000000" / "run.json"
    run.parent.mkdir()
    run.write_text(json.dumps({"id": run.parent.name, "role": "ablation", "width": 32}))
    (root / "runs" / "broken").mkdir()
    (root / "runs" / "broken" / "run.json").write_text("{")
    build(root, facts)
    after = read_project(root)
    assert [r.id for r in after.runs if r.id != "broken"] == [r.id for r in before.runs]
    assert len([text for text in after.problems if "broken" in text]) == 1
    assert (before.has_ablation, after.has_ablation) == (False, True)
    assert '<a href="ablation.html">' in render(after) and "ablation" not in render(before)


@pytest.mark.browser
def test_page_is_drawn_silent_and_inert(browser, facts, tmp_path):
    facts["widths"][0]["arms"][0] |= {"change": HOSTILE, "arm": HOSTILE}
    page_path = build(tmp_path, facts)
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(page_path.as_uri())
    command = "portolan ablate --widths 32 --seeds 2 --arms"
    assert command in page.text_content("#repeat")
    page.locator("html[data-charts=drawn]").wait_for(state="attached")
    assert page.evaluate("window.hacked === undefined")
    for viewport in ({"width": 1280, "height": 900}, {"width": 390, "height": 844}):
        page.set_viewport_size(viewport)
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    for budget in ("tokens", "flops"):
        marks = page.locator(f"#chart-effects-{budget}-32 .mark-symbol path")
        assert marks.count() == 4
    page.close()
    assert faults == []
