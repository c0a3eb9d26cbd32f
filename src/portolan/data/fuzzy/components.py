"""Connected components of candidate edges, in memory or in rounds on disk.

A component is named by the least XXH3-128 of `source key|id` of its members. It is a group to be
verified, never a decision.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import xxhash
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from portolan.data.dedup import NormalizedSource
from portolan.data.documents import Stage, run_stage
from portolan.data.engine import Dataset, Engine
from portolan.data.fuzzy.candidates import NODE_COLUMNS
from portolan.data.fuzzy.label_rounds import label_in_rounds
from portolan.data.fuzzy.placement import write_by_shard

VERSION = 1
MAX_NODES_IN_MEMORY = 20_000_000
MIN_EDGES_AT_ONCE = 500_000
COMPONENT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("component", pa.string(), nullable=False),
        pa.field("component_size", pa.int64(), nullable=False),
    ]
)


def node_key(source: str, identifier: str) -> str:
    """XXH3-128 of `source|id`, 32 hex digits: equal ids of two sources are two nodes."""
    return xxhash.xxh3_128_hexdigest(f"{source}|{identifier}".encode())


def find_components(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    edges: Dataset,
    num_documents: int,
    max_rounds: int,
    work: Path,
    *,
    max_nodes_in_memory: int = MAX_NODES_IN_MEMORY,
) -> Dataset:
    """Sparse attribute (id, component, component_size) of all documents with an edge, by source.

    Memory: about 150 bytes a node up to `max_nodes_in_memory` documents; above it, one exchange.

    Raises:
        NotConverged: rounds on disk still changed labels after `max_rounds`.
    """
    keys = [source.key for source in sources]
    stage = Stage("fuzzy_component", VERSION, {"sources": keys}, (edges.key,))

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if num_documents <= max_nodes_in_memory:
            tables = _label_in_memory(keys, edges)
        else:
            tables = label_in_rounds(engine, keys, edges, max_rounds, work)
        return write_by_shard(folder, sources, tables, COMPONENT_SCHEMA), {}

    folder, manifest, _ = run_stage(work, stage, build)
    return Dataset(folder, manifest)


def _label_in_memory(keys: Sequence[str], edges: Dataset) -> Iterator[tuple[str, pa.Table]]:
    """(source, its rows sorted by id) in the order of the sources."""
    nodes = _list_nodes(edges)
    labels = _connect(nodes, edges)
    source, high, low = (nodes[name].to_numpy() for name in NODE_COLUMNS)
    ids = [f"{h:016x}{i:016x}" for h, i in zip(high.tolist(), low.tolist(), strict=True)]
    owners = [keys[int(rank)] for rank in source]
    names = [node_key(owner, name) for owner, name in zip(owners, ids, strict=True)]
    frame = polars.DataFrame({"label": labels, "name": polars.Series(names, dtype=polars.String)})
    found = frame.with_columns(
        component=polars.col("name").min().over("label"), size=polars.len().over("label")
    )
    for rank, key in enumerate(keys):
        begin, end = np.searchsorted(source, [rank, rank + 1])
        part = found.slice(begin, end - begin)
        arrays = [pa.array(ids[begin:end], pa.string()), part["component"], part["size"]]
        yield key, pa.table([_as_arrow(array) for array in arrays], names=COMPONENT_SCHEMA.names)


def _as_arrow(values: Any) -> Any:
    if isinstance(values, polars.Series):
        return values.to_arrow(compat_level=polars.CompatLevel.oldest())
    return values


def _read_edges(edges: Dataset) -> Iterator[polars.DataFrame]:
    for name in edges.names:
        for table in edges.read(name):
            frame = polars.from_arrow(table)
            assert isinstance(frame, polars.DataFrame)
            yield frame


def _list_nodes(edges: Dataset) -> polars.DataFrame:
    """Distinct nodes with an edge, sorted by source and id."""
    nodes = polars.DataFrame(
        schema={"source": polars.Int32, "high": polars.UInt64, "low": polars.UInt64}
    )
    waiting, rows = [nodes], 0
    for frame in _read_edges(edges):
        ends = frame.select(f"to_{name}" for name in NODE_COLUMNS)
        both = polars.concat([frame.select(NODE_COLUMNS), ends.rename(lambda name: name[3:])])
        waiting.append(both.unique())
        rows += waiting[-1].height
        if rows > max(MIN_EDGES_AT_ONCE, waiting[0].height):
            waiting, rows = [polars.concat(waiting).unique()], 0
    return polars.concat(waiting).unique().sort(*NODE_COLUMNS)


def _connect(nodes: polars.DataFrame, edges: Dataset) -> np.ndarray:
    """Index of the first node of each node's component, int64[n]."""
    numbered = nodes.with_row_index("place")
    labels = np.arange(nodes.height, dtype=np.int64)
    waiting: list[np.ndarray] = []
    rows = 0
    for frame in _read_edges(edges):
        ends = [f"to_{name}" for name in NODE_COLUMNS]
        joined = frame.join(numbered, on=NODE_COLUMNS, how="left", maintain_order="left")
        other = frame.select(ends).join(
            numbered, left_on=ends, right_on=NODE_COLUMNS, how="left", maintain_order="left"
        )
        waiting.append(np.stack([joined["place"].to_numpy(), other["place"].to_numpy()]))
        rows += frame.height
        if rows > max(MIN_EDGES_AT_ONCE, len(labels)):
            labels, waiting, rows = _merge(labels, waiting), [], 0
    return _merge(labels, waiting)


def _merge(labels: np.ndarray, edges: Sequence[np.ndarray]) -> np.ndarray:
    """Labels after adding edges to components that labels describe."""
    nodes = np.arange(len(labels))
    begins, ends = np.concatenate([*edges, np.stack([nodes, labels])], axis=1)
    graph = coo_matrix((np.ones(len(begins), bool), (begins, ends)), shape=(len(labels),) * 2)
    count, component = connected_components(graph, directed=False)
    first = np.zeros(count, np.int64)
    first[component[::-1]] = nodes[::-1]
    return first[component]
