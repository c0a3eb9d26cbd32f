"""Provenance: one row a source, with what was measured, on what terms, and a hash of the row."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from portolan.canonical import digest
from portolan.data.licenses import LicenseFacts
from portolan.data.sources import Source
from portolan.files import atomic_file, write_bytes_atomic

COLUMNS: Mapping[str, pa.DataType] = {
    "key": pa.string(),
    "category": pa.string(),
    "upstream": pa.string(),
    "subset": pa.string(),
    "revision": pa.string(),
    "tokens": pa.int64(),
    "documents": pa.int64(),
    "bytes": pa.int64(),
    "synthetic": pa.bool_(),
    "machine_translated": pa.bool_(),
    "pdf": pa.bool_(),
    "generator": pa.string(),
    "transform": pa.string(),
    "license_raw": pa.string(),
    "license_spdx": pa.string(),
    "license_class": pa.string(),
    "license_per_document": pa.string(),
    "accept_reason": pa.string(),
    "evidence_url": pa.string(),
    "retrieved_on": pa.string(),
    "evidence_digest": pa.string(),
    "row_hash": pa.string(),
}
STDLIB_LICENSE_URL = "https://docs.python.org/3/license.html"


def hash_row(row: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a row without its hash."""
    return digest({name: value for name, value in row.items() if name != "row_hash"})


def provenance_row(
    source: Source, *, documents: int, text_bytes: int, license_facts: LicenseFacts
) -> dict[str, Any]:
    """Row of a source. Documents and bytes are those of its training text; tokens come later."""
    settings = source.settings
    is_installed = settings.kind == "installed"
    from_stdlib = is_installed and not settings.key.startswith("package-")
    facts = license_facts
    row = {
        "key": settings.key,
        "category": settings.category,
        "upstream": settings.upstream or (f"installed:{settings.key}" if is_installed else ""),
        "subset": settings.subset,
        "revision": source.revision,
        "tokens": None,
        "documents": documents,
        "bytes": text_bytes,
        "synthetic": settings.synthetic,
        "machine_translated": settings.machine_translated,
        "pdf": settings.pdf,
        "generator": settings.generator,
        "transform": source.transform,
        "license_raw": settings.license_raw or facts.expression,
        "license_spdx": facts.expression,
        "license_class": facts.license_class,
        "license_per_document": source.license_column,
        "accept_reason": settings.accept,
        "evidence_url": settings.evidence_url or (STDLIB_LICENSE_URL if from_stdlib else ""),
        "retrieved_on": settings.retrieved_on,
        "evidence_digest": settings.evidence_digest,
    }
    return {**row, "row_hash": hash_row(row)}


def with_tokens(
    rows: Iterable[Mapping[str, Any]], tokens: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows with measured tokens by source key, and their new hashes."""
    filled = [{**row, "tokens": tokens.get(row["key"])} for row in rows]
    return [{**row, "row_hash": hash_row(row)} for row in filled]


def write_provenance(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `provenance.csv` and `provenance.parquet`, in the byte order of the keys."""
    ordered = sorted(rows, key=lambda row: row["key"].encode())
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(ordered)
    write_bytes_atomic(folder / "provenance.csv", text.getvalue().encode())
    table = pa.Table.from_pylist([dict(row) for row in ordered], schema=pa.schema(COLUMNS.items()))
    with atomic_file(folder / "provenance.parquet") as path:
        pq.write_table(table, path, compression="zstd", use_dictionary=False)


def read_provenance(folder: Path) -> list[dict[str, Any]]:
    """Rows of the table."""
    return pq.read_table(folder / "provenance.parquet").to_pylist()
