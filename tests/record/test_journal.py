import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.canonical import canonical, digest
from portolan.errors import PortolanError, StorageError, UsageError
from portolan.record import journal as journal_module
from portolan.record import verify as verify_module
from portolan.record.chain import record_id
from portolan.record.journal import Journal, JournalDamaged
from portolan.record.merkle import merkle_root
from portolan.record.signing import (
    HEAD_PAYLOAD_TYPE,
    BadSignature,
    Head,
    SigningKey,
    key_id,
    pre_authentication_encoding,
    verify_envelope,
)
from portolan.record.verify import verify_journal

PUBLIC_KEY = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"


def note(text: str, kind: str = "decision") -> dict:
    return {"text": text, "kind": kind, "step": "not_stated"}


@pytest.fixture
def golden(tmp_path):
    """The three lines whose ids, hashes and signature are known."""
    SigningKey(bytes(range(32))).save(tmp_path / ".portolan" / "key.ed25519")
    journal = Journal.create(
        tmp_path / "record",
        "demo",
        body={"key": PUBLIC_KEY, "name": "demo"},
        time="2026-01-01T00:00:00.000Z",
        schema=False,
    )
    first = journal.append(
        "event", {"kind": "decision", "text": "start"}, time="2026-01-01T00:00:01.000Z"
    )
    journal.append(
        "event",
        {"kind": "correction", "text": "begin"},
        supersedes=[first],
        time="2026-01-01T00:00:02.000Z",
    )
    return journal


def test_golden_lines(golden):
    records = list(golden.records())
    assert [record.id.partition(":")[2] for record in records] == [
        "fb2a749bbacf3b855dbdbeeb94f319d76c74654a10cedc3c65adcd00d98e4616",
        "ba2da752885b7710a7ae1983d340d4bc7ae02a9b2ed75135a174327f088b1b15",
        "78d4a803549ca4ff918044a3d3918ec674e46a3f70ab9f4c4f06ada062dbbfd9",
    ]
    assert [record.line_hash for record in records] == [
        "7ff57dfe506edf71599cf997f907963c67cd492272fe7f77943c9413f99ce128",
        "62514ff2d2e603da0879097674bc76d5a0306b6ab0da9286a8acfab625153021",
        "3b5f6572412904b1b35db00fba261f07e88efd59e5423abe747edb4ecc5f2386",
    ]
    lines = golden.path.read_bytes().splitlines()
    assert [len(line) for line in lines] == [332, 274, 348]
    assert merkle_root(lines[:2]) == (
        "744dcdb491a5374d9b6683247806b4762fb6d21c9f18592a394f29cf74028d09"
    )
    assert merkle_root([]) == ("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")


def test_golden_merkle_root_with_a_blob(golden):
    root = "30a35942347b84efcee3e4935a693860c0a2adf90940da7bf953645cf1b3ac3a"
    assert golden.merkle_root() == root
    assert golden.add_blob(b"hello\n") == (
        "sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
    )
    assert golden.merkle_root() == root, "a blob counts once a record refers to it"
    blob = bytes.fromhex("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03")
    assert merkle_root([*golden.path.read_bytes().splitlines(), blob]) == (
        "cb48c3860e9c3287c59d27f8615bd71d13bb3f19134c6548d8354a1578ff9f61"
    )


def test_golden_head(golden):
    path = golden.sign_head(time="2026-01-01T00:00:03.000Z")
    assert path is not None and path.name == "2.dsse.json"
    envelope = json.loads(path.read_bytes())
    head = Head(golden.head.journal, 2, golden.head.head, "2026-01-01T00:00:03.000Z")
    assert len(head.payload()) == 200 and len(HEAD_PAYLOAD_TYPE) == 37
    encoded = pre_authentication_encoding(HEAD_PAYLOAD_TYPE, head.payload())
    assert encoded.startswith(b"DSSEv1 37 application/vnd.portolan.head.v1+json 200 {")
    assert hashlib.sha256(encoded).hexdigest() == (
        "72e47e21271c85be4d62b0b31e8850fde68512c4c93cc29f2d69eace566c5ae0"
    )
    assert envelope["signatures"] == [
        {
            "keyid": "56475aa75463474c0285df5dbf2bcab73da651358839e9b77481b2eab107708c",
            "sig": "bRJI84SjFJWBkXtLUWqAZvntyRDFnVGlN7oLmSdmAAZSKf1DC47iQQiKHl8rK3nZkdlxGCXV33H5"
            "jsmqYZRDBw==",
        }
    ]
    assert key_id(PUBLIC_KEY) == envelope["signatures"][0]["keyid"]
    assert verify_envelope(envelope, PUBLIC_KEY) == head.payload()
    other = SigningKey(bytes(32)).public_key
    with pytest.raises(BadSignature):
        verify_envelope(envelope, other)


def test_golden_forecast_id():
    body = {"a": "1.5", "b": ["x", "y"]}
    assert digest(body) == "41d688a2ca7df989aa59b118a0735f6b9a6cf8e45b37bcea8071c5e320700ff8"
    assert record_id("forecast", body, []) == (
        "forecast:30d8664c97ed60ef5a0a08a356fe2607a199744d80804e396ec24a79b801f763"
    )


def test_append_is_idempotent_and_survives_reopening(journal):
    first = journal.append("event", note("one"))
    assert journal.append("event", note("one")) == first
    assert len(journal) == 2
    again = Journal.open(journal.folder)
    assert again.append("event", note("one")) == first
    assert again.head == journal.head and first in again
    assert again.get(first).body["text"] == "one"


def test_key_is_private_and_outside_the_record(journal):
    assert not journal.key_path.is_relative_to(journal.folder)
    assert stat.S_IMODE(journal.key_path.stat().st_mode) == 0o600
    seed = journal.key_path.read_text().strip()
    assert seed not in repr(SigningKey.load(journal.key_path))
    for path in journal.folder.rglob("*"):
        assert path.is_dir() or seed.encode() not in path.read_bytes()


def test_two_writers_take_turns(journal):
    other = Journal.open(journal.folder)
    for number in range(5):
        journal.append("event", note(f"a{number}"))
        other.append("event", note(f"b{number}"))
    journal.append("event", note("end"))
    texts = [record.body["text"] for record in journal.records()][1:]
    assert texts == [f"{who}{number}" for number in range(5) for who in "ab"] + ["end"]


def append_many(folder, who):
    journal = Journal.open(folder)
    for number in range(20):
        journal.append("event", note(f"{who} {number}"))


def test_processes_append_at_once(journal):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=append_many, args=(journal.folder, i)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    verdict = verify_journal(journal.folder)
    assert (verdict.word, verdict.num_lines) == ("unsigned", 41)


def test_crash_at_any_byte_of_an_append_loses_no_complete_line(journal, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 300 recoveries would wait for the disk
    journal.append("event", note("kept"))
    before = journal.path.read_bytes()
    journal.append("event", note("torn"))
    after = journal.path.read_bytes()
    for cut in range(len(before), len(after)):
        journal.path.write_bytes(after[:cut])
        if cut > len(before):
            assert verify_journal(journal.folder).word == "torn_tail"
        opened = Journal.open(journal.folder)
        records = list(opened.records())
        assert journal.path.read_bytes().startswith(before)
        assert len(records) == (2 if cut == len(before) else 3)
        if cut > len(before):
            event = records[-1].body
            assert event["kind"] == "journal_recovery"
            assert opened.read_blob(event["evidence"][0]) == after[len(before) : cut]
        assert verify_journal(journal.folder).word == "unsigned"


def test_crash_inside_recovery_still_records_the_tail(journal, monkeypatch):
    journal.append("event", note("kept"))
    with journal.path.open("ab") as file:
        file.write(b'{"body":{"te')
    real = Journal._finish_recovery
    monkeypatch.setattr(Journal, "_finish_recovery", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Journal.open(journal.folder)
    monkeypatch.setattr(Journal, "_finish_recovery", real)
    opened = Journal.open(journal.folder)
    assert [record.body.get("kind") for record in opened.records()][-1] == "journal_recovery"
    assert not list(journal.folder.glob(".recovery*"))


def test_last_line_that_is_no_json_is_a_torn_tail(journal):
    with journal.path.open("ab") as file:
        file.write(b"\0" * 100 + b"\n")
    assert verify_journal(journal.folder).word == "torn_tail"
    Journal.open(journal.folder).append("event", note("on"))
    assert verify_journal(journal.folder).num_lines == 3


def test_wrong_hash_inside_makes_it_read_only(journal):
    journal.append("event", note("one"))
    journal.append("event", note("two"))
    content = journal.path.read_bytes()
    journal.path.write_bytes(content.replace(b'"one"', b'"uno"'))
    opened = Journal.open(journal.folder)
    assert "line 1" in opened.damage
    with pytest.raises(JournalDamaged, match="line 1: its id"):
        opened.append("event", note("three"))
    assert [record.seq for record in opened.records()] == [0]
    assert journal.path.read_bytes().count(b"\n") == 3


def test_a_signed_end_is_never_taken_for_a_torn_tail(journal):
    journal.append("event", note("one"))
    journal.sign_head()
    journal.path.write_bytes(journal.path.read_bytes()[:-5])
    with pytest.raises(JournalDamaged):
        Journal.open(journal.folder).append("event", note("two"))
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(lines[0])
    with pytest.raises(JournalDamaged, match="signed head covers line 1"):
        Journal.open(journal.folder).append("event", note("two"))


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_full_or_read_only_disk(journal, monkeypatch, failing, code):
    before = journal.path.read_bytes()
    real = os.pwrite

    def fail(descriptor, content=b"", offset=0):
        if failing == "pwrite" and len(content) > 10:
            return real(descriptor, content[:10], offset)  # the disk fills up half-way
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(journal_module.os, failing, fail)
    with pytest.raises(StorageError, match=r"journal\.jsonl"):
        journal.append("event", note("lost"))
    monkeypatch.undo()
    assert journal.path.read_bytes() == before
    journal.append("event", note("kept"))
    assert verify_journal(journal.folder).num_lines == 2


def test_locked_journal(journal, monkeypatch):
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_SECONDS", 0.05)
    with journal.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="locked"):
            journal.append("event", note("one"))
    journal.append("event", note("one"))


def test_usage_errors(journal, tmp_path):
    with pytest.raises(UsageError, match="exists already"):
        Journal.create(journal.folder, "again")
    with pytest.raises(UsageError, match="no journal"):
        Journal.open(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="one genesis"):
        journal.append("genesis", {"name": "x", "key": "none"})
    with pytest.raises(UsageError, match="blob"):
        journal.append("event", note("x" * (17 << 20)))
    assert Journal.open_or_create(journal.folder, "demo").head == journal.head
    assert len(Journal.open_or_create(tmp_path / "p" / "record", "new")) == 1


def test_key_rotation(journal):
    journal.append("event", note("one"))
    journal.sign_head()
    old = SigningKey.load(journal.key_path).public_key
    journal.rotate_key("the laptop changed hands")
    assert SigningKey.load(journal.key_path).public_key == journal.public_key != old
    journal.append("event", note("two"))
    journal.sign_head()
    verdict = verify_journal(journal.folder)
    assert (verdict.word, verdict.signed_seq) == ("ok", 3)
    heads = sorted((journal.folder / "heads").iterdir())
    heads[1].write_bytes(heads[2].read_bytes())
    assert verify_journal(journal.folder).word == "bad_signature"


def test_interrupted_key_rotation_is_finished_by_the_next_head(journal):
    following = SigningKey.generate()
    following.save(journal.key_path.with_name("key.ed25519.next"))
    journal.append(
        "key", {"key": following.public_key, "reason": "test", "text": "the signing key changes"}
    )
    reopened = Journal.open(journal.folder)
    reopened.sign_head()
    assert SigningKey.load(journal.key_path).public_key == following.public_key
    reopened.append("event", note("after"))
    reopened.sign_head()
    assert verify_journal(journal.folder).word == "ok"


def test_missing_private_key(journal):
    journal.key_path.unlink()
    Journal.open(journal.folder).append("event", note("one"))
    with pytest.raises(PortolanError, match="private key"):
        Journal.open(journal.folder).sign_head()


def test_without_the_signing_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "signing_available", lambda: False)
    monkeypatch.setattr(verify_module, "signing_available", lambda: False)
    journal = Journal.create(tmp_path / "record", "plain")
    journal.append("event", note("one"))
    assert journal.sign_head() is None and journal.public_key == "none"
    assert verify_journal(journal.folder).word == "unsigned"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@settings(max_examples=25)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), cut=st.integers(1, 200), data=st.data())
def test_any_texts_any_cut(tmp_path_factory, texts, cut, data):
    journal = Journal.create(tmp_path_factory.mktemp("p") / "record", "demo")
    identities = [journal.append("event", note(text)) for text in texts]
    assert len(set(identities)) == len(set(texts)) == len(journal) - 1
    content = journal.path.read_bytes()
    for line, record in zip(content.splitlines(), journal.records(), strict=True):
        assert canonical(json.loads(line)) == line
        assert record.id == record_id(record.type, record.body, record.supersedes)
    cut = min(cut, len(content.splitlines()[-1]))
    journal.path.write_bytes(content[:-cut])
    reopened = Journal.open(journal.folder)
    for text in texts:
        reopened.append("event", note(text))
    kept = {record.body.get("text") for record in reopened.records()}
    assert set(texts) <= kept
