"""The folder of an audit: a table of claims, telemetry, and what the auditor adds in audit.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from portolan.errors import UsageError
from portolan.record.audit.figures import Figure, read_claims
from portolan.record.audit.links import Link, LinkKind, Recorder
from portolan.record.bases import parse_basis
from portolan.record.types_runs import RunRole
from portolan.record.verdicts import Explanation

AUDIT_FILE = "audit.toml"
CLAIMS_FILES = ("claims.csv", "claims.json")
TELEMETRY_FILE = "telemetry.csv"
MAX_FILE_BYTES = 4 << 20


def _plain_name(name: str) -> str:
    if Path(name).name != name or name.startswith("."):
        raise ValueError(f"{name!r} is not the name of a file beside audit.toml")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]


class Strict(BaseModel):
    """Base of the tables in audit.toml: frozen, and no field that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkTable(Strict):
    """A `[[link]]`: see `portolan.record.audit.links.Link`."""

    kind: LinkKind
    figures: tuple[str, ...] = Field(min_length=1)
    recorder: Recorder
    text: str
    source: str = "not_stated"
    url: str = ""
    date: str = "not_stated"
    assumption: bool = False
    from_step: int | None = None


class NoteTable(Strict):
    """A remark beside a verdict, tagged as fact or inference."""

    text: str
    status: Explanation


class SumTable(Strict):
    """A line of arithmetic; with `id` and `basis` its value joins the figures of the case."""

    text: str
    expression: str
    unit: str = ""
    digits: int = Field(default=7, ge=1, le=30)
    id: str = ""
    basis: str = ""


class CaseTable(Strict):
    """A `[[case]]`: a question that several figures answer. `compare` holds "left ~ right"."""

    id: str
    title: str
    question: str = ""
    compare: tuple[str, ...] = ()
    sums: tuple[SumTable, ...] = ()
    notes: tuple[NoteTable, ...] = ()


class RunTable(Strict):
    """A `[[run]]` of the lineage: where it forked and how far it came, in completed updates."""

    name: str
    role: RunRole = "production"
    fork: int = Field(ge=0)
    completed: int = Field(ge=0)
    source: str = "not_stated"
    url: str = ""


class AuditTable(Strict):
    """All of audit.toml."""

    title: str
    subject: str = ""
    introduction: str = ""
    as_of: str = "not_stated"
    recipe: str = ""
    claims: FileName = ""
    telemetry: tuple[FileName, ...] = ()
    shared: tuple[str, ...] = ()
    case: tuple[CaseTable, ...] = ()
    link: tuple[LinkTable, ...] = ()
    run: tuple[RunTable, ...] = ()


@dataclass(frozen=True)
class Audit:
    """What a reconciliation works on, read from a folder and checked."""

    table: AuditTable
    figures: tuple[Figure, ...]
    links: tuple[Link, ...]
    telemetry: tuple[Path, ...]


def read_audit(folder: Path) -> Audit:
    """Read an audit folder; without audit.toml, the table of claims and the telemetry suffice.

    Raises:
        UsageError: no claims, or a file is wrong; the message names the place.
    """
    path = folder / AUDIT_FILE
    table = _read_table(path) if path.is_file() else AuditTable(title=folder.resolve().name)
    names = (table.claims,) if table.claims else CLAIMS_FILES
    claims = next((folder / name for name in names if (folder / name).is_file()), None)
    if claims is None:
        raise UsageError(
            f"{folder} holds no table of claims",
            remedy=f"put {' or '.join(names)} there, or name a project with -C",
        )
    figures = tuple(read_claims(claims))
    telemetry = [folder / name for name in table.telemetry]
    if not telemetry and (folder / TELEMETRY_FILE).is_file():
        telemetry = [folder / TELEMETRY_FILE]
    links = tuple(Link(**link.model_dump()) for link in table.link)
    _check_names(table, figures)
    return Audit(table, figures, links, tuple(telemetry))


def pair_of(text: str) -> tuple[str, str]:
    """The two ids of "left ~ right"; one id alone is examined by itself."""
    left, _, right = (part.strip() for part in text.partition("~"))
    return left, right


def _read_table(path: Path) -> AuditTable:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UsageError(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        content: Mapping[str, Any] = tomllib.loads(path.read_text("utf-8"))
        return AuditTable.model_validate(content)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path.name} is not TOML: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"{path.name}: {place}: {problem['msg']}") from error


def _check_names(table: AuditTable, figures: tuple[Figure, ...]) -> None:
    """Every id that audit.toml uses exists, and a basis that it names is registered."""
    known = {figure.id for figure in figures}
    sums = {item.id for case in table.case for item in case.sums if item.id}
    used = [(name, "shared") for name in table.shared]
    used += [(name, f"the link {link.text!r}") for link in table.link for name in link.figures]
    for case in table.case:
        for text in case.compare:
            used += [(name, f"case {case.id}") for name in pair_of(text) if name]
        for item in case.sums:
            if item.basis:
                parse_basis(item.basis)
    for name, place in used:
        if not name.startswith("=") and name not in known | sums:
            raise UsageError(
                f"{AUDIT_FILE}: {place} names {name}, which the table of claims does not have"
            )
