"""The signature stage of a source: bucket ids of every document, whatever other sources hold."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.curation_settings import FuzzySettings
from portolan.data.dedup import NormalizedSource
from portolan.data.documents import Stage
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.fuzzy.minhash import RENSA_VERSION, SEED, SIGNATURES, bucket_ids
from portolan.data.fuzzy.shingles import MIN_UNSEGMENTED_CHARACTERS, clean, shingle_hashes
from portolan.data.ngrams import batches

VERSION = 1
MAX_CHARACTERS = 8 << 20
"""Characters of a document that are read; a longer one is `truncated` and never removed."""

SIGNATURE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("characters", pa.int64(), nullable=False),
        pa.field("words", pa.int64(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("unsegmented", pa.bool_(), nullable=False),
        pa.field("buckets", pa.list_(pa.uint64())),
    ]
)


def signature_params(settings: FuzzySettings) -> dict[str, Any]:
    """Everything that two signatures must have in common to be compared."""
    library = RENSA_VERSION if settings.signature == "rensa" else None
    return {
        "shingle_unit": settings.shingle_unit,
        "shingle_n": settings.shingle_n,
        "signature": settings.signature,
        "signature_version": library,
        "seed": SEED,
        "bands": settings.bands,
        "rows": settings.rows,
        "max_characters": MAX_CHARACTERS,
        "min_unsegmented_characters": MIN_UNSEGMENTED_CHARACTERS,
    }


def sign_source(
    engine: Engine, source: NormalizedSource, settings: FuzzySettings, corpus: Path
) -> Dataset:
    """Dense attribute of a source: lengths, whether it can be compared, and its bucket ids.

    `buckets` is null for a document without text after cleaning, and for an unsegmented one.
    Memory: a row group and 4 Mi characters of windows.
    """
    stage = Stage(
        "minhash",
        VERSION,
        signature_params(settings),
        (source.stage_key,),
        label=f"minhash/{source.key}",
    )
    documents = Dataset(source.folder, source.manifest)
    return map_shards(
        engine, corpus / "attributes", stage, sign_documents, [documents], SIGNATURE_SCHEMA
    )


def sign_documents(params: Mapping[str, Any], documents: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Signature rows of document tables, in their order."""
    for table in documents:
        texts = table["text"].to_pylist()
        ids = table["id"].combine_chunks()
        for run in batches([len(text) for text in texts]):
            yield _sign(params, ids[run.start : run.stop], texts[run])


def _sign(params: Mapping[str, Any], ids: pa.Array, texts: Sequence[str]) -> pa.Table:
    unit, size, bands = params["shingle_unit"], params["shingle_n"], params["bands"]
    limit = params["max_characters"]
    cleaned = [clean(text[:limit]) for text in texts]
    words = np.array([text.count(" ") + bool(text) for text in cleaned])
    characters = np.array([len(text) for text in texts])
    is_long = np.array([len(text) > params["min_unsegmented_characters"] for text in cleaned])
    unsegmented = (words < size) & is_long if unit == "word" else np.zeros(len(texts), bool)
    usable = (words > 0) & ~unsegmented
    shingles = shingle_hashes([cleaned[i] for i in np.flatnonzero(usable)], unit, size)
    signatures = SIGNATURES[params["signature"]](shingles, bands * params["rows"])
    buckets = bucket_ids(signatures, bands, params["rows"])
    offsets = np.concatenate([[0], np.cumsum(np.where(usable, bands, 0))]).astype(np.int32)
    listed = pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(buckets.ravel()), mask=pa.array(~usable)
    )
    arrays = [ids, characters, words, characters > limit, unsegmented, listed]
    return pa.table([pa.array(array) for array in arrays], schema=SIGNATURE_SCHEMA)
