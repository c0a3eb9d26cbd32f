"""What `reach` found: the share a stranger can fetch, and how it enters the journal."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan import __version__
from portolan.canonical import CanonicalError, canonical, parse
from portolan.errors import PortolanError
from portolan.record.blobs import read_blob
from portolan.record.chain import Record
from portolan.record.journal import Journal
from portolan.record.reach import FETCHABLE, Finding
from portolan.record.reach_locators import records_in_force
from portolan.record.rules import BLOB_PREFIX
from portolan.record.types import Check
from portolan.record.types_statements import Evidence, Obtained
from portolan.record.visible import visible

RULE = "reach"
RULE_VERSION = "1"


@dataclass(frozen=True)
class ReachReport:
    """All findings, and how many of the claims in force a stranger can check.

    A claim without a locator, or whose locator was not reached, counts as not fetchable.
    """

    findings: tuple[Finding, ...]
    num_claims: int
    num_fetchable: int

    @property
    def counts(self) -> dict[str, int]:
        """Locators by class."""
        return dict(sorted(Counter(f.reachability for f in self.findings).items()))

    @property
    def exit_code(self) -> int:
        """0 all can be fetched, 9 some cannot, 1 some give other bytes than the record says."""
        classes = {finding.reachability for finding in self.findings}
        if "changed" in classes:
            return 1
        return 0 if classes <= set(FETCHABLE) else 9

    def to_json(self) -> dict[str, Any]:
        """The report as the record stores it."""
        return {
            "claims": self.num_claims,
            "claims_fetchable": self.num_fetchable,
            "counts": self.counts,
            "findings": [finding.to_json() for finding in self.findings],
        }

    def to_text(self) -> str:
        """One line a locator, then the share."""
        width = max((len(finding.reachability) for finding in self.findings), default=0)
        lines = [
            visible(f"{f.reachability:<{width}}  {f.locator}  ({f.reason})") for f in self.findings
        ]
        share = f"{self.num_fetchable} of {self.num_claims} claims"
        if self.num_claims:
            share += f" ({100 * self.num_fetchable / self.num_claims:.0f} %)"
        return "\n".join([*lines, f"a stranger can fetch the evidence of {share}"])


def claim_locators(records: Iterable[Record]) -> list[str]:
    """The locator of every claim in force."""
    kept = records_in_force(records)
    return [str(record.body.get("locator")) for record in kept if record.type == "claim"]


def summarize_reach(locators: Sequence[str], findings: Sequence[Finding]) -> ReachReport:
    """The report over claims that have these locators, one each."""
    fetched = {f.locator for f in findings if f.reachability in FETCHABLE}
    num_fetchable = sum(locator in fetched for locator in locators)
    return ReachReport(tuple(findings), len(locators), num_fetchable)


def record_reach(journal: Journal, report: ReachReport, tool_digest: str) -> str:
    """Append one evidence record per locator that gave bytes and one check; returns its id."""
    for finding in report.findings:
        if finding.sha256 is not None:
            journal.append("evidence", _evidence(journal, finding))
    blob = journal.add_blob(canonical(report.to_json()))
    check = Check(
        text=f"anonymous requests to {len(report.findings)} cited locators",
        rule=RULE,
        version=RULE_VERSION,
        inputs={"locators": len(report.findings)},
        result={
            "findings": blob,
            "counts": report.counts or "not_stated",
            "claims": report.num_claims,
            "claims_fetchable": report.num_fetchable,
        },
        tool_digest=tool_digest,
    )
    return journal.append("check", check)


def latest_reach(folder: Path, records: Iterable[Record]) -> Mapping[str, str]:
    """Class of each locator by the newest reach check of a record folder; empty without one."""
    newest = None
    for record in records:
        if record.type == "check" and record.body.get("rule") == RULE:
            newest = record
    if newest is None:
        return {}
    try:
        reference = str(newest.body["result"]["findings"]).removeprefix(BLOB_PREFIX)
        content = parse(read_blob(folder, reference))
        return {str(item["locator"]): str(item["class"]) for item in content["findings"]}
    except (PortolanError, CanonicalError, KeyError, TypeError):
        return {}


def _evidence(journal: Journal, finding: Finding) -> Evidence:
    answer = journal.add_blob(canonical(finding.to_json()))
    claims = tuple(identity for identity in finding.cited_by if identity in journal)
    return Evidence(
        text=f"an anonymous request for {finding.locator}: {finding.reachability}",
        refs=claims,
        snapshot_digest=finding.sha256 or "unknown",
        obtained_by=Obtained(
            query=finding.locator,
            arguments={"method": "GET", "answer": answer},
            tool_version=f"portolan {__version__}",
        ),
        time=finding.time,
        access="anonymous",
        completeness="full" if finding.complete else "truncated",
        relation="context",
    )


def as_json_text(report: ReachReport) -> str:
    """The report for other programs."""
    return json.dumps(report.to_json(), indent=2, sort_keys=True, ensure_ascii=False)
