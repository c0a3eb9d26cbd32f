"""The calibration of a scorer, and the attribute `quality` of every document."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, run_stage
from portolan.data.embedding.sampling import FITS
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.engine.dataset import Shard
from portolan.data.quality.calibration import Curve, calibrate_scores, fit_curves
from portolan.data.quality.gates import SourceScores
from portolan.data.quality.scorer import ScorerFit

VERSION = 1
NUM_BUCKETS = 5
QUALITY_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("content_type", pa.string(), nullable=False),
        pa.field("raw_score", pa.float32(), nullable=False),
        pa.field("score", pa.float32(), nullable=False),
        pa.field("quality_bucket", pa.int8(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Calibration:
    """Curves by content type, and the key of the step that made them."""

    key: str
    curves: Mapping[str, Curve]


def calibrate(scorer: ScorerFit, corpus: Path) -> Calibration:
    """Fit cuts for each content type to held-out scores: fits that saw a label would flatter it.

    Raises:
        UsageError: a level has no label.
    """
    stage = Stage("calibration", VERSION, {}, (scorer.key,))

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        table = scorer.held_out()
        raw, levels = np.asarray(table["raw_score"]), np.asarray(table["level"])
        curves = fit_curves(raw, levels, table["content_type"].to_pylist())
        return [], {"curves": {kind: asdict(curve) for kind, curve in curves.items()}}

    _, manifest, _ = run_stage(corpus / FITS, stage, build)
    return Calibration(stage.key, read_curves(manifest["curves"]))


def read_curves(curves: Mapping[str, Any]) -> dict[str, Curve]:
    """Curves from their JSON form."""
    return {
        kind: Curve(**{**fields, "cuts": tuple(fields["cuts"])}) for kind, fields in curves.items()
    }


def bucket_documents(params: Mapping[str, Any], scores: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The rows of `quality` from raw scores and the curves in `params`."""
    curves = read_curves(params["curves"])
    for table in scores:
        kinds = table["content_type"].to_pylist()
        calibrated, buckets = calibrate_scores(curves, np.asarray(table["raw_score"]), kinds)
        yield pa.table(
            [
                table["id"],
                pa.array([params["source"]] * len(table), pa.string()),
                table["content_type"],
                table["raw_score"],
                calibrated,
                buckets,
            ],
            schema=QUALITY_SCHEMA,
        )


def bucket_sources(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    scores: Mapping[str, Dataset],
    calibration: Calibration,
    corpus: Path,
) -> dict[str, Dataset]:
    """The attribute `quality` of every source; a new calibration needs no new scores."""
    curves = {kind: asdict(curve) for kind, curve in sorted(calibration.curves.items())}
    quality: dict[str, Dataset] = {}
    for source in in_key_order(sources):
        keys = (scores[source.key].key, calibration.key)
        params = {"source": source.key, "curves": curves}
        stage = Stage("quality", VERSION, params, keys, f"quality/{source.key}")
        quality[source.key] = map_shards(
            engine,
            corpus / "attributes",
            stage,
            bucket_documents,
            [scores[source.key]],
            QUALITY_SCHEMA,
        )
    return quality


def _summarize(shard: Shard) -> tuple[int, float, float, list[int]]:
    """Documents, sum and sum of squares of raw scores, documents a bucket."""
    count, total, squares = 0, 0.0, 0.0
    buckets = np.zeros(NUM_BUCKETS, np.int64)
    for table in shard.read(["raw_score", "quality_bucket"]):
        raw = np.asarray(table["raw_score"]).astype(np.float64)
        count += len(raw)
        total += float(raw.sum())
        squares += float((raw**2).sum())
        buckets += np.bincount(np.asarray(table["quality_bucket"]), minlength=NUM_BUCKETS)
    return count, total, squares, buckets.tolist()


def summarize_sources(engine: Engine, quality: Mapping[str, Dataset]) -> dict[str, SourceScores]:
    """Spread of scores and documents a bucket of every source that has documents."""
    summaries: dict[str, SourceScores] = {}
    for key, dataset in quality.items():
        parts = list(engine.map(_summarize, dataset.shards))
        count = sum(part[0] for part in parts)
        if not count:
            continue
        mean = math.fsum(part[1] for part in parts) / count
        variance = math.fsum(part[2] for part in parts) / count - mean**2
        buckets = tuple(sum(part[3][bucket] for part in parts) for bucket in range(NUM_BUCKETS))
        summaries[key] = SourceScores(count, math.sqrt(max(variance, 0.0)), buckets)
    return summaries
