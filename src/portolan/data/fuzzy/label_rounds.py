"""Connected components in rounds on disk, for more nodes than memory holds.

Each round: a node takes the least label among its neighbours and itself, and hands it to the node
that was its label before; then it takes the label of its label. Handing over lets a whole region
follow at once, so rounds grow with the logarithm of the longest path. A round is an artifact: a
killed run goes on after the last complete one. Nodes are named by XXH3-128 of `source key|id`, 32
hex digits; labels are names of nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import xxhash

from portolan.data.documents import Stage
from portolan.data.engine import Dataset, Engine, align, exchange, map_shards
from portolan.errors import PortolanError

VERSION = 1
NODES_PER_PARTITION = 2_000_000
_STRING = [pa.field(name, pa.string(), nullable=False) for name in ("node", "other", "label", "id")]
_NODE, _OTHER, _LABEL, _ID = _STRING
_SOURCE = pa.field("source", pa.int32(), nullable=False)
_SIZE = pa.field("component_size", pa.int64(), nullable=False)
ARC_SCHEMA = pa.schema([_NODE, _OTHER])
NAME_SCHEMA = pa.schema([_NODE, _SOURCE, _ID])
LABEL_SCHEMA = pa.schema([_NODE, _LABEL])
SIZE_SCHEMA = pa.schema([_LABEL, _SIZE])
SIZED_SCHEMA = pa.schema([_NODE, _LABEL, _SIZE])
PLACED_SCHEMA = pa.schema([_SOURCE, _ID, _LABEL, _SIZE])


class NotConverged(PortolanError):
    """Labels still changed in the last round that was allowed; nothing is published."""

    def __init__(self, rounds: int, changed: int) -> None:
        super().__init__(
            f"components of near-duplicates: {changed} labels still changed in round {rounds}",
            remedy="raise max_rounds; finished rounds are kept",
        )
        self.rounds, self.changed = rounds, changed


def label_in_rounds(
    engine: Engine, keys: Sequence[str], edges: Dataset, max_rounds: int, work: Path
) -> Iterator[tuple[str, pa.Table]]:
    """(source, rows of id, component, component_size sorted by id) in the order of the sources.

    Raises:
        NotConverged: labels still change after `max_rounds`.
    """
    plan = _Plan(engine, work, 1 + edges.num_rows // NODES_PER_PARTITION)
    arcs = plan.map("arcs", list_arcs, [edges], ARC_SCHEMA, sources=list(keys))
    arcs = plan.exchange("arcs_by_node", [arcs], "node", ("other",))
    names = plan.map("names", list_names, [edges], NAME_SCHEMA, sources=list(keys))
    names = plan.exchange("names_by_node", [names], "node")
    names = plan.map("distinct_names", keep_first, [names], NAME_SCHEMA, key="node")
    labels = plan.map("labels_0", label_by_name, [names], LABEL_SCHEMA)
    for number in range(1, max_rounds + 1):
        previous, labels = labels, plan.round(number, arcs, labels)
        if [shard.digest for shard in labels.shards] == [s.digest for s in previous.shards]:
            break
    else:
        raise NotConverged(max_rounds, _count_changed(previous, labels))
    return _place(plan, keys, names, labels)


class _Plan:
    """Steps of the same partitioning, so that all their results are co-partitioned by node."""

    def __init__(self, engine: Engine, work: Path, partitions: int) -> None:
        self.engine, self.work, self.partitions = engine, work, partitions

    def map(
        self, name: str, function: Any, inputs: Sequence[Dataset], schema: pa.Schema, **params: Any
    ) -> Dataset:
        stage = Stage(f"fuzzy_{name}", VERSION, params, tuple(d.key for d in inputs))
        return map_shards(self.engine, self.work, stage, function, inputs, schema)

    def exchange(
        self, name: str, inputs: Sequence[Dataset], key: str, order: tuple[str, ...] = ()
    ) -> Dataset:
        stage = Stage(f"fuzzy_{name}", VERSION, {}, tuple(d.key for d in inputs))
        return exchange(
            self.engine,
            self.work,
            stage,
            inputs,
            key=key,
            partitions=self.partitions,
            order=order,
        )

    def round(self, number: int, arcs: Dataset, labels: Dataset) -> Dataset:
        """Labels after one round."""
        sent = self.map(f"sent_{number}", send_labels, [arcs, labels], LABEL_SCHEMA)
        sent = self.exchange(f"received_{number}", [sent], "node", ("label",))
        least = self.map(f"least_{number}", keep_first, [sent], LABEL_SCHEMA, key="node")
        handed = self.map(f"handed_{number}", hand_over, [labels, least], LABEL_SCHEMA)
        asked = self.exchange(f"asked_{number}", [least], "label", ("node",))
        told = self.map(f"told_{number}", label_of_label, [asked, least], LABEL_SCHEMA)
        both = self.exchange(f"both_{number}", [told, handed], "node", ("label",))
        return self.map(f"labels_{number}", keep_first, [both], LABEL_SCHEMA, key="node")


def _place(
    plan: _Plan, keys: Sequence[str], names: Dataset, labels: Dataset
) -> Iterator[tuple[str, pa.Table]]:
    """Labels with the size of their component, back at the documents they belong to."""
    grouped = plan.exchange("labels_by_component", [labels], "label", ("node",))
    sizes = plan.map("component_sizes", count_labels, [grouped], SIZE_SCHEMA)
    sized = plan.map("sized", add_size, [grouped, sizes], SIZED_SCHEMA)
    sized = plan.exchange("sized_by_node", [sized], "node")
    placed = plan.map("named", add_name, [sized, names], PLACED_SCHEMA)
    stage = Stage("fuzzy_placed", VERSION, {}, (placed.key,))
    ordered = exchange(
        plan.engine, plan.work, stage, [placed], key="source", partitions=1, order=("id",)
    )
    for name in ordered.names:
        for table in ordered.read(name):
            frame = _frame(table)
            for (rank,), part in frame.group_by("source", maintain_order=True):
                part = part.rename({"label": "component"})
                yield keys[int(rank)], _table(part.select("id", "component", "component_size"))


def _frame(table: pa.Table) -> polars.DataFrame:
    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)
    return frame


def _table(frame: polars.DataFrame) -> pa.Table:
    return frame.to_arrow(compat_level=polars.CompatLevel.oldest())


def _node_names(
    keys: Sequence[str], table: pa.Table, prefix: str
) -> tuple[list[int], list[str], list[str]]:
    ranks, highs, lows = (
        table[f"{prefix}{name}"].to_pylist() for name in ("source", "high", "low")
    )
    ids = [f"{high:016x}{low:016x}" for high, low in zip(highs, lows, strict=True)]
    pairs = (f"{keys[rank]}|{name}".encode() for rank, name in zip(ranks, ids, strict=True))
    return ranks, ids, [xxhash.xxh3_128_hexdigest(pair) for pair in pairs]


def list_arcs(params: Mapping[str, Any], edges: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Every edge in both directions, between named nodes."""
    for table in edges:
        begins = _node_names(params["sources"], table, "")[2]
        ends = _node_names(params["sources"], table, "to_")[2]
        yield pa.table([begins + ends, ends + begins], schema=ARC_SCHEMA)


def list_names(params: Mapping[str, Any], edges: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Name, source and id of the ends of edges."""
    for table in edges:
        for prefix in ("", "to_"):
            ranks, ids, names = _node_names(params["sources"], table, prefix)
            yield pa.table([names, ranks, ids], schema=NAME_SCHEMA)


def label_by_name(params: Mapping[str, Any], names: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Every node begins as its own label."""
    for table in names:
        yield pa.table([table["node"], table["node"]], schema=LABEL_SCHEMA)


def keep_first(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The first row of each value of a sorted column."""
    previous: Any = None
    for table in tables:
        frame = _frame(table).unique(params["key"], keep="first", maintain_order=True)
        frame = frame.filter(polars.col(params["key"]) != polars.lit(previous or ""))
        if frame.height:
            previous = frame[params["key"]][-1]
            yield _table(frame)


def _look_up(
    left: Iterator[pa.Table], right: Iterator[pa.Table], left_on: str, right_on: str
) -> Iterator[polars.DataFrame]:
    """Left tables with the columns of the one right row of the same key; both rise by it."""
    known: polars.DataFrame | None = None
    for table in left:
        frame = _frame(table)
        if not frame.height:
            continue
        begin, end = frame[left_on][0], frame[left_on][-1]
        parts = [] if known is None else [known]
        while not parts or not parts[-1].height or parts[-1][right_on][-1] < end:
            following = next(right, None)
            if following is None:
                break
            parts.append(_frame(following))
        known = polars.concat(parts).filter(polars.col(right_on) >= begin)
        yield frame.join(
            known, left_on=left_on, right_on=right_on, how="inner", maintain_order="left"
        )


def send_labels(
    params: Mapping[str, Any], arcs: Iterator[pa.Table], labels: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """The label of each node, to its neighbours and to itself."""
    for joined in _look_up(arcs, labels, "node", "node"):
        sent = joined.select(node=polars.col("other"), label=polars.col("label"))
        yield _table(polars.concat([sent, joined.select("node", "label").unique()]).sort("node"))


def hand_over(
    params: Mapping[str, Any], before: Iterator[pa.Table], after: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """To the old label of each node, the node's new one where it is less."""
    for old, new in align(before, after):
        frame = polars.DataFrame({"node": _frame(old)["label"], "label": _frame(new)["label"]})
        yield _table(frame.filter(polars.col("label") < polars.col("node")))


def label_of_label(
    params: Mapping[str, Any], asked: Iterator[pa.Table], labels: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """For each node the label that its label has."""
    renamed = (table.rename_columns(["target", "new"]) for table in labels)
    for joined in _look_up(asked, renamed, "label", "target"):
        yield _table(joined.select("node", label="new"))


def count_labels(params: Mapping[str, Any], labels: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Size of each component, from rows sorted by component."""
    last = polars.DataFrame(schema={"label": polars.String, "component_size": polars.Int64})
    for table in labels:
        counts = _frame(table).group_by("label", maintain_order=True)
        counts = counts.agg(component_size=polars.len().cast(polars.Int64))
        counts = polars.concat([last, counts]).group_by("label", maintain_order=True).sum()
        last = counts.tail(1)
        yield _table(counts.head(-1))
    yield _table(last)


def add_size(
    params: Mapping[str, Any], labels: Iterator[pa.Table], sizes: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """Labels with the size of their component."""
    for joined in _look_up(labels, sizes, "label", "label"):
        yield _table(joined.select("node", "label", "component_size"))


def add_name(
    params: Mapping[str, Any], sized: Iterator[pa.Table], names: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """Labels at the documents they belong to."""
    for joined in _look_up(sized, names, "node", "node"):
        yield _table(joined.select("source", "id", "label", "component_size"))


def _count_changed(before: Dataset, after: Dataset) -> int:
    changed = 0
    for name in after.names:
        for old, new in zip(before.read(name), after.read(name), strict=True):
            changed += int((_frame(old)["label"] != _frame(new)["label"]).to_numpy().sum())
    return changed
