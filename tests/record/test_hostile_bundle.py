"""Bundles and record bodies from somebody who means harm: refused with a reason."""

import json
import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest

from portolan.record.bundle_names import BundleRefused, check_names
from portolan.record.bundle_read import unpack_bundle
from portolan.record.bundle_verify import verify_bundle
from portolan.record.chain import encode_line
from portolan.record.verify import verify_journal, verify_project


def make(path: Path, *entries: tuple, compression=zipfile.ZIP_STORED) -> Path:
    """An archive of (name, content) or (name, content, mode)."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content, *mode in entries:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.external_attr = (mode[0] if mode else 0o100644) << 16
            info.compress_type = compression
            archive.writestr(info, content)
    return path


def refused(path: Path, target: Path, reason: str) -> None:
    """Opening is refused for this reason, and neither the target nor its surroundings change."""
    target.mkdir(exist_ok=True)
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(BundleRefused, match=reason) as caught:
        unpack_bundle(path, target)
    assert sorted(target.parent.rglob("*")) == before
    assert str(caught.value).isascii()


NAMES = [
    ("../outside.txt", "leaves its folder"),
    ("a/../../outside.txt", "leaves its folder"),
    ("/etc/passwd", "absolute"),
    ("C:/x", "drive"),
    ("a\\..\\b", "drive"),
    ("a//b", "leaves its folder"),
    ("./a", "leaves its folder"),
    ("a\u202egpj.exe", "hides or reorders"),
    ("a\x1b[2Jb", "hides or reorders"),
    ("a\u200b", "hides or reorders"),
    ("a\nb", "hides or reorders"),
    ("nul.txt", "reserve"),
    ("a /b", "cannot store"),
    ("a./b", "cannot store"),
    ("x" * 201, "cannot store"),
    ("/".join(["x" * 99] * 6), "too long"),
    ("", "empty"),
]


@pytest.mark.parametrize(("name", "reason"), NAMES)
def test_names(name, reason):
    with pytest.raises(BundleRefused, match=reason):
        check_names([name])


def test_names_that_are_one_file_elsewhere():
    for pair in (["a", "a"], ["Readme", "README"], ["\u212b", "\u00e5"], ["\ufb01le", "file"]):
        with pytest.raises(BundleRefused, match=r"occurs twice|one file elsewhere"):
            check_names(pair)
    with pytest.raises(BundleRefused, match="a file and a folder"):
        check_names(["a", "A/b"])
    check_names(["a/b", "a/c", "b"])


@pytest.mark.parametrize(("name", "reason"), NAMES[:10])
def test_hostile_names_in_an_archive(tmp_path, name, reason):
    path = make(tmp_path / "b.zip", ("good.txt", b"x"), (name, b"x"))
    refused(path, tmp_path / "out", reason)


def test_links_devices_and_duplicates(tmp_path):
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFDIR):
        path = make(tmp_path / "b.zip", ("link", b"/etc/passwd", kind | 0o777))
        refused(path, tmp_path / "out", "link, a folder with content or a device")
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = make(tmp_path / "b.zip", ("a", b"1"), ("a", b"2"))
    refused(path, tmp_path / "out", "occurs twice")
    refused(make(tmp_path / "b.zip", ("a", b"1"), ("A", b"2")), tmp_path / "out", "one file")


class SmallDisk:
    free = 5


def test_zip_bombs(tmp_path, monkeypatch):
    path = make(tmp_path / "b.zip", ("a", bytes(20 << 20)), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 50_000
    refused(path, tmp_path / "out", "zip bomb")
    many = [(f"f{i}", bytes(1 << 20)) for i in range(20)]
    path = make(tmp_path / "b.zip", *many, compression=zipfile.ZIP_DEFLATED)
    refused(path, tmp_path / "out", r"it unpacks to 20971520 bytes .* zip bomb")
    monkeypatch.setattr("portolan.record.bundle_read.MAX_TOTAL_BYTES", 10)
    refused(make(tmp_path / "b.zip", ("a", b"x" * 11)), tmp_path / "out", "more than 10")
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SmallDisk())
    refused(make(tmp_path / "b.zip", ("a", b"x" * 11)), tmp_path / "out", "the disk has 5")


def test_an_entry_that_lies_about_its_size(tmp_path):
    """A header that says 10 bytes over a stream of half a million is cut off at once."""
    path = make(tmp_path / "b.zip", ("a", bytes(1 << 19)), compression=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x01\x02") + 24
    content[place : place + 4] = struct.pack("<L", 10)
    path.write_bytes(bytes(content))
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleRefused, match="another length"):
        unpack_bundle(path, tmp_path / "out")


def test_overlapping_entries(tmp_path):
    path = make(tmp_path / "b.zip", ("a", b"x" * 100), ("b", b"y" * 100))
    content = bytearray(path.read_bytes())
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = struct.pack("<L", 0)
    path.write_bytes(bytes(content))
    refused(path, tmp_path / "out", "shares its bytes")


def test_huge_headers_and_odd_ends(tmp_path):
    path = make(tmp_path / "b.zip", ("a", b"x"))
    good = path.read_bytes()
    end = struct.Struct("<4s4H2LH")
    cases = {
        b"": "too short",
        b"x" * 100: "not a plain ZIP",
        good[:-1]: "not a plain ZIP",
        good + b"tail": "not a plain ZIP",
        b"head" + good: "before its start",
        good[:-22] + end.pack(b"PK\5\6", 0, 0, 65535, 65535, 60, 32, 0): "64-bit",
        good[:-22] + end.pack(b"PK\5\6", 0, 0, 9, 9, 1 << 30, 32, 0): "its directory has 9",
        good[:-22] + end.pack(b"PK\5\6", 1, 0, 1, 1, 60, 32, 0): "split",
    }
    for content, reason in cases.items():
        path.write_bytes(content)
        refused(path, tmp_path / "out", reason)
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("a")
        info.extra = struct.pack("<HH", 0x9999, 1000) + bytes(1000)
        archive.writestr(info, b"x")
    refused(path, tmp_path / "out", "large header")
    directory = good.rindex(b"PK\x01\x02")
    for place, value, reason in ((8, 1, "encrypted"), (10, 12, "a method")):
        content = bytearray(good)
        content[directory + place] = value
        path.write_bytes(bytes(content))
        refused(path, tmp_path / "out", reason)
    content = bytearray(good)
    content[directory + 9] |= 8
    content[directory + 46] = 0xFF
    path.write_bytes(bytes(content))
    refused(path, tmp_path / "out", "not a whole ZIP")


def test_any_byte_may_be_changed(tmp_path):
    """Nothing but a refusal or a clean result, whatever single byte of an archive is changed."""
    path = make(tmp_path / "b.zip", ("a/b", b"x" * 20), ("c", b"y"))
    good = path.read_bytes()
    for place in range(len(good)):
        content = bytearray(good)
        content[place] ^= 0x80
        path.write_bytes(bytes(content))
        out = tmp_path / f"out-{place}"
        out.mkdir()
        try:
            unpack_bundle(path, out)
        except BundleRefused:
            continue


def test_a_folder_with_links_is_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("/etc")
    with pytest.raises(BundleRefused, match="link or a device"):
        verify_bundle(folder)
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleRefused, match="link or a device"):
        verify_bundle(folder)


def test_hostile_statements(journal):
    folder = journal.folder.parent
    statement = folder / "statement.dsse.json"
    for content in (b"", b"[" * 100_000, b"[]", b"{}", json.dumps({"payload": 1}).encode()):
        statement.write_bytes(content)
        report = verify_bundle(folder)
        assert report.exit_code == 1
        assert "statement.dsse.json: invalid" in str(report)


def forged(journal, record_type: str, body: dict) -> None:
    """Append a line whose body no schema has seen."""
    head = journal.head
    _, line = encode_line(
        head.seq + 1, head.head, record_type, body, (), "2026-01-01T00:00:00.000Z"
    )
    with journal.path.open("ab") as file:
        file.write(line + b"\n")


def test_paths_in_a_journal_never_leave_the_project(journal, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cret")
    entry = {"bytes": 6, "sha256": "0" * 64}
    first = journal.path.read_bytes()
    for path in ("../secret.txt", str(secret), "/dev/zero"):
        journal.path.write_bytes(first)
        forged(journal, "artifact", {"text": "x", "files": [entry | {"path": path}]})
        report = verify_project(journal.folder.parent)
        found = [(problem.reason, problem.place) for problem in report.problems]
        assert found == [("invalid", "record/journal.jsonl line 1")]


@pytest.mark.parametrize(
    "body",
    [
        {"files": 5},
        {"files": [{"path": 1}]},
        {"cause": 3, "evidence": 4},
        {"refs": {"a": {}}},
        {"run": [], "ordinal": "x"},
        {"head": 1, "merkle_root": []},
        {"kind": "\u202ex\x1b[2J"},
    ],
)
@pytest.mark.parametrize("record_type", ["artifact", "event", "attempt", "seal", "claim", "x"])
def test_malformed_bodies_are_reported_not_raised(journal, record_type, body):
    forged(journal, record_type, body)
    report = verify_project(journal.folder.parent)
    assert report.exit_code == 1 and report.problems[0].reason == "invalid"
    assert "\u202e" not in str(report) and "\x1b" not in str(report)


@pytest.mark.parametrize("depth", [70, 500, 900])
def test_nesting_is_bounded(journal, depth):
    """Such lines parse, but would exhaust whatever walks through them."""
    with journal.path.open("ab") as file:
        file.write(b'{"a":' + b"[" * depth + b"]" * depth + b"}\n{}\n")
    verdict = verify_journal(journal.folder)
    assert (verdict.word, verdict.seq) == ("broken", 1)
    assert "nested more than 64 levels" in verdict.reason
