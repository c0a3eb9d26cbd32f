"""A finished project says what its own numbers rest on, and notices when they do not."""

import json
from pathlib import Path

import pytest

from portolan.pipeline.claims import claim_headline
from portolan.pipeline.reconcile import reconcile_project
from portolan.pipeline.recorder import ProjectRecord
from portolan.project import open_project
from portolan.record.verify import verify_project

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3-interruptions"


def claims_of(record):
    return [entry for entry in record.find("claim") if "quantity" in entry.body]


def test_a_finished_run_claims_its_headline_and_everything_agrees(project, cli):
    opened = open_project(project)
    record = ProjectRecord(opened)
    claims = claims_of(record)
    assert {entry.body["quantity"]["basis"] for entry in claims} == {
        "eval.macro.nats", "step.completed", "tokens.nominal", "params.total", "params.active",
        "flops.model.fwd_bwd", "forecast.macro.nats",
    }  # fmt: skip
    assert claim_headline(opened, record, claims[0].body["subject"]) == []
    done = cli("-C", project, "reconcile")
    assert (done.code, done.err) == (0, ""), done.out
    assert "conflict" not in done.out and str(project / "site" / "reconciliation.html") in done.out
    data = json.loads(cli("-C", project, "reconcile", "--json").out)
    claimed = [f for case in data["cases"] for f in case["figures"] if f["layer"] == "claimed"]
    assert len(claimed) == 7 and data["exit_code"] == 0
    layers = {f["layer"] for case in data["cases"] for f in case["figures"]}
    assert layers == {"claimed", "registered", "configured", "launched", "observed", "derived"}
    cli("-C", project, "report")
    page = (project / "site" / "index.html").read_text()
    assert 'href="reconciliation.html"' in page and "Published numbers" in page
    assert verify_project(project).exit_code == 0


def test_a_wrong_claim_is_a_conflict_until_it_is_corrected(project, cli):
    record = ProjectRecord(open_project(project))
    claim = next(e for e in claims_of(record) if e.body["quantity"]["basis"] == "tokens.nominal")
    wrong = {
        **claim.body,
        "statement": "it was trained on 18.75 trillion tokens",
        "quantity": {**claim.body["quantity"], "value": "18.75e12", "rounding": "sig:4"},
    }
    identity = record.journal.append("claim", wrong, supersedes=[claim.id])
    assert cli("-C", project, "reconcile").code == 1
    (finding,) = reconcile_project(open_project(project)).open_conflicts
    assert finding.left == f"claim:{identity.partition(':')[2][:10]}"
    event = {"text": "the number of the draft", "kind": "correction", "step": "not_stated"}
    record.journal.append("event", {**event, "refs": [identity]})
    result = reconcile_project(open_project(project))
    assert result.open_conflicts == () and result.exit_code == 1
    assert [f.label for f in result.findings if f.verdict == "conflict"] == ["conflict (published)"]
    record.journal.append("claim", claim.body, supersedes=[identity])
    assert cli("-C", project, "reconcile").code == 0


def test_an_edited_result_is_a_conflict(project, cli):
    (path,) = (p for p in project.glob("runs/target-*/finished.json"))
    outcome = json.loads(path.read_text())
    outcome["evaluation"]["eval_dropless/heldout/macro_loss"] -= 0.5
    path.write_text(json.dumps(outcome))
    assert cli("-C", project, "reconcile").code == 1


def test_numbers_of_a_readme_rest_on_the_record_or_are_listed(project, cli, tmp_path):
    outcome = json.loads(next(project.glob("runs/target-*/finished.json")).read_text())
    loss = outcome["evaluation"]["eval_dropless/heldout/macro_loss"]
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text(f"# Result\n\nThe final loss is {loss:.3f} nats.\n")
    bad.write_text(f"The final loss is {loss + 1:.3f} nats.\n\nThe weights are open.\n")
    assert cli("-C", project, "lint-claims", good).code == 0
    done = cli("-C", project, "lint-claims", bad)
    assert done.code == 1
    assert f"bad.md:1: {loss + 1:.3f} rests on no recorded figure" in done.out
    assert "called open without a licence" in done.out
    (report,) = json.loads(cli("-C", project, "lint-claims", good, "--json").out)
    assert len(report["numbers"]) == 1 and report["numbers"][0]["figures"]


def test_folders_and_wrong_places(cli, tmp_path):
    assert cli("-C", tmp_path, "reconcile").code == 2
    assert cli("reconcile", tmp_path).code == 2
    page = tmp_path / "page.html"
    done = cli("reconcile", EXAMPLE, "--page", page)
    assert done.code == 1 and "conflict" in done.out and page.is_file()
    (tmp_path / "x.md").write_text("148 of 419 interruptions are 35.3 %.\n")
    done = cli("lint-claims", "--claims", EXAMPLE, tmp_path / "x.md")
    assert (done.code, "3 of 3 numbers" in done.out) == (0, True), done.out


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ('{"findings": [{"locator": "https://arxiv.org/abs/2407.21783", "class": "gone"}]}', 9),
        ('{"findings": [{"locator": "https://arxiv.org/abs/2407.21783", "class": "unknown"}]}', 1),
        ('{"findings": 3}', 2),
    ],
)
def test_sources_that_a_stranger_cannot_fetch(cli, tmp_path, content, code):
    for name in ("claims.csv", "audit.toml"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    (tmp_path / "reach.json").write_text(content)
    assert cli("reconcile", tmp_path).code == code
