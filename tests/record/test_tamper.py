"""Property: whatever one edit does to a journal, its blobs or its files, it is found and named."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portolan.record.artifacts import artifact_of
from portolan.record.blobs import blob_path
from portolan.record.journal import Journal
from portolan.record.signing import SigningKey
from portolan.record.verify import verify_journal, verify_project

NUM_LINES = 12


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed project with twelve lines, three blobs and two files."""
    project = tmp_path_factory.mktemp("sealed")
    SigningKey(bytes(range(32))).save(project / ".portolan" / "key.ed25519")
    journal = Journal.create(project / "record", "demo")
    for number in range(2):
        place = project / "runs" / f"file{number}.bin"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(bytes(range(100, 140)) * (number + 1))
        journal.append("artifact", artifact_of(project, [place], kind="metrics", text=place.name))
    for number in range(3):
        reference = journal.add_blob(f"log of attempt {number} é".encode())
        body = {"text": f"log {number}", "kind": "incident", "step": "unknown"}
        journal.append("event", {**body, "evidence": [reference]})
    for number in range(NUM_LINES - len(journal)):
        journal.append("event", {"text": f"note {number} é", "kind": "decision", "step": "unknown"})
    journal.sign_head()
    assert verify_project(project).exit_code == 0
    return project


def edit(content: bytes, data: st.DataObject) -> bytes:
    """One flipped, replaced, dropped, doubled or inserted byte or stretch, or a cut-off end."""
    where = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.integers(1, 40))
    piece = content[where : where + length]
    kinds = {
        "flip": bytes([content[where] ^ data.draw(st.integers(1, 255))]) + content[where + 1 :],
        "drop": content[where + length :],
        "double": piece + content[where:],
        "insert": data.draw(st.binary(min_size=1, max_size=20)) + content[where:],
        "truncate": b"",
    }
    return content[:where] + kinds[data.draw(st.sampled_from(sorted(kinds)))]


EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(data=st.data())
def test_any_edit_of_the_journal_is_found_at_or_before_its_line(sealed, data):
    path = sealed / "record" / "journal.jsonl"
    before = path.read_bytes()
    after = edit(before, data)
    if after == before:
        return
    first = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    line = before[:first].count(b"\n")
    try:
        path.write_bytes(after)
        verdict = verify_journal(sealed / "record")
        assert verdict.exit_code == 1, verdict
        named = verdict.num_lines if verdict.word == "truncated" else verdict.seq
        assert named in (line, line - 1), (str(verdict), line)
    finally:
        path.write_bytes(before)


@EXAMPLES
@given(data=st.data())
def test_any_edit_of_a_blob_or_file_is_named(sealed, data):
    blobs = sorted((sealed / "record" / "blobs" / "sha256").rglob("??*/*"))
    place = data.draw(st.sampled_from([*blobs, *sorted((sealed / "runs").iterdir())]))
    before = place.read_bytes()
    after = edit(before, data)
    if after == before:
        return
    try:
        place.write_bytes(after)
        (problem,) = verify_project(sealed).problems
        assert problem.place == place.relative_to(sealed).as_posix()
        assert problem.reason in ("changed", "truncated")
        place.unlink()
        (problem,) = verify_project(sealed).problems
        assert problem.reason == "missing"
    finally:
        place.write_bytes(before)


@EXAMPLES
@given(data=st.data())
def test_swapped_blobs_and_lines_are_found(sealed, data):
    blobs = sorted((sealed / "record" / "blobs" / "sha256").rglob("??*/*"))
    first, second = data.draw(st.permutations(blobs))[:2]
    contents = first.read_bytes(), second.read_bytes()
    journal = sealed / "record" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    a, b = sorted(data.draw(st.permutations(range(len(lines))))[:2])
    swapped = [*lines]
    swapped[a], swapped[b] = lines[b], lines[a]
    try:
        first.write_bytes(contents[1]), second.write_bytes(contents[0])
        assert {p.place for p in verify_project(sealed).problems} == {
            path.relative_to(sealed).as_posix() for path in (first, second)
        }
        journal.write_bytes(b"".join(swapped))
        verdict = verify_journal(sealed / "record")
        assert (verdict.word, verdict.seq) == ("broken", a)
    finally:
        first.write_bytes(contents[0]), second.write_bytes(contents[1])
        journal.write_bytes(b"".join(lines))


WRITER = """
import sys
from pathlib import Path
from portolan.record.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
number = 0
while True:
    journal.append("event", {"text": f"{sys.argv[2]} {number}", "kind": "save", "step": "unknown"})
    print(number, flush=True)
    number += 1
"""


def test_a_kill_during_appends_loses_nothing_that_was_acknowledged(journal, tmp_path):
    """Two writers append at once; both are killed at any moment; what they printed is there."""
    writers = []
    for who in "ab":
        output = (tmp_path / who).open("wb")
        command = [sys.executable, "-c", WRITER, str(journal.folder), who]
        writers.append((who, output, subprocess.Popen(command, stdout=output)))
    deadline = time.monotonic() + 60
    while any((tmp_path / who).stat().st_size < 40 for who in "ab"):
        assert time.monotonic() < deadline and all(w.poll() is None for _, _, w in writers)
        time.sleep(0.02)
    for _, output, process in writers:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        output.close()
    assert verify_journal(journal.folder).word in ("unsigned", "torn_tail")
    texts = [record.body.get("text") for record in Journal.open(journal.folder).records()]
    for who in "ab":
        acknowledged = len((tmp_path / who).read_text().split())
        own = [text for text in texts if text.startswith(f"{who} ")]
        assert own == [f"{who} {number}" for number in range(len(own))]
        assert acknowledged <= len(own) <= acknowledged + 1
    assert verify_journal(journal.folder).word == "unsigned"
    shutil.rmtree(journal.folder)


def test_the_right_blob_under_a_wrong_name_is_no_blob(sealed):
    path = next(iter((sealed / "record" / "blobs" / "sha256").rglob("??*/*")))
    other = blob_path(sealed / "record", "0" * 64)
    other.parent.mkdir(parents=True)
    path.rename(other)
    try:
        (problem,) = verify_project(sealed).problems
        assert problem.reason == "missing"
    finally:
        other.rename(path)
        other.parent.rmdir()
