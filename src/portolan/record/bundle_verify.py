"""Verification of a bundle: unpacked safely, then its record, its statement and every file."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from portolan.canonical import CanonicalError, parse
from portolan.errors import UsageError
from portolan.files import sha256_file
from portolan.record.bundle import STATEMENT_FILE
from portolan.record.bundle_names import check_names, refusal
from portolan.record.bundle_read import MAX_FILES, unpack_bundle
from portolan.record.chain import ChainFault, ChainReader
from portolan.record.exports import PAYLOAD_TYPE, STATEMENT_TYPE
from portolan.record.signing import (
    BadSignature,
    Head,
    envelope_payload,
    signing_available,
    verify_envelope,
)
from portolan.record.verify import Problem, Report, verify_project

MAX_STATEMENT_BYTES = 16 << 20


def verify_bundle(
    bundle: Path, known_head: Head | None = None, *, tsa_roots: Path | None = None
) -> Report:
    """Verify a bundle file, or a folder that one was unpacked to.

    BundleRefused if it cannot be opened without risk. Writes only to a temporary folder that is
    removed again.
    """
    if bundle.is_dir():
        _refuse_links(bundle)
        return _verify_folder(bundle, known_head, tsa_roots)
    if not bundle.is_file():
        raise UsageError(f"there is no bundle {bundle}", remedy="name a .zip file or a folder")
    with tempfile.TemporaryDirectory(prefix="portolan-bundle-") as name:
        unpack_bundle(bundle, Path(name))
        return _verify_folder(Path(name), known_head, tsa_roots)


def _verify_folder(folder: Path, known_head: Head | None, tsa_roots: Path | None) -> Report:
    report = verify_project(folder, known_head, tsa_roots=tsa_roots, is_bundle=True)
    known = {problem.place for problem in report.problems}
    found = [p for p in _statement_problems(folder) if p.place not in known]
    return replace(report, problems=(*report.problems, *found))


def _statement_problems(folder: Path) -> Iterator[Problem]:
    """Files that the statement does not name as they are, and a signature that does not fit."""
    path = folder / STATEMENT_FILE
    try:
        if not path.is_file() or path.stat().st_size > MAX_STATEMENT_BYTES:
            yield Problem(STATEMENT_FILE, "missing", "")
            return
        envelope = parse(path.read_bytes())
        statement = parse(envelope_payload(envelope, PAYLOAD_TYPE))
        named = _subjects(statement)
    except (CanonicalError, BadSignature, KeyError, TypeError) as error:
        reason = getattr(error, "message", "it is not an in-toto statement")
        yield Problem(STATEMENT_FILE, "invalid", "", reason)
        return
    yield from _signature_problems(folder, envelope)
    present = set(_walk(folder)) - {STATEMENT_FILE}
    for name in sorted(named.keys() | present):
        if name not in present:
            yield Problem(name, "missing", "")
        elif name not in named:
            yield Problem(name, "invalid", "", "the statement does not name it")
        elif sha256_file(folder / name) != named[name]:
            yield Problem(name, "changed", "")


def _subjects(statement: Any) -> dict[str, str]:
    if statement["_type"] != STATEMENT_TYPE:
        raise KeyError("_type")
    named = {str(item["name"]): str(item["digest"]["sha256"]) for item in statement["subject"]}
    check_names(named)
    return named


def _signature_problems(folder: Path, envelope: Any) -> Iterator[Problem]:
    key = _newest_key(folder)
    if key == "none" or not signing_available():
        return
    try:
        verify_envelope(envelope, key, PAYLOAD_TYPE)
    except (BadSignature, ValueError) as error:
        reason = getattr(error, "message", "the journal's key is malformed")
        yield Problem(STATEMENT_FILE, "invalid", "", reason)


def _newest_key(folder: Path) -> str:
    key = "none"
    try:
        with (folder / "record" / "journal.jsonl").open("rb") as file:
            for record in ChainReader().read(file):
                if record.type in ("genesis", "key"):
                    key = str(record.body.get("key", "none"))
    except (ChainFault, OSError):
        return key
    return key


def _walk(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        for name in names:
            yield (Path(place) / name).relative_to(folder).as_posix()


def _refuse_links(folder: Path) -> None:
    """A folder from elsewhere may hold links that lead out of it, or no end of files."""
    count = 0
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place) / name
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise refusal(f"{path.relative_to(folder).as_posix()!r} is a link or a device")
        count += len(names)
        if count > MAX_FILES:
            raise refusal(f"it holds more than {MAX_FILES} files")
