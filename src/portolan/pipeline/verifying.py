"""Verify a project or a bundle: needs nothing but the package, and no network."""

from pathlib import Path
from typing import TYPE_CHECKING

from portolan.console import say
from portolan.errors import UsageError
from portolan.files import sha256_file

if TYPE_CHECKING:
    from portolan.record.verify import Report

LIMITS_HINT = "what this cannot show: portolan verify --limits"


def verify(
    root: Path, bundle: Path | None, head: Path | None, tsa_root: Path | None, *, limits: bool
) -> int:
    """Print the verdict on journal, files, seal and witnesses; returns the exit code."""
    from portolan.record.bundle import STATEMENT_FILE
    from portolan.record.bundle_verify import verify_bundle
    from portolan.record.signing import load_head
    from portolan.record.verify import LIMITS, verify_project

    if limits:
        say(LIMITS)
        return 0
    if bundle is None and (root / STATEMENT_FILE).is_file():
        bundle = root
    if bundle is None and not (root / "record" / "journal.jsonl").is_file():
        raise UsageError(
            f"{root} has no record", remedy="name a project folder with -C DIR, and run it first"
        )
    for option in (head, tsa_root):
        if option is not None and not option.is_file():
            raise UsageError(f"{option} does not exist", remedy="name a file")
    known = None if head is None else load_head(head)
    if bundle is None:
        result = verify_project(root, known, tsa_roots=tsa_root)
    else:
        result = verify_bundle(bundle, known, tsa_roots=tsa_root)
    say(str(result))
    if bundle is not None and bundle.is_file():
        say(f"SHA-256 of the archive: {sha256_file(bundle)}")
    say(_summary(result))
    say(LIMITS_HINT)
    return result.exit_code


def _summary(result: "Report") -> str:
    """The outcome in one line, so that `ok` for the journal is not read as `ok` for everything."""
    if result.problems:
        count = len(result.problems)
        things = "1 thing is" if count == 1 else f"{count} things are"
        return f"result: {things} NOT as the record says; see above"
    if result.verdict.exit_code in (0, 4):
        signed = "" if result.verdict.word == "ok" else "; nothing here is signed"
        return f"result: everything that is here is as the record says{signed}"
    return "result: the journal is NOT whole; see the first line"
