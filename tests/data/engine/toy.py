"""A toy pipeline over three sources, its faulty tasks, and a process that can be killed."""

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.data.documents import Stage, document_id, run_stage, shard_name, write_shard
from portolan.data.engine import (
    Dataset,
    Engine,
    LocalExecutor,
    exchange,
    join_sorted,
    map_shards,
    reduce_groups,
)

WORDS = "ship harbour tide wind sail rope chart star port mast fog".split()
SHARDS = {"manual": 3, "manual/log": 2, "web": 4}
DOCUMENTS = {"manual": 2400, "manual/log": 1500, "web": 1800}
TEXTS = pa.schema([pa.field("id", pa.string(), False), pa.field("text", pa.string(), False)])
COUNTS = pa.schema(
    [
        pa.field("id", pa.string(), False),
        pa.field("first", pa.string(), False),
        pa.field("words", pa.int64(), False),
        pa.field("source", pa.string(), False),
    ]
)
TOTALS = pa.schema(
    [
        pa.field("first", pa.string(), False),
        pa.field("documents", pa.int64(), False),
        pa.field("words", pa.int64(), False),
    ]
)
SHARES = pa.schema(
    [
        pa.field("id", pa.string(), False),
        pa.field("of", pa.int64(), False),
        pa.field("share", pa.float64(), False),
    ]
)


def write_source(root: Path, key: str, count: int, num_shards: int) -> Dataset:
    """Texts of 3 to 40 words in shards sorted by id; nine of ten begin with `ship`."""
    words = random.Random(key)
    texts = [
        " ".join(["ship" if words.random() < 0.9 else words.choice(WORDS)])
        + f" {key} {index} "
        + " ".join(words.choices(WORDS, k=words.randint(1, 38)))
        for index in range(count)
    ]
    rows = sorted((document_id(text), text) for text in texts)

    def build(folder: Path):
        shards = []
        for shard in range(num_shards):
            part = rows[shard * count // num_shards : (shard + 1) * count // num_shards]
            table = pa.table([list(column) for column in zip(*part, strict=True)], schema=TEXTS)
            name = shard_name(shard, num_shards)
            shards.append(write_shard(folder, name, TEXTS, [table]))
        return shards, {}

    stage = Stage("texts", 1, {"source": key, "count": count, "shards": num_shards}, label=key)
    folder, manifest, _ = run_stage(root / "texts", stage, build)
    return Dataset(folder, manifest)


def write_sources(root: Path) -> dict[str, Dataset]:
    return {key: write_source(root, key, DOCUMENTS[key], SHARDS[key]) for key in SHARDS}


def count_words(params, texts):
    for table in texts:
        words = [text.split() for text in table["text"].to_pylist()]
        yield pa.table(
            {
                "id": table["id"],
                "first": [line[0] for line in words],
                "words": [len(line) for line in words],
                "source": [params["source"]] * len(words),
            }
        )


def add_up(params, first, tables):
    documents = words = 0
    for table in tables:
        documents += table.num_rows
        words += pc.sum(table["words"]).as_py()
    yield pa.table({"first": [first], "documents": [documents], "words": [words]})


def share(params, first, counts, totals):
    (total,) = totals
    for table in counts:
        of = np.full(table.num_rows, total["words"][0].as_py())
        yield pa.table({"id": table["id"], "of": of, "share": np.asarray(table["words"]) / of})


def count_source(engine, root, key, source, function=count_words):
    stage = Stage("count", 1, {"source": key}, (source.key,), label=f"count-{key}")
    return map_shards(engine, root / "attributes", stage, function, [source], COUNTS)


def combine(engine, root, counts):
    """Group by the first word, add up, and give every document its share of its group."""
    parent, keys = root / "attributes", tuple(dataset.key for dataset in counts)
    grouped = exchange(
        engine,
        parent,
        Stage("group", 1, {}, keys),
        counts,
        key="first",
        partitions=3,
        order=("words", "id"),
    )
    totals = reduce_groups(
        engine,
        parent,
        Stage("totals", 1, {}, (grouped.key,)),
        grouped,
        key="first",
        function=add_up,
        schema=TOTALS,
    )
    shares = join_sorted(
        engine,
        parent,
        Stage("shares", 1, {}, (grouped.key, totals.key)),
        grouped,
        totals,
        key="first",
        function=share,
        schema=SHARES,
    )
    return grouped, totals, shares


def run_toy(engine: Engine, root: Path, function=count_words):
    sources = write_sources(root)
    counts = [count_source(engine, root, key, sources[key], function) for key in sources]
    return counts, *combine(engine, root, counts)


def tree(root: Path) -> dict[str, str]:
    """SHA-256 of every file by its path."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def slowly(params, texts):
    time.sleep(0.08)
    yield from count_words(params, texts)


def refuse(flag: Path, params, texts):
    """Raise while the flag is there, and count the calls."""
    with flag.with_suffix(".calls").open("a") as file:
        file.write("x")
    if flag.exists():
        raise ValueError("a word is missing")
    yield from count_words(params, texts)


def lose_connection(flag: Path, params, texts):
    """Lose the connection twice."""
    calls = flag.with_suffix(".calls")
    with calls.open("a") as file:
        file.write("x")
    if len(calls.read_text()) <= 2:
        raise ConnectionResetError("by peer")
    yield from count_words(params, texts)


def die(flag: Path, params, texts):
    """Kill this worker while the flag names its source."""
    if flag.exists() and flag.read_text() == params["source"]:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from count_words(params, texts)


def fail_if_called(params, *tables):
    raise AssertionError("ran again")
    yield


if __name__ == "__main__":
    # Slow enough to be killed before its end.
    with Engine(
        LocalExecutor(int(sys.argv[2])), task_bytes=1 << 16, report=lambda _: time.sleep(0.05)
    ) as engine:
        run_toy(engine, Path(sys.argv[1]), slowly)
