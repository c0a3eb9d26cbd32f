import dataclasses
import json

import pytest
from tests.record.sealed import draft, fill, sealed

from portolan.record.chain import encode_line
from portolan.record.journal import Journal
from portolan.record.seal import seal_refusals, write_seal
from portolan.record.verdicts import Finding
from portolan.record.verify import verify_project

CONFLICT = Finding("18", "18.75", "conflict", "fact", "R10", "they differ")


def test_a_seal_covers_lines_and_blobs(journal, bodies):
    project = sealed(journal, bodies)
    report = verify_project(project)
    assert report.exit_code == 0
    assert report.seal.startswith(f"sealed: lines 0 to {len(journal) - 2}, Merkle root ")
    record = list(journal.records())[-1]
    assert json.loads(journal.read_blob(record.body["final_items"]))[1]["value"] == "0.5"
    # Lines after the seal change nothing about it.
    journal.append("event", {"text": "later", "kind": "decision", "step": "not_stated"})
    assert verify_project(project).seal == report.seal


@pytest.mark.parametrize("part", ["merkle_root", "head", "seq"])
def test_a_false_seal_is_named(journal, bodies, part):
    project = sealed(journal, bodies)
    seal = list(journal.records())[-1]
    body = json.loads(json.dumps(seal.body))
    if part == "merkle_root":
        body["merkle_root"] = "0" * 64
    elif part == "head":
        body["head"]["head"] = "0" * 64
    else:
        body["head"]["seq"] = 10**12
    head = journal.head
    _, line = encode_line(head.seq + 1, head.head, "seal", body, (), seal.time)
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    report = verify_project(project)
    (problem,) = report.problems
    assert report.exit_code == 1 and problem.place.endswith(f"line {head.seq + 1}")
    assert problem.detail.startswith("the seal: ")


def test_what_is_open_missing_or_unverified_is_refused(journal, bodies):
    ids = fill(journal, bodies)

    def refusals(problems=(), **fields):
        return seal_refusals(journal.records(), draft(ids, **fields), problems)

    assert refusals() == []
    assert "open conflict: 18 and 18.75" in refusals(findings=[CONFLICT])[0]
    published = dataclasses.replace(CONFLICT, published=True)
    assert refusals(findings=[published]) == []
    assert "verification found: x: missing" in refusals(["x: missing"])[0]
    assert "attempt has no end" in refusals(run={"status": "running"})[0]
    assert "no final checkpoint" in refusals(run={"final_checkpoint": "none"})[0]
    # A run that failed may be sealed as one that failed.
    assert refusals(run={"status": "failed", "final_checkpoint": "none"}) == []
    old = journal.get(ids["checkpoint"])
    unverified = dict(old.body) | {"completeness": "bytes_verified"}
    ids["checkpoint"] = journal.append("artifact", unverified, supersedes=[old.id])
    assert "only bytes verified, it was never restored" in refusals()[0]


def test_a_published_conflict_is_part_of_the_seal(journal, bodies):
    published = dataclasses.replace(CONFLICT, published=True)
    write_seal(journal, draft(fill(journal, bodies), findings=[published]))
    body = list(Journal.open(journal.folder).records())[-1].body
    assert body["published_conflicts"] == ["they differ"]
    assert json.loads(journal.read_blob(body["reconciliation"]))[0]["verdict"] == "conflict"
