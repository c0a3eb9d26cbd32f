"""Task files in, quantiles out: through the command line, with clear refusals."""

import json

import pytest
from typer.testing import CliRunner

from portolan.cli.app import app
from portolan.errors import UsageError
from portolan.scaling.tasks import QUANTILE_NAMES, predict_task, read_tasks

# Task T000 of the public file: OLMo ladder, 0.5 x Chinchilla, C4 (allenai/OLMo-ladder @67a3f44).
OLMO = {
    "id": "T000",
    "suite": "olmo_ladder",
    "family": "olmo/0.5xC",
    "kind": "iso_ratio",
    "metric": "c4_en",
    "x": "flops",
    "rung_x": [3.633445589e18, 1.281349343e19, 4.841331202e19, 1.295070835e20],
    "rung_loss": [3.7474789619, 3.5318517685, 3.3315241337, 3.182975769],
    "target_x": 7.287991253e20,
    "true": 2.9950549603,
    "note": "unknown fields are fine",
}
ORDER = ["q025", "q05", "q10", "q25", "median", "q75", "q90", "q95", "q975"]


def write(path, tasks):
    path.write_text(json.dumps(tasks))
    return path


def run(tmp_path, tasks, *options):
    source, output = write(tmp_path / "tasks.json", tasks), tmp_path / "predictions.json"
    from portolan.cli import forecasts  # noqa: F401

    result = CliRunner().invoke(
        app, ["forecast", "backtest", str(source), "--output", str(output), *options],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return json.loads(output.read_text()), output.read_bytes()


def test_command_line(tmp_path):
    unknown = {key: value for key, value in OLMO.items() if key != "true"}
    other = unknown | {"id": "bits", "suite": "new", "family": "new", "x": "params"}
    single = other | {"id": "one", "rung_x": [1e20], "rung_loss": [0.9], "target_x": 1e21}
    found, content = run(tmp_path, [OLMO, other, single])
    assert [entry["id"] for entry in found] == ["T000", "bits", "one"]
    for entry in found:
        assert list(entry) == ["id", "median", *(name for name in ORDER if name != "median")]
        values = [entry[name] for name in ORDER]
        assert values == sorted(values)
        assert len(set(values)) == len(values)
    assert found[0]["q05"] < OLMO["true"] < found[0]["q95"]
    assert run(tmp_path, [OLMO, other, single])[1] == content


def test_excluding_a_family_changes_the_forecast(tmp_path):
    stranger = OLMO | {"suite": "new", "family": "new"}
    (plain,), _ = run(tmp_path, [stranger])
    (without,), _ = run(tmp_path, [stranger], "--exclude-family", "olmo")
    (own,), _ = run(tmp_path, [OLMO])
    assert without["median"] != plain["median"]
    assert without["median"] == own["median"]


def test_page(tmp_path):
    tasks = [OLMO, OLMO | {"id": "b", "suite": "other", "family": "other"}]
    page = tmp_path / "page.html"
    run(tmp_path, tasks, "--report", str(page))
    text = page.read_text()
    assert "0.55 x last rung, prior on E" in text
    assert "free asymptote" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_order_of_the_rungs_does_not_matter(tmp_path):
    reverse = OLMO | {name: OLMO[name][::-1] for name in ("rung_x", "rung_loss")}
    first, second = read_tasks(write(tmp_path / "t", [OLMO, reverse | {"id": "r"}]))
    assert predict_task(first)["median"] == predict_task(second)["median"]
    assert first.extrapolation == pytest.approx(5.627485)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rung_loss": [3.7, 3.5, -3.3, 3.1]}, "T000: rung_loss is -3.3"),
        ({"rung_loss": [3.7, 3.5, None, 3.1]}, "T000: rung_loss is None"),
        ({"rung_loss": [3.7, 3.5]}, "T000: 4 values in rung_x and 2"),
        ({"rung_x": []}, "T000: rung_x"),
        ({"rung_x": "1e20"}, "T000: rung_x"),
        ({"target_x": float("nan")}, "T000: target_x is nan"),
        ({"true": True}, "T000: true is True"),
        ({"id": ""}, "task 1 has no id"),
        ({"rung_sd": [0.1]}, "T000: rung_sd"),
    ],
)
def test_bad_tasks_are_named(tmp_path, change, words):
    with pytest.raises(UsageError, match=words):
        read_tasks(write(tmp_path / "tasks.json", [OLMO | change]))


def test_bad_files(tmp_path):
    (tmp_path / "broken.json").write_text("[{")
    for content in ("broken.json", "missing.json"):
        with pytest.raises(UsageError, match="cannot read"):
            read_tasks(tmp_path / content)
    with pytest.raises(UsageError, match="not a list"):
        read_tasks(write(tmp_path / "object.json", {"tasks": []}))
    with pytest.raises(UsageError, match="two tasks"):
        read_tasks(write(tmp_path / "twice.json", [OLMO, OLMO]))
    assert set(QUANTILE_NAMES) == set(ORDER)
