"""What an owner does for strangers: ask whether they can fetch, find witnesses, seal, bundle."""

from pathlib import Path

from portolan.console import errors, say
from portolan.errors import UsageError
from portolan.files import sha256_file
from portolan.project import Project
from portolan.record.journal import Journal
from portolan.record.reach_locators import NO_LOCATOR, Citation
from portolan.record.visible import visible

JOURNAL = Path("record", "journal.jsonl")
DEFAULT_BUNDLE = "bundle.zip"


def reach(
    root: Path,
    folder: Path | None,
    *,
    as_json: bool,
    private: bool,
    seconds: float,
    max_bytes: int,
) -> int:
    """Ask for every locator that a project or an audit folder cites; returns the exit code.

    A project keeps what came in its record.
    """
    from portolan.pipeline.provenance import code_digest
    from portolan.record.anonymous import AnonymousClient
    from portolan.record.reach import Limits, Reacher
    from portolan.record.reach_locators import cited_locators
    from portolan.record.reach_report import (
        as_json_text,
        claim_locators,
        record_reach,
        summarize_reach,
    )

    journal = open_journal(root) if folder is None else None
    if journal is not None:
        citations = cited_locators(journal.records())
        locators = claim_locators(journal.records())
    else:
        citations, locators = _audit_citations(folder or root)
    limits = Limits(total_seconds=seconds, max_bytes=max_bytes)
    reacher = Reacher(folder or root, AnonymousClient(allow_private=private), limits)
    findings = []
    for finding in reacher.reach_all(citations):
        findings.append(finding)
        errors.print(visible(f"{finding.reachability}: {finding.locator}"), markup=False)
    report = summarize_reach(locators, findings)
    if journal is not None and findings:
        record_reach(journal, report, code_digest())
        journal.sign_head()
    say(as_json_text(report) if as_json else report.to_text())
    return report.exit_code


def _audit_citations(folder: Path) -> tuple[list[Citation], list[str]]:
    """Locators of a table of claims with the figures that cite them, and one locator a figure."""
    from portolan.record.audit.folder import read_audit

    found: dict[str, Citation] = {}
    locators = []
    for figure in read_audit(folder).figures:
        locator = figure.url or figure.source
        locators.append(locator)
        if locator and locator not in NO_LOCATOR:
            found.setdefault(locator, Citation(locator)).cited_by.append(figure.id)
    return list(found.values()), locators


def witness(root: Path, kind: str, place: str) -> None:
    """Sign the present head and give it to an outside party; its receipt joins the record."""
    from portolan.record.witness import add_witness

    journal = open_journal(root)
    journal.sign_head()
    path = add_witness(journal.folder, journal.head, kind, place)
    say(f"receipt for line {journal.head.seq}: {path.relative_to(root)}")
    if kind == "git":
        say("now push the tag to a host that others read: git push --tags")


def seal(project: Project) -> None:
    """Seal and say what was sealed."""
    from portolan.pipeline.sealing import seal_project

    identity = seal_project(project)
    journal = Journal.open(project.record)
    body = journal.get(identity).body
    say(f"sealed lines 0 to {body['head']['seq']}, Merkle root {body['merkle_root']}")
    for run in body["runs"]:
        say(f"  {run['name']}: {run['status']}, {run['completed']} updates")
    for text in body.get("published_conflicts", ()):
        say(f"  published conflict: {text}")
    say(
        f"head {journal.head.seq} {journal.head.head}: give it to a witness with `portolan "
        "witness`, then write the archive with `portolan bundle`"
    )


def bundle(root: Path, target: Path | None) -> None:
    """Write the archive of a sealed project and say what is in it."""
    from portolan.record.bundle import SITE, write_bundle
    from portolan.report.data_map import MAP, QUOTING

    journal = open_journal(root)
    path = target or root / DEFAULT_BUNDLE
    quoting = {f"{SITE}/{MAP}/{page.file}" for page in QUOTING}
    files = write_bundle(root, path, journal, quoting)
    size = path.stat().st_size
    say(f"bundle: {path} ({len(files)} files, {size} bytes, SHA-256 {sha256_file(path)})")
    pages = [file.num_bytes for file in files if file.name.startswith(f"{SITE}/")]
    say(f"pages in it: {len(pages)}, {sum(pages)} bytes; open {SITE}/index.html in a browser")
    say(f"check it anywhere, offline: portolan verify {path.name}")


def open_journal(root: Path) -> Journal:
    """The journal of a project or of an audit folder."""
    if not (root / JOURNAL).is_file():
        raise UsageError(
            f"{root} has no record", remedy="name a project folder with -C DIR, and run it first"
        )
    return Journal.open(root / "record")
