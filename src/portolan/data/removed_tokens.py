"""Tokens of the documents that curation removed, by source and reason."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from portolan.data.curate import CuratedCorpus
from portolan.data.dedup import NormalizedSource
from portolan.data.documents import Stage, source_folder_name
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.store_writing import BATCH_DOCUMENTS
from portolan.data.tokenizer import BoundaryPolicy, DocumentTokenizer

VERSION = 1
SCHEMA = pa.schema(
    [
        pa.field("reason", pa.string(), nullable=False),
        pa.field("documents", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
    ]
)


def count_removed_tokens(
    engine: Engine, corpus: CuratedCorpus, tokenizer: DocumentTokenizer, path: Path
) -> dict[str, dict[str, int]]:
    """Tokens by source and reason of every document that a step across sources removed.

    Documents whose text was not kept (unreadable, not chosen, equal to another of their source)
    have none. `path` is the tokenizer's file. Memory: a row group.
    """
    return {
        source.key: _totals(_count_source(engine, corpus, source, tokenizer, path))
        for source in corpus.normalized
    }


def _count_source(
    engine: Engine,
    corpus: CuratedCorpus,
    source: NormalizedSource,
    tokenizer: DocumentTokenizer,
    path: Path,
) -> Dataset:
    folder = source_folder_name(source.key)
    params = {
        "source": source.key,
        "tokenizer": tokenizer.digest,
        "bos": tokenizer.policy.bos,
        "eos": tokenizer.policy.eos,
    }
    inputs = (source.stage_key, corpus.train.key)
    stage = Stage("removed_tokens", VERSION, params, inputs, f"removed_tokens/{source.key}")
    documents = Dataset(source.folder, source.manifest)
    removed = corpus.train.within("removed").within(folder)
    function = partial(count_shard, str(path.absolute()))
    parent = corpus.folder / "attributes"
    return map_shards(engine, parent, stage, function, [documents, removed], SCHEMA)


def count_shard(
    path: str,
    params: Mapping[str, Any],
    documents: Iterator[pa.Table],
    removed: Iterator[pa.Table],
) -> Iterator[pa.Table]:
    """One row a reason: documents and tokens."""
    reasons: dict[str, str] = {}
    for table in removed:
        pairs = zip(table["id"].to_pylist(), table["reason"].to_pylist(), strict=True)
        reasons.update(pairs)
    counts: dict[str, list[int]] = {}
    wanted = pa.array(list(reasons), pa.string())
    if reasons:
        policy = BoundaryPolicy(bos=params["bos"], eos=params["eos"])
        tokenizer = DocumentTokenizer.from_file(Path(path), policy)
        for table in documents:
            lost = table.filter(pc.is_in(table["id"], value_set=wanted))  # pyright: ignore
            for begin in range(0, lost.num_rows, BATCH_DOCUMENTS):
                batch = lost.slice(begin, BATCH_DOCUMENTS)
                encoded = tokenizer.encode_documents(batch["text"].to_pylist())
                for identifier, tokens in zip(batch["id"].to_pylist(), encoded, strict=True):
                    count = counts.setdefault(reasons[identifier], [0, 0])
                    count[0] += 1
                    count[1] += len(tokens)
    rows = [(reason, *counts[reason]) for reason in sorted(counts)]
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    yield pa.Table.from_arrays(arrays, schema=SCHEMA)


def _totals(counted: Dataset) -> dict[str, int]:
    total: dict[str, int] = {}
    for shard in counted.shards:
        for table in shard.read():
            for row in table.to_pylist():
                total[row["reason"]] = total.get(row["reason"], 0) + row["tokens"]
    return total
