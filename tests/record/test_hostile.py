"""What a stranger may send: long lines, deep and wrong JSON, hidden characters, paths, links."""

import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from portolan.canonical import canonical, parse
from portolan.errors import PortolanError, UsageError
from portolan.record.blobs import add_blob, blob_fault, blob_path, read_blob
from portolan.record.chain import MAX_LINE_BYTES
from portolan.record.journal import Journal, JournalDamaged
from portolan.record.verify import verify_journal, verify_project
from portolan.record.visible import visible

LONG_BYTES = 1 << 30


def test_a_line_of_a_gigabyte_takes_bounded_memory(journal):
    """A sparse file holds the line; what is read of it is limited by a constant."""
    with journal.path.open("r+b") as file:
        file.seek(LONG_BYTES)
        file.write(b"\n")
    for action in (
        lambda: verify_journal(journal.folder),
        lambda: Journal.open(journal.folder).damage,
    ):
        tracemalloc.start()
        result = str(action())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert f"longer than {MAX_LINE_BYTES} bytes" in result
        assert peak < 4 * MAX_LINE_BYTES
    with pytest.raises(JournalDamaged, match="line 1: it is longer"):
        Journal.open(journal.folder).append(
            "event", {"text": "x", "kind": "decision", "step": "unknown"}
        )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"body":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
        (b'{"body":NaN}', "the number NaN"),
        (b'{"body":1e5}', "the number 1e5"),
        (b'{"body":{},"body":{}}', "the key 'body' is repeated"),
        (b'{"body":"\\ud800"}', "no canonical JSON"),
        (b'{"body":"\xff"}', "not UTF-8"),
        (b'{"body":9007199254740993}', "exceeds 2^53-1"),
        (b"[]", "its keys are not those"),
        (b"", "not JSON"),
    ],
)
def test_lines_that_are_no_records_are_refused_with_the_reason(journal, line, reason):
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    with journal.path.open("ab") as file:
        file.write(b"{}\n")  # so that the line is not taken for an unfinished end
    verdict = verify_journal(journal.folder)
    assert (verdict.word, verdict.seq) == ("broken", 1)
    assert reason in verdict.reason


def test_hidden_characters_are_shown(journal):
    text = "loss 2.1\u202e4.1\u202c and \u2066x\u2069 \x1b[2J\u200b"
    shown = visible(text)
    assert shown == "loss 2.1\\u202e4.1\\u202c and \\u2066x\\u2069 \\u001b[2J\\u200b"
    assert visible("plain é 文 ✓") == "plain é 文 ✓"
    journal.append("event", {"text": text, "kind": "decision", "step": "unknown"})
    assert verify_journal(journal.folder).word == "unsigned"
    body = next(r.body for r in journal.records() if r.type == "event")
    assert body["text"] == text, "the record keeps what was said"


@pytest.mark.parametrize(
    "name",
    ["../../../../etc/passwd", "/etc/passwd", "a" * 63, "A" * 64, "", "a/" + "b" * 62, "a" * 65],
)
def test_a_blob_is_named_by_its_digest_only(journal, name):
    for action in (blob_path, read_blob, blob_fault):
        with pytest.raises(PortolanError, match="does not name a blob"):
            action(journal.folder, name)
    with pytest.raises(PortolanError, match="does not name a blob"):
        journal.read_blob("sha256:" + name)


def test_a_blob_that_is_a_link_is_refused_whatever_it_leads_to(journal, tmp_path):
    content = b"the right bytes"
    digest = hashlib.sha256(content).hexdigest()
    outside = tmp_path / "outside"
    outside.write_bytes(content)
    path = blob_path(journal.folder, digest)
    path.parent.mkdir(parents=True)
    for target in (outside, Path("/dev/zero"), tmp_path / "nowhere"):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(PortolanError, match="a symbolic link"):
            read_blob(journal.folder, digest)
    assert add_blob(journal.folder, content) == digest, "a link gives way to the bytes"
    assert blob_fault(journal.folder, digest) == "" and outside.read_bytes() == content
    path.unlink()
    os.mkfifo(path)
    assert blob_fault(journal.folder, digest) == "not a file"


def test_a_linked_journal_and_a_file_outside_are_refused(journal, tmp_path):
    project = journal.folder.parent
    outside = tmp_path / "secret"
    outside.write_bytes(b"secret")
    (project / "data").symlink_to(outside)
    digest = hashlib.sha256(b"secret").hexdigest()
    body = {
        "text": "a file", "kind": "dataset", "digests": {"x": digest}, "bytes": 6,
        "files": [{"path": "data", "bytes": 6, "sha256": digest}],
        "licence_declared": "MIT", "licence_concluded": "MIT", "redistribution": "public",
        "retain_until": "unknown", "completeness": "listed",
    }  # fmt: skip
    journal.append("artifact", body)
    (problem,) = verify_project(project).problems
    assert str(problem) == "data: unreadable (a symbolic link leads out of the project)"
    moved = tmp_path / "journal"
    journal.path.rename(moved)
    journal.path.symlink_to(moved)
    with pytest.raises(UsageError, match="symbolic link"):
        Journal.open(journal.folder)


SORTED_KEYS = {
    "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh",
    "1": "One", "\U0001f600": "Emoji: Grinning Face", "\u0080": "Control",
    "\u00f6": "Latin Small Letter O With Diaeresis",
}  # fmt: skip


def test_the_vectors_of_rfc_8785():
    """Its key order (3.2.3), its string escapes (3.2.2.2) and its nested sample, without floats."""
    order = [json.loads(part.split(":")[0]) for part in _members(canonical(SORTED_KEYS))]
    assert order == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    text = "\u20ac$\u000f\nA'\u0042\u0022\u005c\\\"/"
    expected = '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'
    assert canonical(text).decode() == expected
    assert canonical([56, {"d": True, "10": None, "1": []}]) == b'[56,{"1":[],"10":null,"d":true}]'
    controls = "".join(map(chr, range(0x20))) + "\u007f"
    short = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
    escaped = "".join(short.get(c, f"\\u{ord(c):04x}") for c in controls[:-1]) + "\u007f"
    assert canonical(controls) == f'"{escaped}"'.encode()
    assert parse(canonical(SORTED_KEYS)) == SORTED_KEYS


def _members(content: bytes) -> list[str]:
    return content.decode()[1:-1].split('",')
