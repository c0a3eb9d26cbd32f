"""The fit of domains to the sample, and the attribute `domain` of every document."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from portolan.curation_settings import DomainSettings
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, run_stage, write_shard
from portolan.data.domains.coarsen import SEEDS, coarsen
from portolan.data.domains.kmeans import (
    CENTROID_SCALE,
    Centroids,
    Codes,
    assign,
    fit_fine,
    products_with,
)
from portolan.data.embedding.attribute import SampleVectors, codes_of, vectors_of_sample
from portolan.data.embedding.sampling import FITS, Sample, ranks_of, share_out
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.errors import UsageError

VERSION = 1
TRAINING_ROWS_PER_CENTROID, MIN_ROWS_PER_CENTROID, FINE_PER_DOMAIN = 512, 16, 4
CENTROIDS, SAMPLE_DOMAINS = "centroids.parquet", "sample.parquet"
SAMPLE_DOMAIN_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("domain", pa.int16(), nullable=False),
        pa.field("similarity", pa.float32(), nullable=False),
    ]
)
DOMAIN_SCHEMA = pa.schema(list(SAMPLE_DOMAIN_SCHEMA)[1:])


def centroid_schema(dimension: int) -> pa.Schema:
    """Schema of the fine centroids: sampled documents, domain, int16[dimension]."""
    vectors = pa.list_(pa.int16(), dimension)
    return pa.schema(
        [
            pa.field("documents", pa.int64(), nullable=False),
            pa.field("domain", pa.int16(), nullable=False),
            pa.field("centroid", vectors, nullable=False),
        ]
    )


class DomainFit(Dataset):
    """A fit of domains: its centroids, its sampled documents, and in the manifest statistics."""

    @property
    def num_domains(self) -> int:
        """Number of domains."""
        return self.manifest["params"]["count"]

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Losses, fractions, moves and sweeps."""
        return self.manifest["statistics"]


def check_sizes(num_documents: int, settings: DomainSettings) -> int:
    """The number of domains, if the sample is large enough for these settings.

    Raises:
        UsageError: proposes values that would do.
    """
    count, fine = settings.count, settings.fine
    if count is None:
        raise UsageError(
            "data.domains.count is not set", remedy="set it, or leave the table data.domains out"
        )
    if count * settings.minimum_share > 1:
        raise UsageError(
            f"data.domains: {count} domains of {settings.minimum_share:.2%} each are more than all",
            remedy=f"set data.domains.minimum_share = {1 / (2 * count):.2g} or less",
        )
    if fine < FINE_PER_DOMAIN * count or num_documents < MIN_ROWS_PER_CENTROID * fine:
        most = num_documents // MIN_ROWS_PER_CENTROID
        better_count = min(count, most // FINE_PER_DOMAIN)
        remedy = (
            f"set data.domains.count = {better_count} and data.domains.fine = "
            f"{min(most, max(fine, FINE_PER_DOMAIN * better_count))}"
            if better_count > 1
            else "leave data.domains out, or add documents"
        )
        raise UsageError(
            f"data.domains: {fine} fine clusters for {count} domains need {FINE_PER_DOMAIN} a "
            f"domain and {MIN_ROWS_PER_CENTROID} sampled documents each; "
            f"the sample has {num_documents}",
            remedy=remedy,
        )
    return count


def training_rows(vectors: SampleVectors, total: int, seed: int) -> NDArray[np.int64]:
    """Rows of the sample that k-means sees: one a source, the rest in proportion to its others.

    Inside a source those with the smallest hash. All rows if there are no more than `total`.
    """
    if len(vectors.ids) <= total:
        return np.arange(len(vectors.ids))
    sources = np.array(vectors.sources)
    keys = sorted(set(vectors.sources), key=str.encode)
    rows_of = {key: np.flatnonzero(sources == key) for key in keys}
    others = {key: len(rows) - 1 for key, rows in rows_of.items()}
    quota = share_out(others, max(0, total - len(keys)))
    chosen = []
    for key, rows in rows_of.items():
        ranks = ranks_of([vectors.ids[row] for row in rows], seed, key)
        chosen.append(rows[np.argsort(ranks, kind="stable")[: 1 + quota[key]]])
    return np.sort(np.concatenate(chosen))


def fit_domains(
    engine: Engine,
    sample: Sample,
    embeddings: Mapping[str, Dataset],
    settings: DomainSettings,
    corpus: Path,
) -> DomainFit:
    """Cluster the sample finely, join the clusters into domains, write both down.

    Memory: d bytes a sampled document, and 64 MiB.

    Raises:
        UsageError: the sample is too small for these settings, or does not fall into such domains.
    """
    names = ("count", "fine", "iterations", "restarts", "minimum_share", "seed")
    params = {name: getattr(settings, name) for name in names} | {"coarse_seeds": list(SEEDS)}
    keys = tuple(embeddings[key].key for key in sample.sources)
    stage = Stage("domains", VERSION, params, (*sample.keys, *keys))

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        vectors = vectors_of_sample(engine, sample, embeddings)
        return _fit(folder, vectors, settings)

    folder, manifest, _ = run_stage(corpus / FITS, stage, build)
    return DomainFit(folder, manifest)


def _fit(
    folder: Path, vectors: SampleVectors, settings: DomainSettings
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write centroids and the domains of the sample; statistics for the manifest."""
    # A document without a word has no direction: it would only fill empty clusters.
    kept = np.flatnonzero(vectors.codes.any(axis=1))
    usable = SampleVectors(
        [vectors.sources[row] for row in kept],
        [vectors.ids[row] for row in kept],
        vectors.codes[kept],
    )
    count = check_sizes(len(kept), settings)
    rows = training_rows(usable, TRAINING_ROWS_PER_CENTROID * settings.fine, settings.seed + 1)
    fine = fit_fine(
        usable.codes[rows],
        [usable.ids[row] for row in rows],
        settings.fine,
        seed=settings.seed,
        iterations=settings.iterations,
        restarts=settings.restarts,
    )
    labels = assign(usable.codes, fine.centroids)
    weights = np.bincount(labels, minlength=settings.fine)
    wide = fine.centroids.astype(np.float64)
    units = wide / np.sqrt(np.maximum(np.einsum("kd,kd->k", wide, wide), 1))[:, None]
    coarse = coarsen(units, weights.astype(np.float64), count, settings.minimum_share)
    lookup = coarse.domains.astype(np.int16)
    schema = centroid_schema(wide.shape[1])
    centroids = pa.FixedSizeListArray.from_arrays(
        pa.array(fine.centroids.ravel()), type=schema.field("centroid").type
    )
    tables = {
        CENTROIDS: pa.table([weights, lookup, centroids], schema=schema),
        SAMPLE_DOMAINS: pa.table(
            [
                usable.sources,
                usable.ids,
                lookup[labels],
                similarities(usable.codes, fine.centroids, labels),
            ],
            schema=SAMPLE_DOMAIN_SCHEMA,
        ),
    }
    shards = [write_shard(folder, name, table.schema, [table]) for name, table in tables.items()]
    share = np.bincount(coarse.domains, weights, count) / len(kept)
    statistics = {
        "documents": len(vectors.ids),
        "without_direction": len(vectors.ids) - len(kept),
        "training_rows": len(rows),
        "fine_losses": list(fine.losses),
        "fine_restart": fine.restart,
        "coarse_losses": list(coarse.losses),
        "coarse_seed": coarse.seed,
        "moves": list(coarse.moves),
        "shares": [float(value) for value in share],
    }
    return shards, {"statistics": statistics, "sources": sorted(set(vectors.sources))}


def similarities(
    codes: Codes, centroids: Centroids, labels: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Cosine float32[n] of every row to its centroid, from exact products; 0 for a zero row."""
    squares = np.einsum("nd,nd->n", codes, codes, dtype=np.int64, casting="unsafe")
    lengths = np.sqrt(np.maximum(squares, 1).astype(np.float64)) * CENTROID_SCALE
    return (products_with(codes, centroids, labels) / lengths).astype(np.float32)


@functools.lru_cache(maxsize=2)
def load_centroids(folder: Path) -> tuple[Centroids, NDArray[np.int16]]:
    """Fine centroids int16[k, d] and their domains int16[k]; read once a process."""
    table = pa.concat_tables(Dataset.open(folder).read(CENTROIDS))
    dimension = table.schema.field("centroid").type.list_size
    flat = table["centroid"].combine_chunks().flatten()
    return np.asarray(flat).reshape(-1, dimension), np.asarray(table["domain"])


def assign_table(
    params: Mapping[str, Any], embeddings: Iterator[pa.Table], *, fit: Path
) -> Iterator[pa.Table]:
    """Id, domain and cosine to the fine centroid, for every document."""
    centroids, lookup = load_centroids(fit)
    for table in embeddings:
        codes = codes_of(table)
        labels = assign(codes, centroids)
        cosines = similarities(codes, centroids, labels)
        yield pa.table([table["id"], lookup[labels], cosines], schema=DOMAIN_SCHEMA)


def assign_domains(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    embeddings: Mapping[str, Dataset],
    fit: DomainFit,
    corpus: Path,
) -> dict[str, Dataset]:
    """The attribute `domain` of every source: nearest fine centroid, then its domain."""
    function = functools.partial(assign_table, fit=fit.folder)
    domains: dict[str, Dataset] = {}
    for source in in_key_order(sources):
        embedding = embeddings[source.key]
        stage = Stage("domain", VERSION, {}, (embedding.key, fit.key), f"domain/{source.key}")
        domains[source.key] = map_shards(
            engine, corpus / "attributes", stage, function, [embedding], DOMAIN_SCHEMA
        )
    return domains
