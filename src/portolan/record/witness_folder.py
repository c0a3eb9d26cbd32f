"""Witness: a second folder, e.g. on another host or with another person, that keeps heads.

What lies there shows a cut-off or rewritten journal to whoever holds it. The receipt here proves
nothing alone, and its time is this machine's.
"""

from pathlib import Path

from portolan.canonical import CanonicalError, canonical, parse
from portolan.files import write_bytes_atomic
from portolan.record.signing import Head
from portolan.record.times import check_time, now
from portolan.record.witness import Receipt, Testimony, WitnessError

SUFFIX = ".copy"


def obtain(statement: bytes, head: Head, place: str) -> Receipt:
    """Write the head into the folder; a different file of that name is never replaced."""
    folder = Path(place)
    if not folder.is_dir():
        raise WitnessError(f"{place} is not a folder", remedy="make it, or mount it")
    copy = folder / f"{head.journal[:16]}-{head.seq}.json"
    if copy.exists() and copy.read_bytes() != statement:
        raise WitnessError(
            f"{copy} holds another head of this journal at line {head.seq}",
            remedy="the journal was rewritten: compare it with `portolan verify --head FILE`",
        )
    if not copy.exists():
        write_bytes_atomic(copy, statement)
    moment = now()
    content = canonical({"copy": copy.name, "time": moment, "statement": parse(statement)})
    return Receipt(content, SUFFIX, moment)


def check(content: bytes, statement: bytes, roots: Path | None) -> Testimony:
    """The note of what was copied must hold the statement."""
    try:
        note = parse(content)
        same = canonical(note["statement"]) == statement
        moment = check_time(note["time"])
        name = str(note["copy"])
    except (CanonicalError, KeyError, TypeError, ValueError) as error:
        raise WitnessError("the note of the copy is malformed") from error
    if not same:
        raise WitnessError("the note of the copy is of another head")
    return Testimony(
        moment,
        independent=False,
        remark=f"copied as {name}; ask its holder; the time is the project's own",
    )
