"""Names of files inside a bundle: which are acceptable, and why others are not."""

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

from portolan.errors import PortolanError
from portolan.record.visible import is_plain, visible

MAX_NAME_BYTES = 512
MAX_PART_BYTES = 200
_RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))}
_FORBIDDEN = '\\:*?"<>|'


class BundleRefused(PortolanError):
    """The bundle is not one that can be opened without risk; nothing of it was written."""


def check_names(names: Iterable[str]) -> None:
    """Raise BundleRefused unless every name is a plain relative path, distinct on any system.

    Refused are absolute paths, `..`, drive letters, backslashes, control and bidi characters,
    reserved names, repeated names, and names that differ in case or Unicode form only, or that
    are both a file and a folder.
    """
    seen: dict[str, str] = {}
    folders: set[str] = set()
    for name in names:
        if reason := _fault(name):
            raise refusal(f"the name {visible(name)!r} {reason}")
        key = _fold(name)
        if key in seen:
            other = seen[key]
            what = "occurs twice" if other == name else f"and {other!r} are one file elsewhere"
            raise refusal(f"the name {name!r} {what}")
        seen[key] = name
        folders |= {str(parent) for parent in PurePosixPath(key).parents}
    for key in folders & seen.keys():
        raise refusal(f"the name {seen[key]!r} is a file and a folder")


def refusal(reason: str) -> BundleRefused:
    """The error for a bundle that is not opened."""
    return BundleRefused(
        f"the bundle is refused: {reason}",
        remedy="do not unpack it by other means; ask its sender for another copy",
    )


def _fault(name: str) -> str:
    if not is_plain(name):
        return "holds a character that hides or reorders text"
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        return "is empty or too long"
    if name.startswith("/"):
        return "is an absolute path"
    if any(character in name for character in _FORBIDDEN):
        return "holds a character that some systems treat as a drive or a separator"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "leaves its folder"
        if len(part.encode()) > MAX_PART_BYTES or part[-1] in ". ":
            return "has a part that some systems cannot store"
        if part.partition(".")[0].lower() in _RESERVED:
            return "has a part that some systems reserve"
    return ""


def _fold(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()
