"""Curate, rehearse, forecast, register, train, score, verify, report: one command, then each."""

import json
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.pipeline.conftest import Finished
from tests.pipeline.tools import read_tree, run_command

from portolan.record.grade import registration_grade
from portolan.record.journal import Journal

HEADLINE = "eval_dropless/heldout/macro_loss"
NUMBER = r"(\d+\.\d{4})"


def find(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"{pattern!r} is not in:\n{text}"
    return found.groups()


def target_folder(root: Path) -> Path:
    (folder,) = (root / "runs").glob("target-*")
    return folder


def test_first_run_shows_forecast_measurement_verdict_and_page(finished):
    (median,) = map(float, find(rf"^forecast: {NUMBER} nats per token", finished.output))
    inner = (median, median)
    for level in (50, 80, 95):
        pattern = rf"^  {level} % interval: {NUMBER} to {NUMBER}"
        low, high = map(float, find(pattern, finished.output))
        assert low < inner[0] <= inner[1] < high
        inner = (low, high)
    pattern = rf"^measured: {NUMBER} nats per token; verdict: (.+)"
    measured, verdict = find(pattern, finished.output)
    folder = target_folder(finished.root)
    last = json.loads((folder / "finished.json").read_text())["evaluation"]
    assert float(measured) == pytest.approx(last[HEADLINE], abs=5e-5)
    assert verdict == json.loads((folder / "score.json").read_text())["verdict"]
    (page,) = find(r"^page: (.+)", finished.output)
    assert Path(page).is_file()
    assert find(r"^ladder cost: (\S+) % of the target's FLOPs without head", finished.output)
    assert len(re.findall(r"^\S+-d\d+-s\d-\S+: [\d,]+ tokens/s over", finished.output, re.M)) == 5


def test_target_learns_more_than_token_frequencies(finished):
    pattern = rf"^unigram entropy .*: macro {NUMBER}, micro {NUMBER} .* micro loss: {NUMBER}"
    _, unigram, model = map(float, find(pattern, finished.output))
    assert model < 0.7 * unigram


def test_second_run_does_nothing_and_says_so(project, finished):
    before = read_tree(project)
    begin = time.process_time()
    done = run_command("-C", project, "run", environment=finished.environment)
    assert (done.code, done.err) == (0, "")
    assert "nothing to do: every stage of" in done.out
    assert "measured: " in done.out
    assert read_tree(project) == before
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("curate", "nothing to do: the corpus is curated"),
        ("ladder", "nothing to do: every rung is finished"),
        ("register", "nothing to do: a forecast of this target is registered"),
        ("train", "nothing to do: the target is finished"),
        ("score", "nothing to do: the score is up to date"),
    ],
)
def test_finished_stage_says_that_there_is_nothing_to_do(verb, says, copy, cli):
    before = read_tree(copy)
    done = cli("-C", copy, verb)
    assert (done.code, done.err) == (0, "")
    assert says in done.out
    assert read_tree(copy) == before


def test_registration_lies_before_the_first_attempt_at_the_target(finished):
    records = list(Journal.open(finished.root / "record").records())
    target = target_folder(finished.root).name
    (registration,) = [record for record in records if record.type == "registration"]
    attempts = [r.seq for r in records if r.type == "attempt" and r.body["run"] == target]
    forecasts = [record for record in records if record.type == "forecast"]
    assert [record.id for record in forecasts] == registration.body["forecasts"]
    assert forecasts[0].seq < registration.seq < min(attempts)
    assert forecasts[0].body["known_before"]["count"] == 0
    assert registration_grade(records, registration.id) == "chained"


def test_missing_part_is_made_again_and_nothing_else(project, cli):
    before = read_tree(project)
    (project / "site" / "index.html").unlink()
    assert "would do: report" in cli("-C", project, "run", "--dry-run").out
    done = cli("-C", project, "run")
    assert "to do: report" in done.out
    assert done.code == 0
    after = read_tree(project)
    assert set(after) == set(before)
    assert {name for name in before if before[name] != after[name]} <= {"site/index.html"}


def test_verify_passes(finished, cli):
    done = cli("-C", finished.root, "verify")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ok(")
    limits = cli("-C", finished.root, "verify", "--limits")
    assert (limits.code, "Hashes prove sameness, not truth" in limits.out) == (0, True)


def test_evaluate_repeats_the_last_logged_evaluation(copy, finished):
    done = run_command("-C", copy, "evaluate", environment=finished.environment)
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    outcome = json.loads((target_folder(copy) / "finished.json").read_text())
    assert first == f"{outcome['run_id']} after {outcome['completed']} updates"
    found = dict(line.split(" ") for line in lines)
    assert found == {name: f"{value:.6f}" for name, value in outcome["evaluation"].items()}


def test_sample_repeats_itself_under_one_seed(copy, finished):
    def sample(*options: object) -> str:
        command = ("-C", copy, "sample", "the model ", "--tokens", 12, *options)
        done = run_command(*command, environment=finished.environment)
        assert done.code == 0, done.err
        assert "after 74 updates, seed" in done.err
        return done.out

    first = sample("--seed", 3)
    assert first.startswith("the model ")
    assert len(first) > len("the model \n")
    assert sample("--seed", 3) == first


def test_show_batch_names_the_documents_of_every_row(copy, cli):
    done = cli("-C", copy, "show-batch", 0)
    assert (done.code, done.err) == (0, "")
    spans: dict[int, list[tuple[int, int]]] = {}
    for line in done.out.splitlines():
        fields = dict(part.split("=") for part in line.split(" "))
        assert fields["source"] in ("prose", "tables")
        assert re.fullmatch("[0-9a-f]{32}", fields["id"])
        begin, end = map(int, fields["tokens"].split("-"))
        spans.setdefault(int(fields["row"]), []).append((begin, end))
    assert sorted(spans) == list(range(16))
    for parts in spans.values():
        assert (parts[0][0], parts[-1][1]) == (0, 64)
        assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert cli("-C", copy, "show-batch", 74).code == 2


def test_plan_as_json_is_what_was_trained(finished, cli):
    done = cli("-C", finished.root, "plan", "--json")
    plan = json.loads(done.out)
    for folder in (finished.root / "runs").iterdir():
        run = json.loads((folder / "run.json").read_text())
        role = [plan["target"]] if run["role"] == "target" else plan["ladder"]
        (found,) = [entry for entry in role if entry["width"] == run["width"]]
        assert found["steps"] == run["plan"]["steps"]
        assert found["tokens"] == run["plan"]["tokens"]
    assert "Ladder and target" in cli("-C", finished.root, "plan").out


def test_forecast_repeats_the_registered_one(copy, finished, cli):
    done = cli("-C", copy, "forecast")
    assert done.code == 0
    (median,) = find(rf"^  median {NUMBER}", done.out)
    assert find(rf"^forecast: {NUMBER}", finished.output) == (median,)


def test_doctor_describes_the_machine(tmp_path, cli):
    done = cli("-C", tmp_path, "doctor")
    assert done.code == 0
    for start in ("python: 3.", "cores: ", "memory: ", "disk write: ", "devices: ", "matmul "):
        assert find(rf"^{re.escape(start)}\S+", done.out) == ()
    assert list(tmp_path.iterdir()) == []


def test_report_is_rebuilt_from_the_folder(project, cli):
    page = project / "site" / "index.html"
    page.write_text("old")
    done = cli("-C", project, "report")
    assert done.code == 0
    assert "page: " in done.out
    assert len(page.read_bytes()) > 10_000


def test_register_after_the_target_was_evaluated_must_say_so(project, cli):
    for name in ("record", "forecasts", ".portolan"):
        shutil.rmtree(project / name)
    (target_folder(project) / "score.json").unlink()
    refused = cli("-C", project, "register")
    assert refused.code == 2
    assert "already has 20 evaluations" in refused.err
    assert "--retrospective" in refused.err
    assert not (project / "forecasts").exists()
    assert cli("-C", project, "register", "--retrospective").code == 0
    records = list(Journal.open(project / "record").records())
    (entry,) = [record for record in records if record.type == "forecast"]
    assert entry.body["known_before"]["retrospective"] is True
    done = cli("-C", project, "score")
    assert done.code == 0
    score = json.loads((target_folder(project) / "score.json").read_text())
    assert score["retrospective"] is True


def test_target_does_not_start_without_a_registration(project, cli):
    for name in ("record", "forecasts", ".portolan"):
        shutil.rmtree(project / name)
    shutil.rmtree(target_folder(project))
    done = cli("-C", project, "train")
    assert done.code == 1
    assert "no forecast is registered" in done.err
    assert "portolan register" in done.err


def test_other_recipe_settings_make_other_runs(copy, cli):
    before = read_tree(copy)
    done = cli("-C", copy, "run", "--dry-run", "--set", "optimizer.momentum=0.9")
    assert "would do: ladder, register, train, score, report" in done.out
    done = cli("-C", copy, "run", "--dry-run", "--set", "data.seed=1")
    assert "would do: curate, ladder, register, train, score, report" in done.out
    assert read_tree(copy) == before


@pytest.fixture(scope="module")
def copy(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for commands that only read."""
    return Path(shutil.copytree(finished.root, tmp_path_factory.mktemp("copy") / "project"))


def test_every_command_above_left_the_shared_copy_as_it_was(copy, finished):
    left, right = (read_tree(root) for root in (copy, finished.root))
    assert set(left) == set(right)
    changed = {name for name in left if left[name] != right[name]}
    assert all(name.endswith("/checkpoints/staging/lock") for name in changed)
