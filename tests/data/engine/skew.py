"""A process that moves and reduces rows, most of them with one key, and prints its peak memory."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from portolan.data.documents import Stage, run_stage, write_shard
from portolan.data.engine import Dataset, Engine, exchange, join_sorted, reduce_groups

ROW_BYTES = 1000
SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64()), ("payload", pa.binary(ROW_BYTES))])
COUNTS = pa.schema([("key", pa.string()), ("n", pa.int64())])


def write_rows(folder: Path, num_rows: int, share: float):
    """Rows with one key at a `share` of them, the others distinct."""
    random = np.random.default_rng(0)

    def tables():
        for begin in range(0, num_rows, 4000):
            rows = np.arange(begin, min(begin + 4000, num_rows))
            payload = pa.FixedSizeBinaryArray.from_buffers(
                SCHEMA.field("payload").type,
                len(rows),
                [None, pa.py_buffer(random.bytes(ROW_BYTES * len(rows)))],
            )
            keys = np.where(random.random(len(rows)) < share, "large", rows.astype(str))
            yield pa.table([pa.array(keys, pa.string()), rows[::-1], payload], schema=SCHEMA)

    return [write_shard(folder, "part-0.parquet", SCHEMA, tables())], {}


def count(params, key, tables):
    yield pa.table({"key": [key], "n": [sum(table.num_rows for table in tables)]})


def count_both(params, key, *sides):
    rows = sum(table.num_rows for side in sides for table in side)
    yield pa.table({"key": [key], "n": [rows]})


def peak_bytes() -> int:
    """Largest resident size of this process since it began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main(root: Path, num_rows: int, share: float, task_bytes: int) -> None:
    """Print {"rows": of the largest group, "peak": bytes above the start, "arrow": bytes}."""
    folder, manifest, _ = run_stage(
        root, Stage("rows", 1, {"n": num_rows}), lambda f: write_rows(f, num_rows, share)
    )
    dataset, engine = Dataset(folder, manifest), Engine(task_bytes=task_bytes)
    start = peak_bytes()
    stage = Stage("moved", 1, {}, (dataset.key,))
    moved = exchange(engine, root, stage, [dataset], key="key", partitions=2, order=("n",))
    stage = Stage("counts", 1, {}, (moved.key,))
    reduce_groups(engine, root, stage, moved, key="key", function=count, schema=COUNTS)
    stage = Stage("both", 1, {}, (moved.key,))
    joined = join_sorted(
        engine, root, stage, moved, moved, key="key", function=count_both, schema=COUNTS
    )
    rows = max(max(table["n"].to_pylist()) for name in joined.names for table in joined.read(name))
    arrow = pa.default_memory_pool().max_memory()
    print(json.dumps({"rows": rows // 2, "peak": peak_bytes() - start, "arrow": arrow}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
