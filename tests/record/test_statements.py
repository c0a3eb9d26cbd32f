"""Claims, evidence, observations and reviews; bases; how much a part of a series can support."""

import pytest

from portolan.record import journal as journal_module
from portolan.record.audit.figures import figures_of_claims
from portolan.record.bases import BASES, REGISTRY_VERSION, registry_digest
from portolan.record.completeness import can_support, check_completeness, classify_rows
from portolan.record.journal import Journal
from portolan.record.types import SchemaError, check_body

QUANTITY = {"value": "2.6814", "unit": "nats/token", "basis": "eval.macro.nats", "scope": "plan"}
CLAIM = {
    "statement": "the final loss is 2.6814 nats per token",
    "subject": "target",
    "quantity": QUANTITY,
    "made_by": "the owner",
    "date": "2026-01-01",
    "locator": "README.md",
    "layer": "claimed",
}
EVIDENCE = {
    "text": "the history of the run",
    "snapshot_digest": "ab" * 32,
    "obtained_by": {"query": "history", "arguments": {"keys": "loss"}, "tool_version": "x 1"},
    "time": "2026-01-01T00:00:00.000Z",
    "access": "anonymous",
    "completeness": "sampled 847 of 13528",
    "relation": "supports",
}
OBSERVATION = {
    "text": "loss of attempt 1",
    "series": "train/loss",
    "basis": "ce.train.nats",
    "run": "target",
    "attempt": 1,
    "clock": "row",
    "points": "sha256:" + "ab" * 32,
}
REVIEW = {
    "text": "the evaluation was examined",
    "who": "a colleague",
    "independence": "same laboratory",
    "scope": "evaluation code",
    "findings": ["one domain counts twice"],
    "dispositions": ["fixed in change 4"],
}


def without(body, name):
    return {key: value for key, value in body.items() if key != name}


def test_complete_statements_are_accepted(journal):
    claim = journal.append("claim", CLAIM)
    evidence = journal.append("evidence", {**EVIDENCE, "refs": [claim]})
    journal.append("observation", {**OBSERVATION, "source": evidence})
    journal.append("review", {**REVIEW, "refs": [claim]})
    assert journal.get(claim).body["text"] == CLAIM["statement"]
    predicate = {**without(CLAIM, "quantity"), "predicate": "the schedule is linear"}
    journal.append("claim", predicate)


@pytest.mark.parametrize(
    ("record_type", "body"),
    [
        ("claim", without(CLAIM, "quantity")),
        ("claim", {**CLAIM, "predicate": "both"}),
        ("claim", without(CLAIM, "locator")),
        ("claim", without(CLAIM, "layer")),
        ("claim", {**CLAIM, "layer": "rumoured"}),
        ("claim", {**CLAIM, "date": "2026-1-1"}),
        ("claim", {**CLAIM, "due": 588}),
        ("claim", {**CLAIM, "quantity": {**QUANTITY, "basis": "eval.guess"}}),
        ("claim", {**CLAIM, "made_by": " "}),
        ("evidence", {**EVIDENCE, "completeness": "some"}),
        ("evidence", {**EVIDENCE, "completeness": "sampled 9 of 9"}),
        ("evidence", {**EVIDENCE, "access": "stolen"}),
        ("evidence", {**EVIDENCE, "time": "2026-01-01T00:00:00"}),
        ("evidence", {**EVIDENCE, "obtained_by": {"query": "history", "arguments": {}}}),
        ("observation", {**OBSERVATION, "source": "claim:" + "ab" * 32}),
        ("observation", {**OBSERVATION, "source": "evidence:" + "ab" * 32, "basis": "not_stated"}),
        ("observation", {**OBSERVATION, "source": "evidence:" + "ab" * 32, "points": "a.jsonl"}),
        ("review", {**REVIEW, "dispositions": []}),
        ("review", without(REVIEW, "independence")),
    ],
)
def test_incomplete_statements_are_refused(record_type, body):
    with pytest.raises(SchemaError):
        check_body(record_type, body)


def test_only_a_claim_may_leave_its_basis_unstated(bodies):
    unstated = {**QUANTITY, "basis": "not_stated"}
    assert check_body("claim", {**CLAIM, "quantity": unstated})["quantity"]["basis"] == "not_stated"
    plan = {**bodies["registration"]["plan"], "tokens": unstated}
    with pytest.raises(SchemaError, match="not in the registry"):
        check_body("registration", {**bodies["registration"], "plan": plan})


@pytest.mark.parametrize("word", ["never", "maximum", "peak", "no spikes", "at most", "Highest"])
def test_sampled_evidence_supports_no_extreme(journal, word):
    extreme = {**without(CLAIM, "quantity"), "statement": "of the loss", "predicate": f"{word} 3"}
    claim = journal.append("claim", extreme)
    for completeness in ("sampled 847 of 13528", "truncated"):
        body = {**EVIDENCE, "refs": [claim], "completeness": completeness}
        with pytest.raises(SchemaError, match="cannot support"):
            journal.append("evidence", body)
        journal.append("evidence", {**body, "relation": "context"})
    journal.append("evidence", {**EVIDENCE, "refs": [claim], "completeness": "full"})


def test_completeness_of_a_history():
    assert classify_rows(847, 0, 13_527) == "sampled 847 of 13528"
    assert classify_rows(13_528, 0, 13_527) == "full"
    assert check_completeness("sampled 847 of 13528") and can_support("a mean of 3", "truncated")
    for wrong in ((0, 0, 5), (7, 0, 5)):
        with pytest.raises(ValueError):
            classify_rows(*wrong)


def test_a_claim_is_superseded_not_edited(journal):
    first = journal.append("claim", CLAIM)
    moved = {**CLAIM, "quantity": {**QUANTITY, "value": "2.6800"}, "statement": "it is 2.6800"}
    journal.append("claim", moved, supersedes=[first])
    assert [figure.value for figure in figures_of_claims(journal.records())] == ["2.6800"]
    assert journal.get(first).body["quantity"]["value"] == "2.6814"


def test_a_cause_does_not_vanish(journal, bodies):
    event = journal.append("event", bodies["event"])
    silent = {**without(bodies["event"], "cause"), "text": "it was nothing"}
    with pytest.raises(SchemaError, match="would vanish"):
        journal.append("event", silent, supersedes=[event])


def test_a_new_registry_is_a_change_record(journal, monkeypatch):
    (genesis,) = journal.records()
    assert genesis.body["basis_registry"] == registry_digest()
    journal.append("claim", CLAIM)
    assert len(journal) == 2
    monkeypatch.setattr(journal_module, "registry_digest", lambda: "cd" * 32)
    monkeypatch.setattr("portolan.record.bases.registry_digest", lambda: "cd" * 32)
    reopened = Journal.open(journal.folder)
    reopened.append("claim", {**CLAIM, "statement": "another"})
    reopened.append("claim", {**CLAIM, "statement": "a third"})
    types = [(record.type, record.body.get("basis_registry")) for record in reopened.records()]
    assert types[2:] == [("change", "cd" * 32), ("claim", None), ("claim", None)]


def test_the_registry_is_complete():
    assert REGISTRY_VERSION == 2 and len(BASES) > 55
    for name, basis in BASES.items():
        assert basis.definition and name.endswith(("@", "()")) == bool(basis.qualifier), name
