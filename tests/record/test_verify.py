import hashlib
import random
import tracemalloc
from pathlib import Path

import pytest

from portolan.record.chain import NO_LINE, encode_line
from portolan.record.journal import Journal
from portolan.record.signing import Head, load_head
from portolan.record.verify import EXIT_CODES, LIMITS, verify_journal

NUM_EDITS = 1000


def write_long_journal(folder: Path, num_lines: int) -> None:
    """A valid unsigned journal of many lines, without the cost of an fsync a line."""
    folder.mkdir(parents=True)
    previous = NO_LINE
    with (folder / "journal.jsonl").open("wb") as file:
        for seq in range(num_lines):
            body = {"text": f"line {seq}", "kind": "save", "step": {"clock": "row", "n": seq}}
            kind = "event" if seq else "genesis"
            record, line = encode_line(seq, previous, kind, body, (), "2026-01-01T00:00:00.000Z")
            file.write(line + b"\n")
            previous = record.line_hash


@pytest.fixture
def signed(journal: Journal) -> Journal:
    """A signed journal of twelve lines."""
    for number in range(11):
        body = {"text": f"note {number} é", "kind": "decision", "step": "not_stated"}
        journal.append("event", body)
    journal.sign_head()
    return journal


def drop(lines, where, source):
    return lines[:where] + lines[where + 1 :], where


def swap(lines, where, source):
    other = source.choice([place for place in range(len(lines)) if place != where])
    changed = list(lines)
    changed[where], changed[other] = lines[other], lines[where]
    return changed, min(where, other)


def duplicate(lines, where, source):
    return [*lines[:where], lines[where], *lines[where:]], where + 1


def flip(lines, where, source):
    changed = list(lines)
    line = bytearray(lines[where])
    line[source.randrange(len(line))] ^= 1 << source.randrange(8)
    changed[where] = bytes(line)
    return changed, where


def insert(lines, where, source):
    body = {"text": f"forged {source.random()!r}", "kind": "decision", "step": "not_stated"}
    previous = journal_hash(lines[where - 1]) if where else NO_LINE
    kind = "event" if where else "genesis"
    time = "2026-01-01T00:00:00.000Z"
    _, line = encode_line(where, previous, kind, body, (), time)
    return [*lines[:where], line + b"\n", *lines[where:]], where


def journal_hash(line: bytes) -> str:
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()


@pytest.mark.parametrize("edit", [drop, swap, duplicate, flip, insert])
def test_every_edit_is_found_at_its_line(signed, edit):
    lines = signed.path.read_bytes().splitlines(keepends=True)
    source = random.Random(edit.__name__)
    for _ in range(NUM_EDITS // 5):
        where = source.randrange(len(lines))
        changed, bad = edit(lines, where, source)
        signed.path.write_bytes(b"".join(changed))
        verdict = verify_journal(signed.folder)
        if verdict.word == "truncated":
            assert verdict.num_lines == bad, (edit, where, verdict)
        else:
            assert (verdict.word, verdict.seq) == ("broken", bad), (edit, where, verdict)
        assert verdict.exit_code == 1
    signed.path.write_bytes(b"".join(lines))
    assert verify_journal(signed.folder).word == "ok"


def test_a_changed_time_is_attributed_to_its_own_line(signed):
    lines = signed.path.read_bytes().splitlines(keepends=True)
    for where, line in enumerate(lines):
        place = line.index(b'Z","type"') - 1
        changed = bytearray(line)
        changed[place] = ord("1") if line[place] != ord("1") else ord("2")
        signed.path.write_bytes(b"".join([*lines[:where], bytes(changed), *lines[where + 1 :]]))
        verdict = verify_journal(signed.folder)
        assert (verdict.word, verdict.seq) == ("broken", where)


def test_truncation_is_found_only_with_a_held_head(signed, tmp_path):
    held = tmp_path / "held.json"
    (head_file,) = (signed.folder / "heads").iterdir()
    held.write_bytes(head_file.read_bytes())
    lines = signed.path.read_bytes().splitlines(keepends=True)
    signed.path.write_bytes(b"".join(lines[:5]))
    assert str(verify_journal(signed.folder)) == "truncated(11, 5)"
    head_file.unlink()
    assert verify_journal(signed.folder).word == "unsigned"
    verdict = verify_journal(signed.folder, load_head(held))
    assert (str(verdict), verdict.exit_code) == ("truncated(11, 5)", 1)


def test_a_rewritten_chain_is_found_only_with_a_held_head(signed):
    held = Head(signed.head.journal, signed.head.seq, signed.head.head)
    lines = signed.path.read_bytes().splitlines(keepends=True)
    for path in (signed.folder / "heads").iterdir():
        path.unlink()
    signed.path.write_bytes(lines[0])
    forged = Journal.open(signed.folder)
    for number in range(11):
        body = {"text": f"forged {number}", "kind": "decision", "step": "not_stated"}
        forged.append("event", body)
    forged.sign_head()
    assert verify_journal(signed.folder).word == "ok"
    assert str(verify_journal(signed.folder, held)).startswith("broken(11, ")
    other = Head("0" * 64, 0, held.head)
    assert verify_journal(signed.folder, other).reason.endswith("another journal")


def test_words_and_exit_codes(signed):
    verdict = verify_journal(signed.folder)
    assert str(verdict) == f"ok(12, {signed.head.head})"
    assert (verdict.exit_code, verdict.signed_seq) == (0, 11)
    (head_file,) = (signed.folder / "heads").iterdir()
    content = head_file.read_bytes()
    for damage in (b"{}", content[:40], content.replace(b'"sig":"', b'"sig":"AAAA')):
        head_file.write_bytes(damage)
        assert (verify_journal(signed.folder).word) == "bad_signature"
    head_file.unlink()
    assert verify_journal(signed.folder).exit_code == 4
    with signed.path.open("ab") as file:
        file.write(b"{")
    torn = verify_journal(signed.folder)
    assert (torn.word, torn.exit_code) == ("torn_tail", 5)
    assert EXIT_CODES["broken"] == EXIT_CODES["truncated"] == EXIT_CODES["bad_signature"] == 1
    signed.path.unlink()
    assert verify_journal(signed.folder).word == "broken"


def test_lines_after_the_last_head_stay_ok(signed):
    signed.append("event", {"text": "later", "kind": "decision", "step": "not_stated"})
    verdict = verify_journal(signed.folder)
    assert (verdict.word, verdict.num_lines, verdict.signed_seq) == ("ok", 13, 11)


def test_memory_does_not_grow_with_the_journal(tmp_path):
    peaks = []
    for num_lines in (500, 4000):
        folder = tmp_path / str(num_lines)
        write_long_journal(folder, num_lines)
        tracemalloc.start()
        assert verify_journal(folder).num_lines == num_lines
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 50_000


def test_a_line_without_end_does_not_fill_memory(tmp_path):
    write_long_journal(tmp_path / "record", 2)
    with (tmp_path / "record" / "journal.jsonl").open("ab") as file:
        file.truncate(100 << 20)
    verdict = verify_journal(tmp_path / "record")
    assert (verdict.word, verdict.seq) == ("broken", 2)


def test_limits_are_stated():
    assert "Hashes prove sameness, not truth." in LIMITS
    assert len(LIMITS.splitlines()) >= 12
