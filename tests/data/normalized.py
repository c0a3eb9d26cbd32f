"""Small normalised sources, as the normalise step leaves them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from portolan.data.dedup import NormalizedSource
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    document_id,
    run_stage,
    shard_name,
    shard_of,
    write_shard,
)


def write_source(
    corpus: Path, key: str, texts: Sequence[str], num_shards: int = 2
) -> NormalizedSource:
    """A normalised source of some texts, sorted by id in each shard."""
    rows = sorted({document_id(text): text for text in texts}.items())

    def build(folder):
        entries = []
        for shard in range(num_shards):
            part = [row for row in rows if shard_of(row[0], num_shards) == shard]
            table = pa.Table.from_pylist(
                [{"id": i, "text": t, "path": "in.txt", "row": n} for n, (i, t) in enumerate(part)],
                schema=DOCUMENT_SCHEMA,
            )
            name = shard_name(shard, num_shards)
            entries.append(write_shard(folder, name, DOCUMENT_SCHEMA, [table]))
        return entries, {"counts": {"kept": len(rows), "kept_text_bytes": 0}}

    params = {"source": key, "shards": num_shards, "ids": [row[0] for row in rows]}
    stage = Stage("normalise", 1, params, label=key)
    folder, manifest, _ = run_stage(corpus / "documents", stage, build)
    return NormalizedSource(key, folder, manifest)


def write_sources(corpus: Path, texts: Mapping[str, Sequence[str]]) -> list[NormalizedSource]:
    """Sources by key."""
    return [write_source(corpus, key, found) for key, found in texts.items()]


def rows_of(dataset) -> list[dict]:
    """All rows of a dataset."""
    return [row for name in dataset.names for t in dataset.read(name) for row in t.to_pylist()]
