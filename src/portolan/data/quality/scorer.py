"""The scorer: a ridge regression that learnt the labels, and its check on held-out ones."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from portolan.curation_settings import QualitySettings
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, run_stage, write_shard
from portolan.data.embedding.attribute import codes_of
from portolan.data.embedding.sampling import FITS, documents_of
from portolan.data.engine import Dataset, Engine, align, map_shards
from portolan.data.engine.dataset import Shard
from portolan.data.quality.features import apply_weights, length_of, make_features
from portolan.data.quality.gates import Gates, check_scorer
from portolan.data.quality.ridge import NUM_FOLDS, PENALTIES, cross_validate, solve_ridge
from portolan.errors import PortolanError, UsageError

VERSION = 1
WEIGHTS, HELD_OUT, SCORE = "weights.parquet", "held_out.parquet", "score"
MIN_LABELS = 2 * NUM_FOLDS
HELD_OUT_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("content_type", pa.string(), nullable=False),
        pa.field("level", pa.int8(), nullable=False),
        pa.field("raw_score", pa.float32(), nullable=False),
    ]
)
SCORE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("content_type", pa.string(), nullable=False),
        pa.field("raw_score", pa.float32(), nullable=False),
    ]
)


class ScorerFit(Dataset):
    """A fitted scorer: its weights and its scores of held-out labels."""

    @property
    def gates(self) -> Gates:
        """What the held-out labels say."""
        return Gates(**self.manifest["gates"])

    def held_out(self) -> pa.Table:
        """Labels with raw scores of fits that did not see them."""
        return pa.concat_tables(self.read(HELD_OUT))


@dataclass(frozen=True)
class LabelledDocuments:
    """Labels with texts and vectors int8[n, d], in order of source and id; failures counted."""

    sources: list[str]
    ids: list[str]
    texts: list[str]
    codes: NDArray[np.int8]
    types: list[str]
    levels: NDArray[np.int64]
    failures: int


def _read_labelled(shards: tuple[Shard, ...]) -> tuple[pa.Table, NDArray[np.int8], int]:
    """Labelled documents of a shard: id, text, type and level; vectors; labels that failed."""
    labels, documents, embeddings = shards
    rows = pa.concat_tables([labels.schema.empty_table(), *labels.read()])
    good = rows.filter(rows["level"].is_valid())
    wanted = good["id"].combine_chunks()
    texts, codes = [documents.schema.empty_table().select(["id", "text"])], []
    for table, vectors in align(documents.read(["id", "text"]), embeddings.read()):
        chosen = pc.is_in(table["id"], wanted)  # pyright: ignore
        texts.append(table.filter(chosen))
        codes.append(codes_of(vectors.filter(chosen)))
    found = pa.concat_tables(texts)
    if found["id"].to_pylist() != good["id"].to_pylist():
        raise PortolanError(
            f"the labels in {labels.path} are not those of documents in {documents.path}",
            remedy=f"delete {labels.folder} and run again",
        )
    table = found.append_column("type", good["content_type"]).append_column("level", good["level"])
    vectors = np.concatenate(codes) if codes else np.zeros((0, 0), np.int8)
    return table, vectors, rows.num_rows - good.num_rows


def _same_shards(shard: Shard, *others: Dataset) -> tuple[Shard, ...]:
    return shard, *(dataset.shard(shard.name) for dataset in others)


def read_labelled(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    labels: Mapping[str, Dataset],
    embeddings: Mapping[str, Dataset],
) -> LabelledDocuments:
    """Collect the labelled documents of all sources. Memory: their texts and vectors."""
    tasks = [
        (source.key, _same_shards(shard, documents_of(source), embeddings[source.key]))
        for source in in_key_order(sources)
        if source.key in labels
        for shard in labels[source.key].shards
        if shard.rows
    ]
    names: list[str] = []
    tables: list[pa.Table] = []
    codes: list[NDArray[np.int8]] = []
    failures = 0
    shards = [shards for _, shards in tasks]
    for (key, _), part in zip(tasks, engine.map(_read_labelled, shards), strict=True):
        table, vectors, failed = part
        failures += failed
        if table.num_rows:
            names += [key] * table.num_rows
            tables.append(table)
            codes.append(vectors)
    if len(names) < MIN_LABELS:
        raise UsageError(
            f"{len(names)} documents have a label ({failures} answers were no label), "
            f"a scorer needs {MIN_LABELS}",
            remedy="label more documents (data.quality.sample_documents), or check the labeller",
        )
    table = pa.concat_tables(tables)
    return LabelledDocuments(
        names,
        table["id"].to_pylist(),
        table["text"].to_pylist(),
        np.concatenate(codes),
        table["type"].to_pylist(),
        np.asarray(table["level"]).astype(np.int64),
        failures,
    )


def fit_scorer(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    labels: Mapping[str, Dataset],
    embeddings: Mapping[str, Dataset],
    settings: QualitySettings,
    corpus: Path,
) -> ScorerFit:
    """Learn level and type from the labels; the penalty by 5 folds. One task, one thread.

    Raises:
        UsageError: too few labels; or the scorer fails a gate and `settings.accept` is empty.
    """
    params = {"penalties": list(PENALTIES), "folds": NUM_FOLDS, "seed": settings.seed}
    keys = [labels[key].key for key in labels] + [embeddings[key].key for key in labels]
    stage = Stage("scorer", VERSION, params, tuple(keys))

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        documents = read_labelled(engine, sources, labels, embeddings)
        return _fit(folder, documents, settings.seed)

    folder, manifest, _ = run_stage(corpus / FITS, stage, build)
    fit = ScorerFit(folder, manifest)
    if (failures := fit.gates.failures) and not settings.accept:
        raise UsageError(
            f"the quality scorer is refused: {'; '.join(failures)}",
            remedy="label more documents or with another labeller, or give the reason why this "
            'scorer may be used in data.quality.accept = "..."',
        )
    return fit


def _fit(
    folder: Path, documents: LabelledDocuments, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write weights and held-out scores; the rest goes into the manifest."""
    lengths = [length_of(text) for text in documents.texts]
    mean = math.fsum(lengths) / len(lengths)
    scale = math.sqrt(math.fsum((length - mean) ** 2 for length in lengths) / len(lengths)) or 1.0
    features = make_features(documents.texts, documents.codes, mean, scale)
    folds = np.array(
        [
            xxhash.xxh3_64_intdigest(f"{seed}:fold:{name}".encode()) % NUM_FOLDS
            for name in documents.ids
        ]
    )
    targets = (documents.levels - 1) / 4
    chosen = cross_validate(features, targets, folds)
    kinds = sorted(set(documents.types))
    names = np.array(documents.types)
    columns = np.stack([targets, *((names == kind).astype(np.float64) for kind in kinds)], axis=1)
    means = columns.mean(axis=0)
    penalties = np.full(columns.shape[1], chosen.penalty)
    weights = solve_ridge(features, columns - means, penalties)
    raw = chosen.predictions.astype(np.float32)
    gates = check_scorer(
        raw.astype(np.float64), documents.levels, documents.types, documents.sources, folds
    )
    schema = pa.schema([pa.field(name, pa.float64(), nullable=False) for name in (SCORE, *kinds)])
    held_out = pa.table(
        [documents.sources, documents.ids, documents.types, documents.levels.astype(np.int8), raw],
        schema=HELD_OUT_SCHEMA,
    )
    shards = [
        write_shard(folder, WEIGHTS, schema, [pa.table(list(weights.T), schema=schema)]),
        write_shard(folder, HELD_OUT, HELD_OUT_SCHEMA, [held_out]),
    ]
    return shards, {
        "types": kinds,
        "means": [float(value) for value in means],
        "mean_length": mean,
        "scale_length": scale,
        "penalty": chosen.penalty,
        "errors": {str(penalty): error for penalty, error in chosen.errors.items()},
        "labels": len(documents.ids),
        "label_failures": documents.failures,
        "sources": sorted(set(documents.sources)),
        "gates": asdict(gates),
    }


@dataclass(frozen=True)
class Scorer:
    """Weights float64[features, 1 + types]: raw score, and one output for each type."""

    weights: NDArray[np.float64]
    means: NDArray[np.float64]
    types: tuple[str, ...]
    mean_length: float
    scale_length: float

    def score(
        self, texts: Sequence[str], codes: NDArray[np.int8]
    ) -> tuple[NDArray[np.float32], list[str]]:
        """Raw scores float32[n], and the type whose output is largest."""
        features = make_features(texts, codes, self.mean_length, self.scale_length)
        outputs = apply_weights(features, self.weights) + self.means
        kinds = outputs[:, 1:].argmax(axis=1)
        return outputs[:, 0].astype(np.float32), [self.types[kind] for kind in kinds]


@functools.lru_cache(maxsize=2)
def load_scorer(folder: Path) -> Scorer:
    """The scorer of a fit, read once a process."""
    fit = Dataset.open(folder)
    table = pa.concat_tables(fit.read(WEIGHTS))
    return Scorer(
        np.stack([np.asarray(column) for column in table.columns], axis=1),
        np.array(fit.manifest["means"]),
        tuple(fit.manifest["types"]),
        fit.manifest["mean_length"],
        fit.manifest["scale_length"],
    )


def score_documents(
    params: Mapping[str, Any],
    documents: Iterator[pa.Table],
    embeddings: Iterator[pa.Table],
    *,
    fit: Path,
) -> Iterator[pa.Table]:
    """Id, type and raw score of every document."""
    scorer = load_scorer(fit)
    for table, vectors in align(documents, embeddings):
        if not table["id"].equals(vectors["id"]):
            raise PortolanError(
                f"document {table['id'][0]} has no vector in its place",
                remedy="delete the attribute folders `embedding` and run again",
            )
        scores, kinds = scorer.score(table["text"].to_pylist(), codes_of(vectors))
        yield pa.table([table["id"], kinds, scores], schema=SCORE_SCHEMA)


def score_sources(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    embeddings: Mapping[str, Dataset],
    fit: ScorerFit,
    corpus: Path,
) -> dict[str, Dataset]:
    """Raw scores of every source, co-partitioned with its documents."""
    function = functools.partial(score_documents, fit=fit.folder)
    scores: dict[str, Dataset] = {}
    for source in in_key_order(sources):
        embedding = embeddings[source.key]
        keys = (source.stage_key, embedding.key, fit.key)
        stage = Stage("score", VERSION, {}, keys, f"score/{source.key}")
        scores[source.key] = map_shards(
            engine,
            corpus / "attributes",
            stage,
            function,
            [documents_of(source), embedding],
            SCORE_SCHEMA,
        )
    return scores
