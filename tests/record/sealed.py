"""A small sealed project, made without training anything."""

from pathlib import Path

from portolan.record.artifacts import artifact_of
from portolan.record.journal import Journal
from portolan.record.licences import LicenceRow
from portolan.record.seal import FinalItem, SealDraft, write_seal
from portolan.record.seal_body import OrderDigest, SealedRun
from portolan.record.verdicts import Finding

HASH = "ab" * 32
MANIFEST = {
    "name": "demo",
    "digest": HASH,
    "tokenizer": HASH,
    "shards": [
        {
            "path": f"corpus/tokens/{name}.arrow",
            "cell": name,
            "bytes": 100,
            "tokens": 50,
            "sha256": HASH,
            "licence": "CC0-1.0",
        }
        for name in ("prose", "tables")
    ],
    "mixtures": {"target": HASH},
}


def fill(journal: Journal, bodies: dict) -> dict[str, str]:
    """A registered run of two attempts with a checkpoint, metrics and a log; ids by name."""
    project = journal.folder.parent
    files = {
        "metrics": "runs/target/metrics/a.parquet",
        "checkpoint": "runs/target/checkpoints/w.bin",
    }
    for name, path in files.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_bytes(name.encode() * 20)
    (project / "site").mkdir(exist_ok=True)
    (project / "site" / "index.html").write_text("<p>the page</p>")
    ids = {"registration": journal.append("registration", bodies["registration"])}
    journal.append("run", bodies["run"])
    for ordinal in (1, 2):
        body = bodies["attempt"] | {"ordinal": ordinal}
        started = journal.append("attempt", body)
    ended = body | {"end": "2026-01-01T01:00:00.000Z", "exit_evidence": ["finished"]}
    ids["attempt"] = journal.append("attempt", ended, supersedes=[started])
    log = journal.add_blob("a log, with a bidi \u202e mark\n".encode())
    journal.append("event", bodies["event"] | {"evidence": [log]})
    for name, kind, access in (
        ("checkpoint", "checkpoint", "metadata_only"),
        ("metrics", "metrics", "metadata_only"),
    ):
        body = artifact_of(
            project,
            [project / files[name]],
            kind=kind,
            text=name,
            name=f"target {name}",
            redistribution=access,
            completeness="restored",
        )
        ids[name] = journal.append("artifact", body)
    return ids


def draft(ids: dict[str, str], **fields) -> SealDraft:
    """What a complete seal of that project says; `fields` replace parts."""
    run = {
        "name": "target",
        "role": "production",
        "status": "succeeded",
        "attempts": 2,
        "completed": 400,
        "config_digest": HASH,
        "data_manifest_digest": HASH,
        "container_digest": "not_stated",
        "lock_digest": HASH,
        "code_commit": "0.1.0",
        "final_checkpoint": ids["checkpoint"],
        "orders": (OrderDigest(first_step=0, last_step=399, num_batches=16, seed=0, digest=HASH),),
    } | fields.pop("run", {})
    values = {
        "runs": (SealedRun(**run),),
        "wheel_digest": HASH,
        "recipe_digest": HASH,
        "licences": [LicenceRow("code", "code", "Apache-2.0", "Apache-2.0")],
        "findings": [Finding("a", "b", "agree", "fact", "R1", "equal")],
        "final_items": [FinalItem("steps trained", 400), FinalItem("share", 0.5)],
        "data_manifest": MANIFEST,
        "evaluations": {"rows": 16},
    }
    return SealDraft(**(values | fields))


def sealed(journal: Journal, bodies: dict) -> Path:
    """The folder of the project after sealing."""
    write_seal(journal, draft(fill(journal, bodies)))
    return journal.folder.parent
