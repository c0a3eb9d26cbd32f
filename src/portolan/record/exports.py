"""Statements for other tools: in-toto over the files of a bundle, provenance of each attempt."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portolan.canonical import canonical
from portolan.record.chain import Record
from portolan.record.journal import Journal
from portolan.record.signing import SigningKey, signing_available

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
SEAL_PREDICATE = "urn:portolan:predicate:seal:v1"
PROVENANCE_PREDICATE = "https://slsa.dev/provenance/v1"
ATTEMPT_BUILD_TYPE = "urn:portolan:build:training-attempt:v1"
BUILDER = "urn:portolan:builder:local"


@dataclass(frozen=True)
class BundledFile:
    """A file of a bundle: its name, size and SHA-256."""

    name: str
    num_bytes: int
    sha256: str


def seal_statement(files: Sequence[BundledFile], seal: Record) -> dict[str, Any]:
    """in-toto Statement v1: the files as subjects, the seal as predicate."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": file.name, "digest": {"sha256": file.sha256}} for file in files],
        "predicateType": SEAL_PREDICATE,
        "predicate": {"seal": seal.body, "id": seal.id, "time": seal.time},
    }


def attempt_statement(attempt: Record, products: Iterable[Record]) -> dict[str, Any]:
    """SLSA-shaped provenance v1 of one attempt: what went in, what came out.

    SLSA describes builds; an attempt is a part of a long run, so its segments stay in the record.
    The attempt's own record is always a subject.
    """
    body = attempt.body
    made = [
        {
            "name": f"{product.type} {product.body.get('name', product.id)}",
            "digest": _digests(product),
        }
        for product in products
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": f"record {attempt.type}", "digest": {"sha256": _id_digest(attempt.id)}},
            *made,
        ],
        "predicateType": PROVENANCE_PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": ATTEMPT_BUILD_TYPE,
                "externalParameters": {"argv": body["argv"], "run": body["run"]},
                "internalParameters": {"env": body["env"], "restoredFrom": body["restored_from"]},
                "resolvedDependencies": _dependencies(body),
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {
                    "invocationId": f"{body['run']}/attempt-{body['ordinal']}",
                    "startedOn": body["start"],
                    **({"finishedOn": body["end"]} if "end" in body else {}),
                },
            },
        },
    }


def sign_statement(journal: Journal, statement: Mapping[str, Any]) -> dict[str, Any]:
    """DSSE envelope signed with the journal's key; without key or library it has no signature."""
    payload = canonical(statement)
    if signing_available() and journal.key_path.is_file():
        key = SigningKey.load(journal.key_path)
        if key.public_key == journal.public_key:
            return key.sign(payload, PAYLOAD_TYPE)
    text = base64.b64encode(payload).decode()
    return {"payload": text, "payloadType": PAYLOAD_TYPE, "signatures": []}


def _dependencies(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = {
        "container": body["container_digest"],
        "lock": body["lock_digest"],
        "configuration": body["config_digest"],
        "data": body["data_manifest_digest"],
        "patch": body.get("patch_digest", "unknown"),
    }
    if ":" in body["restored_from"]:
        names["parent checkpoint"] = _id_digest(body["restored_from"])
    found: list[dict[str, Any]] = [
        {"name": name, "digest": {"sha256": digest}}
        for name, digest in names.items()
        if len(digest) == 64
    ]
    return [{"name": "code", "annotations": {"version": body["code_commit"]}}, *found]


def _digests(record: Record) -> dict[str, str]:
    """Digests of an artifact under names that in-toto leaves to the producer."""
    return {f"portolan-{name}-sha256": value for name, value in record.body["digests"].items()}


def _id_digest(identity: str) -> str:
    return identity.partition(":")[2]
