from pathlib import Path

import pytest

from portolan.errors import UsageError
from portolan.record.artifacts import artifact_of
from portolan.record.blobs import blob_path
from portolan.record.chain import encode_line
from portolan.record.journal import Journal
from portolan.record.verify import verify_project

FILES = {
    "metric segment": "runs/target/metrics/segment-1-0-9.parquet",
    "checkpoint": "runs/target/checkpoints/permanent/step-10/attempt-1/w.bin",
    "token shard": "corpus/tokens/store_ab/c00q0.arrow",
    "forecast": "forecasts/first.json",
    "tokenizer": "corpus/tokens/store_ab/tokenizer.json",
}


@pytest.fixture
def project(journal: Journal) -> Path:
    """A project whose journal names five files."""
    folder = journal.folder.parent
    kinds = ("metrics", "checkpoint", "dataset", "forecast", "tokenizer")
    for (name, path), kind in zip(FILES.items(), kinds, strict=True):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(name.encode() * 10)
        journal.append("artifact", artifact_of(folder, [place], kind=kind, text=name))
    journal.sign_head()
    return folder


def test_untouched_project(project):
    report = verify_project(project)
    assert (report.exit_code, report.num_files, report.problems) == (0, 5, ())
    assert str(report).startswith("ok(6, ")


@pytest.mark.parametrize("path", FILES.values())
@pytest.mark.parametrize("damage", ["changed", "missing", "truncated", "longer"])
def test_every_damaged_file_is_named(project, path, damage):
    place = project / path
    content = place.read_bytes()
    if damage == "missing":
        place.unlink()
    else:
        edits = {"changed": b"X" + content[1:], "truncated": content[:-1], "longer": content + b"X"}
        place.write_bytes(edits[damage])
    report = verify_project(project)
    expected = "changed" if damage == "longer" else damage
    assert [(p.place, p.reason) for p in report.problems] == [(path, expected)]
    assert report.exit_code == 1 and f"{path}: {expected}" in str(report)


def test_a_superseded_artifact_is_not_looked_for(project):
    journal = Journal.open(project / "record")
    old = next(r for r in journal.records() if r.body.get("kind") == "checkpoint")
    (project / FILES["checkpoint"]).unlink()
    journal.append(
        "event",
        {"text": "pruned by plan", "kind": "decision", "step": "not_stated"},
        supersedes=[old.id],
    )
    assert verify_project(project).exit_code == 0
    place = project / FILES["forecast"]
    place.write_bytes(b"amended")
    journal.append("artifact", artifact_of(project, [place], kind="forecast", text="amended"))
    assert verify_project(project).problems == ()


def test_damaged_blob_and_invalid_record(project):
    journal = Journal.open(project / "record")
    reference = journal.add_blob(b"log")
    body = {"text": "log kept", "kind": "incident", "step": "unknown", "evidence": [reference]}
    journal.append("event", body)
    head = journal.head
    secret = {"text": "x", "kind": "rumour", "step": "unknown"}
    _, line = encode_line(head.seq + 1, head.head, "event", secret, (), "2026-01-01T00:00:00.000Z")
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    blob = blob_path(journal.folder, reference.removeprefix("sha256:"))
    blob.write_bytes(b"lag")
    problems = {(p.place, p.reason) for p in verify_project(project).problems}
    assert problems == {
        ("record/journal.jsonl line 7", "invalid"),
        (blob.relative_to(project).as_posix(), "changed"),
    }


def test_broken_journal_still_reports_files(project):
    journal = project / "record" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:5], lines[5].replace(b"tokenizer", b"tokenixer")]))
    (project / FILES["forecast"]).unlink()
    report = verify_project(project)
    assert report.verdict.word == "broken" and report.verdict.seq == 5
    assert [problem.place for problem in report.problems] == [FILES["forecast"]]


def test_folders_are_described_file_by_file(project):
    artifact = artifact_of(project, [project / "corpus"], kind="dataset", text="the corpus")
    assert [entry.path for entry in artifact.files] == [FILES["token shard"], FILES["tokenizer"]]
    with pytest.raises(UsageError, match="does not exist"):
        artifact_of(project, [project / "nowhere"], kind="dataset", text="x")
