"""Series of a run or of a whole lineage as one table, in formats that other tools read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from portolan.errors import UsageError
from portolan.files import atomic_file
from portolan.record.chain import ChainReader
from portolan.record.lineage_view import LineageView, read_lineages
from portolan.track.tracker import read_metrics, read_raw

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".parquet", ".csv", ".json")


def find_lineages(root: Path) -> list[LineageView]:
    """Lineages of the project's record; none if there is no journal."""
    path = root / "record" / "journal.jsonl"
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return read_lineages(ChainReader().read(file))


def collect_series(
    root: Path, name: str, keys: Sequence[str] = (), *, replays: bool = False
) -> "pl.DataFrame":
    """Values of run `name`, or of the canonical curve of lineage `name`.

    Columns run, row, completed, attempt, time, key, value; sorted by key and row. `replays` adds
    the rows that a later attempt repeated (of a run only).

    Raises:
        UsageError: neither a run nor a lineage has this name, or a key is in none of its runs.
    """
    import polars as pl

    wanted = list(keys) or None
    folder = root / "runs" / name
    if folder.is_dir():
        read = read_raw if replays else read_metrics
        frames = [read(folder, keys=wanted).with_columns(run=pl.lit(name))]
    else:
        view = next((view for view in find_lineages(root) if view.name == name), None)
        if view is None:
            runs = sorted(path.name for path in (root / "runs").glob("*") if path.is_dir())
            lineages = sorted(view.name for view in find_lineages(root))
            raise UsageError(
                f"there is no run or lineage {name!r}",
                remedy=f"use one of {', '.join([*runs, *lineages]) or 'none: nothing is trained'}",
            )
        if replays:
            raise UsageError(f"{name} is a lineage: replays are a run's", remedy="name a run")
        frames = [
            read_metrics(root / "runs" / run.name, keys=wanted)
            .filter(pl.col("row").is_between(interval.start, interval.end, closed="left"))
            .with_columns(run=pl.lit(run.name))
            for run, interval in zip(view.runs, view.intervals, strict=True)
        ]
    frame = pl.concat(frames).select("run", "row", "completed", "attempt", "time", "key", "value")
    if missing := sorted(set(keys) - set(frame["key"].unique())):
        raise UsageError(f"{name} has no series {missing[0]!r}", remedy="check the key")
    return frame.sort("key", "row", "attempt")


def export_series(
    root: Path, name: str, output: Path, keys: Sequence[str] = (), *, replays: bool = False
) -> int:
    """Write the table to `output` by its suffix (.parquet, .csv or .json); returns its rows.

    JSON is one object a line and writes null for NaN and infinities, which it cannot hold.
    """
    if output.suffix not in SUFFIXES:
        raise UsageError(
            f"the format of {output.name} is unknown", remedy=f"end it in {', '.join(SUFFIXES)}"
        )
    frame = collect_series(root, name, keys, replays=replays)
    with atomic_file(output) as temporary:
        if output.suffix == ".parquet":
            frame.write_parquet(temporary, compression="zstd")
        elif output.suffix == ".csv":
            frame.write_csv(temporary, datetime_format="%Y-%m-%dT%H:%M:%S%.3fZ")
        else:
            frame.write_ndjson(temporary)
    return frame.height
