"""Sealing: what must hold before a project's end is stated, and the record that states it."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.canonical import canonical, stringify_floats
from portolan.errors import PortolanError
from portolan.record.chain import MAX_LINE_BYTES, Record
from portolan.record.journal import Journal
from portolan.record.licences import LicenceRow
from portolan.record.merkle import MerkleTree
from portolan.record.seal_body import Seal, SealedHead, SealedRun
from portolan.record.verdicts import Finding

TERMINAL = ("succeeded", "failed", "cancelled", "not_started")


class SealRefused(PortolanError):
    """Something is open, missing or unverified: the project cannot be sealed yet."""


@dataclass(frozen=True)
class FinalItem:
    """A line of the final reconciliation: what is due, its value, and where that comes from."""

    item: str
    value: Any
    source: str = "not_stated"

    def to_json(self) -> dict[str, Any]:
        """The item as the record stores it."""
        return {"item": self.item, "value": stringify_floats(self.value), "source": self.source}


@dataclass(frozen=True)
class SealDraft:
    """Everything that goes into a seal; `None` stands for what the project does not have."""

    runs: tuple[SealedRun, ...]
    wheel_digest: str
    recipe_digest: str
    licences: Sequence[LicenceRow]
    findings: Sequence[Finding]
    final_items: Sequence[FinalItem]
    data_manifest: Any = None
    evaluations: Any = None


def seal_refusals(
    records: Iterable[Record], draft: SealDraft, problems: Sequence[str] = ()
) -> list[str]:
    """Why the project cannot be sealed, one sentence each; empty when it can.

    Args:
        records: the journal.
        draft: what would be sealed.
        problems: what verification found.
    """
    refusals = [f"verification found: {problem}" for problem in problems]
    refusals += [
        f"an open conflict: {finding.left} and {finding.right} ({finding.reason})"
        for finding in draft.findings
        if finding.verdict == "conflict" and not finding.published
    ]
    checkpoints = {
        record.id: str(record.body.get("completeness"))
        for record in records
        if record.type == "artifact" and record.body.get("kind") == "checkpoint"
    }
    for run in draft.runs:
        if run.status not in TERMINAL:
            refusals.append(f"the run {run.name} is {run.status}: an attempt has no end")
        elif run.status == "succeeded" and run.role == "production":
            state = checkpoints.get(run.final_checkpoint)
            if state is None:
                refusals.append(f"the run {run.name} has no final checkpoint")
            elif state not in ("restored", "replay_matched"):
                refusals.append(
                    f"the final checkpoint of {run.name} is only {state.replace('_', ' ')}, "
                    "it was never restored"
                )
    return refusals


def write_seal(journal: Journal, draft: SealDraft) -> str:
    """Append the seal over all lines so far, sign the head that covers it; returns its id."""
    blob = journal.add_blob
    head = journal.head
    published = sorted({o.reason for o in draft.findings if o.verdict == "conflict"})
    reconciled = [_finding_json(o) for o in draft.findings]
    body = Seal(
        text=f"seal over lines 0 to {head.seq}",
        merkle_root=journal.merkle_root(),
        head=SealedHead(journal=head.journal, seq=head.seq, head=head.head),
        runs=draft.runs,
        wheel_digest=draft.wheel_digest,
        recipe_digest=draft.recipe_digest,
        data_manifest=_optional(journal, draft.data_manifest),
        evaluations=_optional(journal, draft.evaluations),
        licences=blob(canonical([row.to_json() for row in draft.licences])),
        reconciliation=blob(canonical(reconciled)),
        final_items=blob(canonical([item.to_json() for item in draft.final_items])),
        published_conflicts=tuple(published),
    )
    identity = journal.append("seal", body)
    journal.sign_head()
    return identity


def seal_fault(folder: Path, seal: Mapping[str, Any], digests: Collection[str]) -> str:
    """Why the newest seal does not fit the journal in `folder`; empty when it does.

    `digests` are those of the blobs that the sealed lines refer to. Reads one line at a time.
    """
    head = seal["head"]
    tree = MerkleTree()
    last = first = b""
    with (folder / "journal.jsonl").open("rb") as file:
        for _ in range(head["seq"] + 1):
            last = file.readline(MAX_LINE_BYTES + 1)
            if not last.endswith(b"\n"):
                return f"it covers line {head['seq']}, the journal ends before"
            tree.add(last[:-1])
            first = first or last
    for digest in sorted(digests):
        tree.add(bytes.fromhex(digest))
    if (_line_hash(first), _line_hash(last)) != (head["journal"], head["head"]):
        return "its head is not a line of this journal"
    if tree.root() != seal["merkle_root"]:
        return "its Merkle root is not that of the lines and blobs it covers"
    return ""


def _line_hash(line: bytes) -> str:
    return hashlib.sha256(line[:-1]).hexdigest()


def _optional(journal: Journal, value: Any) -> str:
    return "not_stated" if value is None else journal.add_blob(canonical(stringify_floats(value)))


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "left": finding.left,
        "right": finding.right,
        "verdict": finding.verdict,
        "explanation": finding.explanation,
        "reason": finding.reason,
        "published": finding.published,
    }
