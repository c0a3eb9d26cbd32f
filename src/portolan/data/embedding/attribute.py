"""The fit of an embedder to the sample, and the attribute `embedding` of every document."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from portolan.curation_settings import EmbeddingSettings
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, run_stage, write_shard
from portolan.data.embedding.embedders import (
    GLOVE_DIMENSION,
    Embedder,
    HashEmbedder,
    HttpEmbedder,
    SentenceEmbedder,
    WordVectorEmbedder,
    feature_counter,
    glove_features,
    identify,
    weights_of_features,
)
from portolan.data.embedding.quantization import quantize
from portolan.data.embedding.sampling import FITS, Sample, documents_of
from portolan.data.embedding.words import batches
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.engine.dataset import Shard

VERSION = 1
FEATURES = "features.parquet"
FEATURE_SCHEMA = pa.schema(
    [
        pa.field("feature", pa.int32(), nullable=False),
        pa.field("documents", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class EmbedderFit:
    """How many sampled documents hold each feature; `folder` is None for a backend without fit."""

    key: str
    folder: Path | None


def dimension_of(settings: EmbeddingSettings) -> int:
    """Length of the vectors."""
    return GLOVE_DIMENSION if settings.backend == "word-vectors" else settings.dimension


def embedding_schema(dimension: int) -> pa.Schema:
    """Schema of the attribute: id and int8[dimension].

    Items may be null for Arrow: a pickled list type forgets that they may not.
    """
    vectors = pa.list_(pa.int8(), dimension)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("embedding", vectors, nullable=False),
        ]
    )


def embedding_table(ids: pa.ChunkedArray, codes: NDArray[np.int8]) -> pa.Table:
    """Ids and int8[n, d] as a table of the attribute."""
    schema = embedding_schema(codes.shape[1])
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(codes.ravel()), type=schema.field("embedding").type
    )
    return pa.table([ids, vectors], schema=schema)


def codes_of(table: pa.Table) -> NDArray[np.int8]:
    """Vectors int8[n, d] of a table of the attribute."""
    dimension = table.schema.field("embedding").type.list_size
    parts = [np.asarray(chunk.flatten()) for chunk in table["embedding"].chunks]
    return np.concatenate([np.zeros(0, np.int8), *parts]).reshape(-1, dimension)


def _count_holders(shard: Shard, settings: EmbeddingSettings) -> NDArray[np.int64]:
    """How many documents of a shard hold each feature, int64[features]."""
    counter = feature_counter(settings)
    assert counter is not None
    holders = np.zeros(counter.num_features, np.int64)
    for table in shard.read(["text"]):
        texts = [text[: settings.max_characters] for text in table["text"].to_pylist()]
        for batch in batches(texts):
            held = counter.count(texts[batch]).indices
            holders += np.bincount(held, minlength=counter.num_features)
    return holders


def fit_embedder(
    engine: Engine,
    sample: Sample,
    settings: EmbeddingSettings,
    identity: Mapping[str, Any],
    corpus: Path,
) -> EmbedderFit:
    """Count in how many sampled documents each feature stands; `identity` is that of the settings.

    Memory: 8 bytes a feature.
    """
    stage = Stage("embedder", VERSION, identity, sample.keys)
    if feature_counter(settings) is None:
        return EmbedderFit(stage.key, None)
    shards = [shard for part in sample.sources.values() for shard in part.shards]

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        count = functools.partial(_count_holders, settings=settings)
        holders: Any = 0
        for of_shard in engine.map(count, shards):
            holders = holders + of_shard
        features = np.flatnonzero(holders)
        table = pa.table([features.astype(np.int32), holders[features]], schema=FEATURE_SCHEMA)
        fields = {"documents": sample.num_documents, "sources": list(sample.sources)}
        return [write_shard(folder, FEATURES, FEATURE_SCHEMA, [table])], fields

    folder, _, _ = run_stage(corpus / FITS, stage, build)
    return EmbedderFit(stage.key, folder)


@functools.lru_cache(maxsize=2)
def load_embedder(settings: EmbeddingSettings, folder: Path | None) -> Embedder:
    """The embedder of these settings, with its fit; made once a process."""
    if settings.backend == "sentence-transformers":
        return SentenceEmbedder(settings)
    if settings.backend == "http":
        return HttpEmbedder(settings)
    assert folder is not None
    fit = Dataset.open(folder)
    (table,) = fit.read(FEATURES)
    counter = feature_counter(settings)
    assert counter is not None
    holders = np.zeros(counter.num_features, np.int64)
    holders[np.asarray(table["feature"])] = np.asarray(table["documents"])
    weights = weights_of_features(fit.manifest["documents"], holders)
    if settings.backend == "hash":
        return HashEmbedder(weights, settings.dimension)
    return WordVectorEmbedder(weights, glove_features())


def embed_documents(
    params: Mapping[str, Any],
    documents: Iterator[pa.Table],
    *,
    settings: EmbeddingSettings,
    fit: Path | None,
) -> Iterator[pa.Table]:
    """Id and int8 vector of every document; `params` repeat what `settings` say."""
    embedder = load_embedder(settings, fit)  # pyright: ignore[reportArgumentType]
    for table in documents:
        texts = [text[: settings.max_characters] for text in table["text"].to_pylist()]
        yield embedding_table(table["id"], quantize(embedder.embed(texts)))


def embed_sources(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    sample: Sample,
    settings: EmbeddingSettings,
    corpus: Path,
) -> dict[str, Dataset]:
    """The attribute `embedding` of every source: id, int8[d]; co-partitioned with its documents.

    Memory: one row group of text, and the counts of about a million characters.
    """
    identity = identify(settings)
    fit = fit_embedder(engine, sample, settings, identity, corpus)
    function = functools.partial(embed_documents, settings=settings, fit=fit.folder)
    schema = embedding_schema(dimension_of(settings))
    embeddings: dict[str, Dataset] = {}
    for source in in_key_order(sources):
        keys = (source.stage_key, fit.key)
        stage = Stage("embedding", VERSION, identity, keys, f"embedding/{source.key}")
        embeddings[source.key] = map_shards(
            engine, corpus / "attributes", stage, function, [documents_of(source)], schema
        )
    return embeddings


def _take_vectors(shards: tuple[Shard, Shard]) -> tuple[list[str], NDArray[np.int8]]:
    """Ids and vectors of the sampled documents of a shard: (sample, embedding)."""
    import pyarrow.compute as pc

    sampled, embedded = shards
    wanted = pa.array([name for table in sampled.read(["id"]) for name in table["id"].to_pylist()])
    ids: list[str] = []
    codes: list[NDArray[np.int8]] = []
    for table in embedded.read():
        found = table.filter(pc.is_in(table["id"], wanted.cast(pa.string())))  # pyright: ignore
        ids += found["id"].to_pylist()
        codes.append(codes_of(found))
    return ids, np.concatenate(codes) if codes else np.zeros((0, 0), np.int8)


@dataclass(frozen=True)
class SampleVectors:
    """Sampled documents in order of source and id: their sources, ids, and vectors int8[n, d]."""

    sources: list[str]
    ids: list[str]
    codes: NDArray[np.int8]


def vectors_of_sample(
    engine: Engine, sample: Sample, embeddings: Mapping[str, Dataset]
) -> SampleVectors:
    """Collect the vectors of the sample. Memory: d bytes a sampled document."""
    pairs = [
        (key, (shard, embeddings[key].shard(shard.name)))
        for key, part in sample.sources.items()
        for shard in part.shards
    ]
    names: list[str] = []
    ids: list[str] = []
    codes: list[NDArray[np.int8]] = []
    shards = [shards for _, shards in pairs]
    for (key, _), (of_shard, vectors) in zip(pairs, engine.map(_take_vectors, shards), strict=True):
        if of_shard:
            names += [key] * len(of_shard)
            ids += of_shard
            codes.append(vectors)
    return SampleVectors(names, ids, np.concatenate(codes))
