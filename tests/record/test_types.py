import copy

import pytest

from portolan.record.bases import BASES, parse_basis, same_basis
from portolan.record.journal import Journal
from portolan.record.quantities import (
    BasisMismatch,
    Quantity,
    difference,
    plan_quantity,
    significant_digits,
)
from portolan.record.redact import scrub_arguments, scrub_environment, select_environment
from portolan.record.types import SchemaError, check_body

UNKNOWN_ID = "artifact:" + "0" * 64


def edit(body, path, value):
    """A copy of `body` with the field at a dotted path replaced."""
    changed = copy.deepcopy(body)
    *parents, last = path.split(".")
    place = changed
    for name in parents:
        place = place[name]
    place[last] = value
    return changed


def test_complete_bodies_are_accepted(bodies):
    for record_type, body in bodies.items():
        stored = check_body(record_type, body)
        assert check_body(record_type, stored) == stored


@pytest.mark.parametrize(
    ("record_type", "path", "value"),
    [
        ("registration", "question", ""),
        ("registration", "question", "  "),
        ("registration", "question", "?"),
        ("registration", "hypothesis", "unknown"),
        ("registration", "plan.tokens.value", "?"),
        ("registration", "plan.tokens.value", ""),
        ("registration", "plan.tokens.value", "unknown"),
        ("registration", "plan.steps.basis", "steps.guessed"),
        ("registration", "plan.steps.basis", "mfu.segment@"),
        ("registration", "plan.steps.scope", "everything"),
        ("registration", "plan", {}),
        ("registration", "extra", "x"),
        ("registration", "text", None),
        ("run", "fork.row", 0),
        ("run", "fork", {"checkpoint": 121_638, "row": 121_638, "tracker_step": 121_637}),
        ("run", "role", "main"),
        ("attempt", "start", "2026-01-01T00:00:00"),
        ("attempt", "start", "2026-01-01T00:00:00.000+00:00"),
        ("attempt", "start", "2026-01-01T00:00:00Z"),
        ("attempt", "start", "2026-02-30T00:00:00.000Z"),
        ("attempt", "ordinal", 0),
        ("attempt", "config_digest", "abc"),
        ("attempt", "tree_state", "dirty"),
        ("attempt", "code_commit", ""),
        ("event", "kind", "rumour"),
        ("event", "step", 12),
        ("event", "cause.status", "sure"),
        ("event", "evidence", [" "]),
        ("event", "detail", {"x": None}),
    ],
)
def test_bad_fields_are_refused(bodies, record_type, path, value):
    with pytest.raises(SchemaError):
        check_body(record_type, edit(bodies[record_type], path, value))


def test_error_names_field_and_remedy(bodies):
    with pytest.raises(SchemaError, match=r"plan\.tokens: .*'\?'") as caught:
        check_body("registration", edit(bodies["registration"], "plan.tokens.value", "?"))
    assert "not_stated" in caught.value.remedy
    with pytest.raises(SchemaError, match="no record type"):
        check_body("rumour", {})


def test_forward_references_are_refused(journal, bodies):
    with pytest.raises(SchemaError, match="not in the journal yet"):
        journal.append("event", {**bodies["event"], "refs": [UNKNOWN_ID]})
    with pytest.raises(SchemaError, match="not in the journal yet"):
        journal.append("event", {**bodies["event"], "evidence": [UNKNOWN_ID]})
    with pytest.raises(SchemaError, match="not in the journal yet"):
        journal.append("event", bodies["event"], supersedes=[UNKNOWN_ID])
    first = journal.append("event", bodies["event"])
    journal.append("event", {**bodies["event"], "text": "more", "refs": [first]})


def test_secrets_never_reach_the_file(journal, bodies):
    journal.append("run", bodies["run"])
    identity = journal.append("attempt", bodies["attempt"])
    body = journal.get(identity).body
    assert body["argv"] == ["portolan", "train", "--tokens", "5", "--api-key", "redacted"]
    assert body["env"] == {"HF_TOKEN": "redacted", "XLA_FLAGS": "--xla_x=1"}
    assert b"s3cret" not in journal.path.read_bytes()


def test_redaction_rule():
    kept = ["--tokens", "5", "--token-budget=7", "--monkey", "x", "--keyboard=y", "a.steps=3", ""]
    assert list(scrub_arguments(kept)) == [*kept[:-1], "''"]
    assert scrub_arguments(["--api-key=a", "--wandb_token", "b", "--set", "wandb.api_key=c"]) == (
        "--api-key=redacted",
        "--wandb_token",
        "redacted",
        "--set",
        "wandb.api_key=redacted",
    )
    assert scrub_arguments(["--token", "--other", "https://u:p@host/x"]) == (
        "--token",
        "--other",
        "https://redacted@host/x",
    )
    names = ["HF_TOKEN", "secret", "DB-PASSWORD", "AWS_CREDENTIALS", "MY_CREDENTIAL", "TOKENS"]
    scrubbed = scrub_environment(dict.fromkeys(names, "v"))
    assert {name for name, value in scrubbed.items() if value == "v"} == {"TOKENS"}
    environment = {"HOME": "/x", "XLA_FLAGS": "a", "WANDB_API_KEY": "k", "OMP_NUM_THREADS": " "}
    assert select_environment(environment) == {"XLA_FLAGS": "a", "WANDB_API_KEY": "redacted"}


def test_attempt_ordinals(journal, bodies):
    attempt = bodies["attempt"]
    with pytest.raises(SchemaError, match="record the run first"):
        journal.append("attempt", attempt)
    journal.append("run", bodies["run"])
    first = journal.append("attempt", attempt)
    ended = {**attempt, "end": "2026-01-01T01:00:00.000Z", "text": "ended"}
    with pytest.raises(SchemaError, match="recorded already"):
        journal.append("attempt", ended)
    journal.append("attempt", ended, supersedes=[first])
    journal.append("attempt", {**attempt, "ordinal": 4})
    kinds = [(r.type, r.body.get("kind"), r.body.get("detail")) for r in journal.records()][-2:]
    hole = {"first_attempt": 2, "last_attempt": 3}
    assert kinds == [("event", "log_gap", hole), ("attempt", None, None)]
    with pytest.raises(SchemaError, match="comes after"):
        Journal.open(journal.folder).append("attempt", {**attempt, "ordinal": 3})


def test_roles_amendments_and_causes_move_only_by_superseding(journal, bodies):
    run = journal.append("run", bodies["run"])
    rolled_back = {**bodies["run"], "role": "rolled_back"}
    with pytest.raises(SchemaError, match="recorded already"):
        journal.append("run", rolled_back)
    journal.append("run", rolled_back, supersedes=[run])
    registration = journal.append("registration", bodies["registration"])
    amended = edit(bodies["registration"], "stop_rule", "500 steps")
    with pytest.raises(SchemaError, match="amends"):
        journal.append("registration", amended, supersedes=[registration])
    amended["amends"] = [{"field": "stop_rule", "before": "400 steps", "after": "500 steps"}]
    journal.append("registration", amended, supersedes=[registration])
    event = journal.append("event", bodies["event"])
    withdrawn = edit(bodies["event"], "cause.status", "withdrawn")
    with pytest.raises(SchemaError, match="without new evidence"):
        journal.append("event", withdrawn, supersedes=[event])
    withdrawn["evidence"] = ["the batch was fine"]
    journal.append("event", withdrawn, supersedes=[event])
    assert journal.get(event).body["cause"]["status"] == "likely"


@pytest.mark.parametrize(
    ("value", "rounding"),
    [
        ("18e12", "sig:2"),
        ("22.76e9", "sig:4"),
        ("0.0076", "sig:2"),
        ("390251", "exact"),
        ("-5.0", "sig:2"),
        ("0.0", "sig:1"),
    ],
)
def test_rounding_is_read_from_the_digits(value, rounding):
    assert significant_digits(value) == rounding


def quantity(value, basis="steps.planned", unit="steps", scope="plan"):
    return Quantity(value=value, unit=unit, basis=basis, scope=scope)


@pytest.mark.parametrize("value", ["01", "1.", "+1", "1e+5", ".5", "1,000", "nan", "", "--1"])
def test_values_are_plain_decimals(value):
    with pytest.raises(ValueError):
        quantity(value)


def test_units_category_and_time():
    assert quantity("A100", "devices.mesh", "category").rounding == "exact"
    with pytest.raises(ValueError):
        quantity("12", "devices.mesh", "category")
    assert quantity("2026-01-01T00:00:00.000Z", "time.wall", "time").rounding == "exact"
    with pytest.raises(ValueError):
        quantity("2026-01-01", "time.wall", "time")
    assert plan_quantity(1.5, "x", "schedule.lr").value == "1.5"


def test_bases():
    assert len(BASES) > 45
    assert parse_basis("mfu.segment@rows 0-99") == ("mfu.segment@", "rows 0-99")
    assert parse_basis("progress.tokens(18e12)") == ("progress.tokens()", "18e12")
    for unknown in ("mfu.segment", "progress.tokens", "progress.tokens()", "not_stated", "x@y"):
        with pytest.raises(ValueError):
            parse_basis(unknown)
    assert same_basis("mfu.segment@a", "mfu.segment@b"), "windows are a difference of time"
    assert not same_basis("data.pool.tokens@a", "data.pool.tokens@b")
    assert same_basis("status.exit", "status.log"), "one group of opinions"


def test_quantities_of_different_meaning_are_not_subtracted():
    assert difference(quantity("390251"), quantity("390139")) == 112
    others = (
        quantity("1", basis="step.completed"),
        quantity("1", unit="updates"),
        quantity("1", scope="lineage:a"),
    )
    for other in others:
        with pytest.raises(BasisMismatch):
            difference(quantity("1"), other)


FORECAST = {
    "title": "final loss of the target",
    "author": "a person",
    "made_at": "2026-01-01T00:00:00.000Z",
    "metric": {"name": "macro_loss", "domains": ["code", "prose"]},
    "target": {"lineage": "pocket", "steps": 400},
    "recipe": {"model": "ab" * 32},
    "inputs": [{"run": "rung-1", "excluded": []}],
    "method": {"name": "F1", "warnings": [], "seed": 0},
    "quantiles": {"macro_loss": {"1.00": {"0.5": 2.0390000000000001}}},
    "conditions": [{"field": "tokens_per_step", "op": "==", "value": 16384}],
    "bands": [{"name": "green", "level": "0.5"}],
    "scoring": {"headline": "WIS"},
    "known_before": {"count": 0, "completed": 0, "retrospective": False},
    "reason": "",
    "changes": [],
    "on_failure": "the recipe is not trusted at the next scale",
}


def test_forecast_floats_become_decimals_and_text_is_its_title(journal):
    identity = journal.append("forecast", FORECAST)
    body = journal.get(identity).body
    assert body["quantiles"]["macro_loss"]["1.00"]["0.5"] == "2.039"
    assert body["text"] == FORECAST["title"] and "reason" not in body
    assert check_body("forecast", body) == body


@pytest.mark.parametrize("field", ["quantiles", "conditions", "bands", "on_failure", "made_at"])
def test_forecast_that_cannot_be_scored_is_refused(field):
    without = {name: value for name, value in FORECAST.items() if name != field}
    with pytest.raises(SchemaError, match=field):
        check_body("forecast", without)
    with pytest.raises(SchemaError, match=field):
        check_body("forecast", {**FORECAST, field: type(FORECAST[field])()})


CHANGE = {
    "text": "weight decay starts",
    "planned": True,
    "what": {"config": "decay 0.02 from step 58014"},
    "from_step": {"clock": "completed", "n": 58_014},
    "expected": {"metric": "loss", "direction": "none", "size": "0", "tolerance": "0.002"},
    "not_exercised": ["retry"],
    "gate": "200 paired steps",
    "control_window": "58014 to 58214",
}


def test_change_and_check(journal):
    change = journal.append("change", CHANGE)
    assert journal.get(change).body["verdict"] == "pending"
    for bad in ({"what": {}}, {"verdict": "fine"}, {"from_step": 58_014}, {"planned": None}):
        with pytest.raises(SchemaError):
            check_body("change", {**CHANGE, **bad})
    check = {
        "text": "replay matches",
        "rule": "replay",
        "version": "1",
        "inputs": {"row": 99},
        "result": {"difference": 0.0},
        "tool_digest": "not_stated",
        "refs": [change],
    }
    assert journal.get(journal.append("check", check)).body["result"] == {"difference": "0.0"}


@pytest.mark.parametrize(
    "files",
    [
        [{"path": "/etc/passwd", "bytes": 1, "sha256": "ab" * 32}],
        [{"path": "../x", "bytes": 1, "sha256": "ab" * 32}],
        [{"path": "a//b", "bytes": 1, "sha256": "ab" * 32}],
        [{"path": "x", "bytes": 2, "sha256": "ab" * 32}],
        [{"path": "x", "bytes": -1, "sha256": "ab" * 32}],
    ],
)
def test_artifact_paths_stay_inside_the_project(files):
    artifact = {
        "text": "weights",
        "kind": "checkpoint",
        "files": files,
        "digests": {"content": "ab" * 32},
        "bytes": 1,
        "licence_declared": "Apache-2.0",
        "licence_concluded": "Apache-2.0",
        "redistribution": "public",
        "retain_until": "the end of the project",
        "completeness": "marked",
    }
    with pytest.raises(SchemaError):
        check_body("artifact", artifact)
    assert check_body("artifact", {**artifact, "files": []})["completeness"] == "marked"
