"""Verification of all groups: parts of large components first, then their survivors together.

The survivors of the parts of a component are verified once more, in at most 3 rounds. A document
whose representative falls is tested against the new one; if that does not hold it either, it is
reinstated: kept, never a representative. So a kept document justifies every removal.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.compute as pc

from portolan.curation_settings import FuzzySettings
from portolan.data.documents import Stage
from portolan.data.engine import Dataset, Engine, exchange, map_shards
from portolan.data.fuzzy.members import (
    MEMBER_SCHEMA,
    ROWS_PER_PARTITION,
    group_members,
    read_members,
)
from portolan.data.fuzzy.verdicts import (
    REINSTATED,
    REMOVED,
    SPLIT,
    SURVIVOR,
    VERDICT_SCHEMA,
    Row,
    Verdict,
    count_equal,
    judge_members,
    verdict_table,
)
from portolan.data.fuzzy.verification import Rules, count_shared, fold, window_sets

VERSION = 1
MERGE_ROUNDS = 3
KEYED_SCHEMA = pa.schema([pa.field("representative", pa.string(), nullable=False), *VERDICT_SCHEMA])


@dataclass(frozen=True)
class Verification:
    """Runs the verification of one corpus."""

    engine: Engine
    settings: FuzzySettings
    work: Path

    def run(self, members: Dataset) -> list[Dataset]:
        """Verdicts on all members; the rows with status `removed` are the result."""
        whole, parts = self._verify(members, merging=0)
        verdicts = [whole]
        removed = self._select("parts_removed", parts, REMOVED) if parts else []
        for number in range(1, MERGE_ROUNDS + 1):
            survivors = self._survivors(number, parts)
            if not survivors:
                break
            grouped = group_members(
                self.engine, f"fuzzy_merged_{number}", survivors, MEMBER_SCHEMA, self.work
            )
            first, split = self._verify(grouped, merging=number)
            falls = self._select(f"fallen_{number}", [first, *split], REMOVED)
            removed = [self._retest(number, falls, removed)]
            parts = [first, *split]
            if not split:
                break
        return verdicts + removed

    def _verify(self, members: Dataset, *, merging: int) -> tuple[Dataset, list[Dataset]]:
        """Verdicts on whole groups, and those on the parts of groups that were too large."""
        found = [self._judge(members, merging)]
        while _count(found[-1], SPLIT):
            name = f"{merging}_{len(found)}"
            stage = Stage(f"fuzzy_split_{name}", VERSION, {}, (found[-1].key,))
            split = map_shards(
                self.engine, self.work, stage, take_split, [found[-1]], MEMBER_SCHEMA
            )
            name = f"fuzzy_parts_{name}"
            grouped = group_members(self.engine, name, [split], MEMBER_SCHEMA, self.work)
            found.append(self._judge(grouped, merging))
        return found[0], found[1:]

    def _judge(self, members: Dataset, merging: int) -> Dataset:
        params = {
            "containment": repr(self.settings.containment),
            "no_new_token": self.settings.no_new_token,
            "max_documents": self.settings.max_part_documents,
            "max_characters": self.settings.max_part_characters,
            "merging": merging,
        }
        stage = Stage("fuzzy_verdicts", VERSION, params, (members.key,))
        return map_shards(self.engine, self.work, stage, judge_members, [members], VERDICT_SCHEMA)

    def _select(self, name: str, inputs: Sequence[Dataset], status: str) -> list[Dataset]:
        """Rows of one status."""
        selected = []
        for dataset in inputs:
            params = {"status": status}
            stage = Stage(f"fuzzy_{name}", VERSION, params, (dataset.key,))
            selected.append(
                map_shards(self.engine, self.work, stage, select_rows, [dataset], VERDICT_SCHEMA)
            )
        return selected

    def _survivors(self, number: int, parts: Sequence[Dataset]) -> list[Dataset]:
        """Survivors of the last round, under the name of their component."""
        found = []
        for dataset in parts:
            stage = Stage(f"fuzzy_survivors_{number}", VERSION, {"round": number}, (dataset.key,))
            found.append(
                map_shards(self.engine, self.work, stage, regroup, [dataset], MEMBER_SCHEMA)
            )
        return [dataset for dataset in found if dataset.num_rows]

    def _retest(self, number: int, falls: Sequence[Dataset], removed: Sequence[Dataset]) -> Dataset:
        """Fallen members, and earlier removals tested again where their representative fell."""
        keyed = []
        for column, datasets in (("own", falls), ("kept", removed)):
            for dataset in datasets:
                stage = Stage(f"fuzzy_keyed_{number}", VERSION, {"by": column}, (dataset.key,))
                keyed.append(
                    map_shards(self.engine, self.work, stage, key_rows, [dataset], KEYED_SCHEMA)
                )
        rows = sum(dataset.num_rows for dataset in keyed)
        stage = Stage(f"fuzzy_represented_{number}", VERSION, {}, tuple(d.key for d in keyed))
        joined = exchange(
            self.engine,
            self.work,
            stage,
            keyed,
            key="representative",
            partitions=1 + rows // ROWS_PER_PARTITION,
        )
        params = {"containment": repr(self.settings.containment)}
        params |= {"no_new_token": self.settings.no_new_token}
        stage = Stage(f"fuzzy_retested_{number}", VERSION, params, (joined.key,))
        return map_shards(self.engine, self.work, stage, retest, [joined], VERDICT_SCHEMA)


def _count(dataset: Dataset, status: str) -> int:
    """Rows of one status."""
    frames = [
        polars.scan_parquet(path, glob=False, hive_partitioning=False).select("status")
        for path in dataset.paths
    ]
    counted = polars.concat(frames).select((polars.col("status") == status).sum()).collect()
    return int(counted.item() or 0)


def _of_status(tables: Iterator[pa.Table], status: str) -> Iterator[pa.Table]:
    for table in tables:
        yield table.filter(pc.equal(table["status"], status))  # pyright: ignore


def select_rows(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Rows of one status."""
    yield from _of_status(tables, params["status"])


def take_split(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Members of groups that were too large, each in its part."""
    for table in _of_status(tables, SPLIT):
        yield table.select(MEMBER_SCHEMA.names)


def regroup(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Survivors as members of their whole component again."""
    for table in _of_status(tables, SURVIVOR):
        rows = table.num_rows
        part = pa.array([f"merge {params['round']}"] * rows, pa.string())
        level = pa.array([0] * rows, pa.int64())
        columns = {"group": table["component"], "part": part, "level": level}
        yield pa.table(
            [columns.get(name, table[name]) for name in MEMBER_SCHEMA.names], schema=MEMBER_SCHEMA
        )


def key_rows(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Removed rows under the name of their representative (`kept`) or their own (`own`)."""
    names = ("source", "id") if params["by"] == "own" else ("kept_source", "kept_id")
    for table in _of_status(tables, REMOVED):
        key = pc.binary_join_element_wise(table[names[0]], table[names[1]], "|")  # pyright: ignore
        yield table.add_column(0, KEYED_SCHEMA.field(0), key)


def retest(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Members of the representatives that fell, with a new verdict; all others as they were.

    Sorted by representative, the row of a fallen one comes before those of its members.
    """
    rules = Rules(float(params["containment"]), params["no_new_token"])
    fallen: tuple[str, Verdict] | None = None
    for table in tables:
        names = table["representative"].to_pylist()
        columns = [table[name].to_pylist() for name in Verdict._fields]
        verdicts = itertools.starmap(Verdict, zip(*columns, strict=True))
        rows: list[Row] = []
        again: list[tuple[int, Verdict]] = []
        for name, member, verdict in zip(names, read_members([table]), verdicts, strict=True):
            if name == f"{member.source}|{member.id}":
                fallen = name, verdict
                verdict = verdict._replace(kept_text=None, kept_buckets=None)
            elif fallen is not None and fallen[0] == name:
                again.append((len(rows), fallen[1]))
            rows.append((member, verdict))
        for place, verdict in _test_again(rows, again, rules):
            rows[place] = rows[place][0], verdict
        yield verdict_table(rows)


def _test_again(
    rows: Sequence[Row], again: Sequence[tuple[int, Verdict]], rules: Rules
) -> Iterator[tuple[int, Verdict]]:
    """New verdicts on rows at given places, whose representatives fell with given verdicts."""
    kept = {(fall.kept_source, fall.kept_id): fold(fall.kept_text or "") for _, fall in again}
    own = [fold(rows[place][0].body) for place, _ in again]
    windows = window_sets([*own, *kept.values()])
    kept_windows = dict(zip(kept, windows[len(own) :], strict=True))
    kept_tokens = {name: set(text.split()) for name, text in kept.items()}
    for text, found, (place, fall) in zip(own, windows, again, strict=False):
        member, verdict = rows[place]
        other = kept_windows[fall.kept_source, fall.kept_id]
        shared = count_shared(found, other)
        new_words = len(set(text.split()) - kept_tokens[fall.kept_source, fall.kept_id])
        holds = shared / len(found) >= rules.containment
        if not holds and not (rules.no_new_token and not new_words):
            yield place, Verdict(REINSTATED)
            continue
        verdict = verdict._replace(
            kept_source=fall.kept_source,
            kept_id=fall.kept_id,
            kept_characters=fall.kept_characters,
            kept_truncated=fall.kept_truncated,
            n_kept=len(other),
            n_shared=shared,
            new_words=new_words,
            shared_buckets=count_equal(member.buckets, fall.kept_buckets or b""),
            comparisons=(verdict.comparisons or 0) + 1,
        )
        yield place, verdict
