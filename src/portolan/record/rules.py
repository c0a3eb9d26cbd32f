"""Rules that span several records: ids that exist, attempts without holes, causes with evidence."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portolan.record.chain import Record
from portolan.record.completeness import can_support
from portolan.record.schema import ID_PATTERN, SchemaError

BLOB_PREFIX = "sha256:"

_ID = re.compile(ID_PATTERN)
_BLOB = re.compile(BLOB_PREFIX + "[0-9a-f]{64}")


def texts_in(value: Any) -> Iterator[str]:
    """Every text inside a JSON value, keys excluded."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def blobs_in(body: Mapping[str, Any]) -> set[str]:
    """Digests of the blobs that a body refers to as `sha256:<64 hex digits>`."""
    return {text.removeprefix(BLOB_PREFIX) for text in texts_in(body) if _BLOB.fullmatch(text)}


@dataclass
class Rules:
    """What earlier records allow the next one to say; fed in journal order by `observe`."""

    ids: set[str] = field(default_factory=set)
    runs: dict[str, str] = field(default_factory=dict)
    attempts: dict[tuple[str, int], str] = field(default_factory=dict)
    last_ordinal: dict[str, int] = field(default_factory=dict)
    causes: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    statements: dict[str, str] = field(default_factory=dict)

    def observe(self, record: Record) -> None:
        """Take a record of the journal into account."""
        body = record.body
        self.ids.add(record.id)
        if record.type == "run":
            self.runs[str(body.get("name"))] = record.id
        elif record.type == "attempt":
            run, ordinal = str(body.get("run")), body.get("ordinal")
            if isinstance(ordinal, int):
                self.attempts[run, ordinal] = record.id
                self.last_ordinal[run] = max(ordinal, self.last_ordinal.get(run, 0))
        elif record.type == "event" and isinstance(body.get("cause"), Mapping):
            evidence = tuple(str(item) for item in body.get("evidence", ()))
            self.causes[record.id] = (str(body["cause"].get("status")), evidence)
        elif record.type == "claim":
            words = (str(body.get(name, "")) for name in ("statement", "predicate"))
            self.statements[record.id] = " ".join(words)

    def check(
        self, record_type: str, body: Mapping[str, Any], supersedes: Sequence[str]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Raise SchemaError if the record contradicts earlier ones.

        Returns records that must be written first: a `log_gap` for attempts that left none.
        """
        self._check_references(record_type, body, supersedes)
        if record_type == "run":
            known = self.runs.get(body["name"])
            if known is not None and known not in supersedes:
                raise SchemaError(
                    f"the run {body['name']!r} is recorded already as {known}",
                    remedy="a change of role supersedes that record",
                )
        elif record_type == "attempt":
            return self._check_attempt(body, supersedes)
        elif record_type == "registration" and supersedes and not body.get("amends"):
            raise SchemaError(
                "an amended registration must list what it amends",
                remedy="give amends: field, before and after of every changed field",
            )
        elif record_type == "event":
            self._check_cause(body, supersedes)
        elif record_type == "evidence":
            self._check_evidence(body)
        return []

    def _check_references(
        self, record_type: str, body: Mapping[str, Any], supersedes: Sequence[str]
    ) -> None:
        named = {text for text in texts_in(body) if _ID.fullmatch(text)} | set(supersedes)
        missing = sorted(named - self.ids)
        if missing:
            raise SchemaError(
                f"this {record_type} refers to {missing[0]}, which is not in the journal yet",
                remedy="record that first; ids never point forward",
            )

    def _check_attempt(
        self, body: Mapping[str, Any], supersedes: Sequence[str]
    ) -> list[tuple[str, dict[str, Any]]]:
        run, ordinal = body["run"], body["ordinal"]
        if run not in self.runs:
            raise SchemaError(f"the run {run!r} is not recorded", remedy="record the run first")
        known = self.attempts.get((run, ordinal))
        last = self.last_ordinal.get(run, 0)
        if known is not None:
            if known not in supersedes:
                raise SchemaError(
                    f"attempt {ordinal} of run {run!r} is recorded already as {known}",
                    remedy="supersede it, or use the next ordinal",
                )
            return []
        if ordinal <= last:
            raise SchemaError(f"attempt {ordinal} of run {run!r} comes after attempt {last}")
        if ordinal == last + 1:
            return []
        gap = {
            "text": f"attempts {last + 1} to {ordinal - 1} of this run left no record",
            "kind": "log_gap",
            "refs": [],
            "run": run,
            "step": "unknown",
            "evidence": [],
            "detail": {"first_attempt": last + 1, "last_attempt": ordinal - 1},
        }
        return [("event", gap)]

    def _check_cause(self, body: Mapping[str, Any], supersedes: Sequence[str]) -> None:
        status = (body.get("cause") or {}).get("status")
        for earlier in supersedes:
            before = self.causes.get(earlier)
            if before is None or status == before[0]:
                continue
            if status is None:
                raise SchemaError(
                    f"the cause of {earlier} would vanish",
                    remedy="repeat it, or give it the status withdrawn with the new evidence",
                )
            if not set(body.get("evidence", ())) - set(before[1]):
                raise SchemaError(
                    f"the cause moves from {before[0]} to {status} without new evidence",
                    remedy="cite the evidence that changed the diagnosis",
                )

    def _check_evidence(self, body: Mapping[str, Any]) -> None:
        if body["relation"] != "supports":
            return
        for claim in body.get("refs", ()):
            statement = self.statements.get(claim, "")
            if not can_support(statement, body["completeness"]):
                raise SchemaError(
                    f"{body['completeness']} evidence cannot support {statement.strip()!r}",
                    remedy="fetch the full series, or record the evidence as context",
                )
