"""RO-Crate metadata of a bundle: the research-object description other tools can read."""

from collections.abc import Sequence
from typing import Any

from portolan.record.exports import BundledFile

CRATE_FILE = "ro-crate-metadata.json"
_SPECIFICATION = "https://w3id.org/ro/crate/1.2"
_FORMATS = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".html": "text/html",
    ".txt": "text/plain",
    ".md": "text/markdown",
    ".csv": "text/csv",
    ".parquet": "application/vnd.apache.parquet",
    ".tsr": "application/timestamp-reply",
}
_ABOUT = {
    "record/journal.jsonl": "The append-only, hash-chained journal.",
    "statement.dsse.json": "Signed in-toto statement over the other files.",
    "croissant.json": "The training data: shards, digests, licences, mixture and order.",
    "site/index.html": "The report, which opens without a network.",
}


def describe_crate(
    name: str, published: str, files: Sequence[BundledFile], unlisted: Sequence[str]
) -> dict[str, Any]:
    """RO-Crate 1.2 metadata document.

    Args:
        name: of the project.
        published: time of the seal.
        files: with digests.
        unlisted: names of files that are made after this one and have no digest here.
    """
    listed = [_entity(file.name) | _bytes_of(file) for file in files]
    listed += [_entity(name) for name in unlisted]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Sealed record of {name}",
        "description": "Journal, signed heads, receipts of witnesses, blobs and report of a "
        "training run; `portolan verify` checks all of it offline.",
        "datePublished": published,
        "license": {"@id": "#licences"},
        "hasPart": [{"@id": item["@id"]} for item in listed],
        "mainEntity": {"@id": "record/journal.jsonl"},
    }
    licences = {
        "@id": "#licences",
        "@type": "CreativeWork",
        "name": "The licence table of the seal",
        "description": "Each part has its own line; a part without a licence is NOASSERTION.",
    }
    descriptor = {
        "@id": CRATE_FILE,
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": {"@id": _SPECIFICATION},
    }
    return {
        "@context": f"{_SPECIFICATION}/context",
        "@graph": [descriptor, root, licences, *listed],
    }


def _entity(name: str) -> dict[str, Any]:
    suffix = name[name.rfind(".") :] if "." in name else ""
    entity = {
        "@id": name,
        "@type": "File",
        "name": name,
        "encodingFormat": _FORMATS.get(suffix, "application/octet-stream"),
    }
    return entity | ({"description": _ABOUT[name]} if name in _ABOUT else {})


def _bytes_of(file: BundledFile) -> dict[str, Any]:
    return {"contentSize": str(file.num_bytes), "sha256": file.sha256}
