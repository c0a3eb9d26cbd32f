"""Witness: an annotated git tag that names a head, to be pushed to a host that others read.

The receipt is the tag object itself: its id can be compared with the host's. Its time is the
tagger's own, so it shows that the head is held elsewhere, not since when.
"""

import hashlib
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from portolan.record.signing import Head
from portolan.record.times import format_time
from portolan.record.witness import Receipt, Testimony, WitnessError

SUFFIX = ".tag"
SIGN = "+sign"
_TAGGER = re.compile(rb"^tagger .* (\d{1,15}) [+-]\d{4}$", re.MULTILINE)


def obtain(statement: bytes, head: Head, place: str) -> Receipt:
    """Tag the present commit of a local repository; `place` may end in `+sign` for a signed tag."""
    repository = Path(place.removesuffix(SIGN))
    name = f"portolan/{head.journal[:16]}/{head.seq}"
    kind = "-s" if place.endswith(SIGN) else "-a"
    known = _git(repository, "tag", "--list", name)
    if not known.strip():
        _git(repository, "tag", kind, "-m", statement.decode(), name, "HEAD")
    content = _git(repository, "cat-file", "tag", name)
    return Receipt(content, SUFFIX, check(content, statement, None).time)


def check(content: bytes, statement: bytes, roots: Path | None) -> Testimony:
    """The tag's message must be the statement; the remark gives the object's ids to compare."""
    header, _, message = content.partition(b"\n\n")
    tagger = _TAGGER.search(header)
    if tagger is None or not header.startswith(b"object "):
        raise WitnessError("the file is not a git tag object")
    if message.splitlines()[:1] != [statement]:
        raise WitnessError("the tag names another head")
    try:
        moment = format_time(datetime.fromtimestamp(int(tagger[1]), UTC))
    except (OverflowError, ValueError, OSError) as error:
        raise WitnessError("the tag has no valid time") from error
    stored = b"tag %d\0" % len(content) + content
    # Git names objects by SHA-1 unless a repository was made otherwise.
    identity = hashlib.sha1(stored, usedforsecurity=False).hexdigest()
    other = hashlib.sha256(stored).hexdigest()
    signed = b"-----BEGIN" in message
    return Testimony(
        moment,
        independent=False,
        remark=f"git tag object {identity} (SHA-256 repository: {other[:40]}…)"
        + (", signed (check with git tag -v)" if signed else "")
        + "; compare it with the public host; the time is the tagger's own",
    )


def _git(repository: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments],
            capture_output=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise WitnessError(f"git could not be run: {error}", remedy="install git") from error
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise WitnessError(
            f"git {arguments[0]} failed in {repository}: {reason[-1] if reason else 'no reason'}",
            remedy="name a repository with a commit, and set user.name and user.email",
        )
    return done.stdout
