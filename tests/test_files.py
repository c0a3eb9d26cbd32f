"""Atomic writes: all or nothing, and storage errors with a remedy."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from portolan import files
from portolan.errors import StorageError


def test_write_replaces_the_whole_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    files.write_json_atomic(path, {"b": 0.1, "a": "ü"})
    assert path.read_text() == '{\n  "a": "ü",\n  "b": 0.1\n}\n'
    assert files.read_json(path) == {"a": "ü", "b": 0.1}
    files.write_bytes_atomic(path, b"other")
    assert path.read_bytes() == b"other"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_values_that_json_cannot_say_are_refused_before_anything_is_written(tmp_path) -> None:
    path = tmp_path / "file.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json_atomic(path, {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(step, tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((files.os, "fsync") if step == "fsync" else (Path, "replace")), fail)
    with pytest.raises(StorageError, match="No space left on device") as error:
        files.write_bytes_atomic(path, b"new")
    monkeypatch.undo()
    assert error.value.exit_code == 6
    assert str(path) in error.value.message
    assert "free some space" in error.value.remedy
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", sorted(files.STORAGE_REMEDIES))
def test_every_storage_error_has_its_remedy(number: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as error, files.storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert error.value.remedy == files.STORAGE_REMEDIES[number]
    assert os.strerror(number) in error.value.message


def test_other_errors_are_not_called_storage_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), files.storage_errors(tmp_path):
        (tmp_path / "none").read_bytes()


def test_digest_of_a_file_is_read_in_chunks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "READ_CHUNK_BYTES", 7)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)))
    assert files.sha256_file(path) == hashlib.sha256(bytes(range(256))).hexdigest()
