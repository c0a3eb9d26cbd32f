"""The pinned sample: the documents that every fit of the data map is made from.

Inside a source the documents with the smallest XXH3-64 of `seed:source:id` are taken, which
depends on no order and no shard. The sample is drawn once and stays when sources are added, and
with it every fit and every attribute of the old sources; it is drawn anew on request, when its
settings change, or when one of its sources changes.
"""

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from portolan.curation_settings import EmbeddingSettings
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage, open_stage, source_folder_name
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.engine.dataset import Shard
from portolan.errors import UsageError
from portolan.files import read_json, write_json_atomic

VERSION = 1
SMALL_SOURCE_ROWS = 1000
FITS, PIN = "fits", "sample.json"
SAMPLE_SCHEMA = pa.schema(
    [pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)]
)
Ranks = NDArray[np.uint64]


@dataclass(frozen=True)
class Sample:
    """Sampled documents of each source, co-partitioned with it; sources in key order.

    `pinned` says that it was drawn before, from these sources and perhaps not from all.
    """

    sources: Mapping[str, Dataset]
    pinned: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """Stage keys of the parts."""
        return tuple(part.key for part in self.sources.values())

    @property
    def num_documents(self) -> int:
        """Documents in all."""
        return sum(part.num_rows for part in self.sources.values())


def documents_of(source: NormalizedSource) -> Dataset:
    """The document shards of a normalised source."""
    return Dataset(source.folder, source.manifest)


def ranks_of(ids: Sequence[str], seed: int, source: str) -> Ranks:
    """XXH3-64 of `seed:source:id`, uint64[n]."""
    prefix = f"{seed}:{source}:".encode()
    hashed = (xxhash.xxh3_64_intdigest(prefix + name.encode()) for name in ids)
    return np.fromiter(hashed, np.uint64, len(ids))


def quotas(rows: Mapping[str, int], total: int) -> dict[str, int]:
    """How many documents each source gives to a sample of `total`.

    All of them if there are no more. Else a source of at most 1,000 rows gives one, and the others
    share the rest in proportion to their rows: integer parts, then largest remainders, ties by key.
    """
    if sum(rows.values()) <= total:
        return dict(rows)
    small = {key: min(1, count) for key, count in rows.items() if count <= SMALL_SOURCE_ROWS}
    large = {key: count for key, count in rows.items() if key not in small}
    shared = share_out(large, max(0, total - sum(small.values())))
    return {key: small.get(key, shared.get(key, 0)) for key in rows}


def share_out(weights: Mapping[str, int], total: int) -> dict[str, int]:
    """Integers in proportion to `weights` with sum `total`: largest remainders, ties by key."""
    if not (whole := sum(weights.values())):
        return dict.fromkeys(weights, 0)
    exact = {key: Fraction(total * weight, whole) for key, weight in weights.items()}
    shares = {key: int(value) for key, value in exact.items()}
    order = sorted(weights, key=lambda key: (shares[key] - exact[key], key.encode()))
    for key in order[: total - sum(shares.values())]:
        shares[key] += 1
    return shares


def removed_ids(tables: Iterator[pa.Table]) -> set[str]:
    """Ids that an attribute removes: those of all rows, or where its boolean column says so."""
    found: set[str] = set()
    for table in tables:
        for field in table.schema:
            if pa.types.is_boolean(field.type):
                table = table.filter(table[field.name])
                break
        found.update(table["id"].to_pylist())
    return found


def surviving(documents: Iterator[pa.Table], removed: Sequence[Iterator[pa.Table]]) -> Any:
    """The tables of documents without those that any attribute removes."""
    gone = set[str]().union(*(removed_ids(tables) for tables in removed))
    for table in documents:
        if gone:
            table = table.filter(
                pc.invert(pc.is_in(table["id"], pa.array(gone, pa.string())))  # pyright: ignore
            )
        yield table


@dataclass(frozen=True)
class RankTask:
    """A shard of a source, and the same shards of what removes documents."""

    shard: Shard
    source: str
    removed: tuple[Shard, ...] = ()


def _smallest_ranks(task: RankTask, seed: int, limit: int) -> tuple[int, Ranks]:
    """Surviving documents of a shard, and their smallest ranks in rising order."""
    count, kept = 0, np.zeros(0, np.uint64)
    removed = [shard.read() for shard in task.removed]
    for table in surviving(task.shard.read(["id"]), removed):
        ranks = ranks_of(table["id"].to_pylist(), seed, task.source)
        count += len(ranks)
        kept = np.sort(np.concatenate([kept, ranks]))[:limit]
    return count, kept


def highest_ranks(
    engine: Engine,
    tasks: Sequence[RankTask],
    total: int,
    seed: int,
    choose: Callable[[Mapping[str, int], int], Mapping[str, int]],
) -> dict[str, str]:
    """The highest rank that is taken of each source, 16 hex digits; sources with none are absent.

    `choose(documents, total)` says how many documents a source gives. Memory: 8 bytes a document
    of the sample and source.
    """
    counts = dict.fromkeys((task.source for task in tasks), 0)
    smallest: dict[str, Ranks] = {}
    rank = functools.partial(_smallest_ranks, seed=seed, limit=total)
    for task, (count, ranks) in zip(tasks, engine.map(rank, tasks), strict=True):
        counts[task.source] += count
        known = smallest.get(task.source, np.zeros(0, np.uint64))
        smallest[task.source] = np.sort(np.concatenate([known, ranks]))[:total]
    wanted = choose(counts, total)
    return {key: f"{int(smallest[key][quota - 1]):016x}" for key, quota in wanted.items() if quota}


def is_taken(ids: Sequence[str], params: Mapping[str, Any]) -> pa.Array:
    """Which documents have a rank of at most `highest_rank`; `params` names source and seed too."""
    ranks = ranks_of(ids, params["seed"], params["source"])
    return pa.array(ranks <= np.uint64(int(params["highest_rank"], 16)))


def _take_sample(
    params: Mapping[str, Any], documents: Iterator[pa.Table], *removed: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """Id and text of the surviving documents whose rank is at most `highest_rank`."""
    for table in surviving(documents, removed):
        taken = is_taken(table["id"].to_pylist(), params)
        yield table.select(SAMPLE_SCHEMA.names).filter(taken)


def draw_sample(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    removed: Sequence[Dataset],
    settings: EmbeddingSettings,
    corpus: Path,
    *,
    refit: bool = False,
) -> Sample:
    """The pinned sample, drawn if there is none that holds, or if `refit` asks for a new one.

    `removed` are attributes whose documents do not count; each has a folder a source. Memory: the
    ranks of the sample, and the text of one row group.

    Raises:
        UsageError: no source has a document left.
    """
    ordered = in_key_order(sources)
    if not refit and (pinned := _open_pinned(ordered, settings, corpus)) is not None:
        return pinned
    tasks = [
        RankTask(
            shard,
            source.key,
            tuple(
                attribute.within(source_folder_name(source.key)).shard(shard.name)
                for attribute in removed
            ),
        )
        for source in ordered
        for shard in documents_of(source).shards
    ]
    highest = highest_ranks(engine, tasks, settings.sample_documents, settings.seed, quotas)
    parts: dict[str, Dataset] = {}
    for source in ordered:
        if source.key not in highest:
            continue
        params = {
            "source": source.key,
            "seed": settings.seed,
            "highest_rank": highest[source.key],
        }
        keys = (source.stage_key, *(attribute.key for attribute in removed))
        stage = Stage("sample", VERSION, params, keys, f"sample/{source.key}")
        folder = source_folder_name(source.key)
        inputs = [documents_of(source), *(attribute.within(folder) for attribute in removed)]
        parts[source.key] = map_shards(
            engine, corpus / FITS, stage, _take_sample, inputs, SAMPLE_SCHEMA
        )
    if not parts:
        raise UsageError(
            "no document is left to learn the data map from",
            remedy="look at what removed them: portolan curate prints it for each source",
        )
    _pin(parts, ordered, settings, corpus)
    return Sample(parts, pinned=False)


def _pin_settings(settings: EmbeddingSettings) -> dict[str, int]:
    return {"sample_documents": settings.sample_documents, "seed": settings.seed}


def _pin(
    parts: Mapping[str, Dataset],
    sources: Sequence[NormalizedSource],
    settings: EmbeddingSettings,
    corpus: Path,
) -> None:
    """Write down which folders are the sample, and of which documents; drop an older sample."""
    documents = {source.key: source.stage_key for source in sources}
    pinned = {
        key: {"documents": documents[key], "folder": part.folder.name, "key": part.key}
        for key, part in parts.items()
    }
    write_json_atomic(corpus / FITS / PIN, {**_pin_settings(settings), "sources": pinned})
    current = {part.folder.name for part in parts.values()}
    for folder in (corpus / FITS).glob("sample~*_*"):
        if folder.name not in current:
            shutil.rmtree(folder, ignore_errors=True)


def _open_pinned(
    sources: Sequence[NormalizedSource], settings: EmbeddingSettings, corpus: Path
) -> Sample | None:
    """The pinned sample if it was drawn with these settings and its sources are what they were."""
    try:
        pin = read_json(corpus / FITS / PIN)
        if any(pin[name] != value for name, value in _pin_settings(settings).items()):
            return None
        documents = {source.key: source.stage_key for source in sources}
        parts: dict[str, Dataset] = {}
        for key in sorted(pin["sources"], key=str.encode):
            entry = pin["sources"][key]
            folder = corpus / FITS / entry["folder"]
            manifest = open_stage(folder, entry["key"])
            if manifest is None or documents.get(key) != entry["documents"]:
                return None
            parts[key] = Dataset(folder, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Sample(parts, pinned=True) if parts else None
