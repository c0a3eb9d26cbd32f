"""Members of candidate groups with their text, sorted by group and order of preference."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from portolan.data.dedup import NormalizedSource
from portolan.data.documents import ROW_GROUP_DOCUMENTS, Stage, source_folder_name
from portolan.data.engine import Dataset, Engine, align, exchange, map_shards
from portolan.data.fuzzy.minhash import constants, permute
from portolan.data.fuzzy.shingles import clean, shingle_hashes

VERSION = 1
ROWS_PER_PARTITION = 50_000
ORDER = ("rank", "negative_characters", "source", "id")
PART_SEED, PART_WORDS = 43, 5
SLICE_BITS, BITS_PER_MERGE = 4, 16

MEMBER_SCHEMA = pa.schema(
    [
        pa.field("group", pa.string(), nullable=False),
        pa.field("rank", pa.int64(), nullable=False),
        pa.field("negative_characters", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("component", pa.string(), nullable=False),
        pa.field("component_size", pa.int64(), nullable=False),
        pa.field("part", pa.string(), nullable=False),
        pa.field("level", pa.int64(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("buckets", pa.binary(), nullable=False),
        pa.field("text", pa.string()),
    ]
)


class Member(NamedTuple):
    """A document of a candidate group.

    `group` names the component, and the part of it at `level` > 0; `buckets` are uint64 bytes;
    `text` is at most the 8 Mi characters that are read.
    """

    group: str
    rank: int
    negative_characters: int
    source: str
    id: str
    component: str
    component_size: int
    part: str
    level: int
    truncated: bool
    buckets: bytes
    text: str | None

    @property
    def characters(self) -> int:
        """Length of the whole document."""
        return -self.negative_characters

    @property
    def body(self) -> str:
        """The text; only rows that are no longer compared lack it."""
        assert self.text is not None
        return self.text


def read_members(tables: Iterable[pa.Table]) -> Iterator[Member]:
    """Rows of tables that hold at least the columns of a member."""
    for table in tables:
        columns = [table[name].to_pylist() for name in MEMBER_SCHEMA.names]
        yield from itertools.starmap(Member, zip(*columns, strict=True))


def member_table(members: Sequence[Member]) -> pa.Table:
    """Members as a table."""
    columns = list(zip(*members, strict=True)) or [[] for _ in MEMBER_SCHEMA]
    return pa.table([list(column) for column in columns], schema=MEMBER_SCHEMA)


def collect_source(
    params: Mapping[str, Any],
    documents: Iterator[pa.Table],
    signatures: Iterator[pa.Table],
    components: Iterator[pa.Table],
) -> Iterator[pa.Table]:
    """Member rows of a source's documents that have a component."""
    rows_of_source = list(components)
    if not rows_of_source:
        return
    found = pa.concat_tables(rows_of_source)
    ids = found["id"].combine_chunks()
    for table, signed in align(documents, signatures):
        places = pc.index_in(table["id"], value_set=ids)  # pyright: ignore
        if places.null_count == table.num_rows:
            continue
        keep = places.is_valid()
        table, signed = table.filter(keep), signed.filter(keep)
        group = found.take(places.drop_null())
        rows = table.num_rows
        buckets = np.asarray(pc.list_flatten(signed["buckets"]), "<u8").reshape(rows, -1)  # pyright: ignore
        texts = pc.utf8_slice_codeunits(table["text"], 0, params["max_characters"])  # pyright: ignore
        columns = {
            "group": group["component"],
            "rank": pa.array(np.full(rows, params["rank"], np.int64)),
            "negative_characters": pc.negate(signed["characters"]),  # pyright: ignore
            "source": pa.array([params["source"]] * rows, pa.string()),
            "id": table["id"],
            "component": group["component"],
            "component_size": group["component_size"],
            "part": pa.array([""] * rows, pa.string()),
            "level": pa.array(np.zeros(rows, np.int64)),
            "truncated": signed["truncated"],
            "buckets": pa.array([row.tobytes() for row in buckets], pa.binary()),
            "text": texts,
        }
        yield pa.table(columns).select(MEMBER_SCHEMA.names).cast(MEMBER_SCHEMA)


def collect_members(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    signatures: Sequence[Dataset],
    components: Dataset,
    source_rank: Sequence[str],
    max_characters: int,
    work: Path,
) -> Dataset:
    """Members of all groups, those of a group together and in order.

    The order is (rank of the source, most characters, source key, id); without `source_rank` all
    ranks are equal.
    """
    collected = []
    for source, signed in zip(sources, signatures, strict=True):
        inputs = [
            Dataset(source.folder, source.manifest),
            signed,
            components.within(source_folder_name(source.key)),
        ]
        is_ranked = source.key in source_rank
        params = {
            "source": source.key,
            "rank": source_rank.index(source.key) if is_ranked else len(source_rank),
            "max_characters": max_characters,
        }
        keys = tuple(dataset.key for dataset in inputs)
        stage = Stage("fuzzy_documents", VERSION, params, keys)
        collected.append(map_shards(engine, work, stage, collect_source, inputs, MEMBER_SCHEMA))
    return group_members(engine, "fuzzy_members", collected, MEMBER_SCHEMA, work)


def group_members(
    engine: Engine, name: str, inputs: Sequence[Dataset], schema: pa.Schema, work: Path
) -> Dataset:
    """Rows of members, sorted by group and order."""
    stage = Stage(name, VERSION, {}, tuple(dataset.key for dataset in inputs))
    partitions = 1 + sum(dataset.num_rows for dataset in inputs) // ROWS_PER_PARTITION
    return exchange(engine, work, stage, inputs, key="group", partitions=partitions, order=ORDER)


def bounded_groups(
    members: Iterable[Member], max_documents: int, max_characters: int
) -> Iterator[tuple[bool, list[Member]]]:
    """(fits, members) of each group; one that does not fit comes in pieces.

    Memory: the limits; once a group is known to be too large, its rest comes in small pieces.
    """
    for _, stream in itertools.groupby(members, key=attrgetter("group")):
        held: list[Member] = []
        characters, fits = 0, True
        for member in stream:
            size = len(member.body)
            most = max_documents if fits else min(max_documents, ROW_GROUP_DOCUMENTS)
            if held and (len(held) >= most or characters + size > max_characters):
                fits = False
                for begin in range(0, len(held), ROW_GROUP_DOCUMENTS):
                    yield fits, held[begin : begin + ROW_GROUP_DOCUMENTS]
                held, characters = [], 0
            held.append(member)
            characters += size
        yield fits, held


def split_group(members: Sequence[Member], merging: int) -> list[Member]:
    """The members of a group that is too large, each in its part at the next level.

    Level 1 goes by the least permuted hash of the 5-word shingles, so that near-equal texts stay
    together; each further level by 4 bits more of XXH3-64(id). Splits can part true duplicates,
    so each merge round draws other constants and takes other bits.
    """
    level = members[0].level + 1
    if level == 1:
        high, low = constants(1, PART_SEED + merging)
        shingles = shingle_hashes([clean(m.body) for m in members], "word", PART_WORDS)
        least = np.minimum.reduceat(permute(shingles.hashes, high, low)[0], shingles.offsets[:-1])
        parts = [f"{value:016x}" for value in least.tolist()]
    else:
        parts = []
        for member in members:
            bits = xxhash.xxh3_64_intdigest(member.id.encode()) >> BITS_PER_MERGE * merging
            bits %= 1 << SLICE_BITS * (level - 1)
            parts.append(f"{member.part.partition('-')[0]}-{bits:0{level - 1}x}")
    return [
        member._replace(group=f"{member.component}/{part}", part=part, level=level)
        for member, part in zip(members, parts, strict=True)
    ]
