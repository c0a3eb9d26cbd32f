"""The verification stage: a verdict on every member of the groups of a shard, with its evidence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from portolan.data.fuzzy.members import (
    MEMBER_SCHEMA,
    Member,
    bounded_groups,
    read_members,
    split_group,
)
from portolan.data.fuzzy.verification import Removal, Rules, fold, judge, window_sets
from portolan.data.ngrams import BATCH_CHARACTERS

REMOVED, SURVIVOR, SPLIT, REINSTATED = "removed", "survivor", "split", "reinstated"
VERDICT_SCHEMA = pa.schema(
    [
        *MEMBER_SCHEMA,
        pa.field("status", pa.string(), nullable=False),
        pa.field("kept_source", pa.string()),
        pa.field("kept_id", pa.string()),
        pa.field("kept_characters", pa.int64()),
        pa.field("kept_truncated", pa.bool_()),
        pa.field("n_removed", pa.int64()),
        pa.field("n_kept", pa.int64()),
        pa.field("n_shared", pa.int64()),
        pa.field("new_words", pa.int64()),
        pa.field("shared_buckets", pa.int64()),
        pa.field("comparisons", pa.int64()),
        pa.field("kept_text", pa.string()),
        pa.field("kept_buckets", pa.binary()),
    ]
)


class Verdict(NamedTuple):
    """What a verdict adds to a member: its status and, if removed, the evidence.

    Text and buckets of the representative are kept while it may still fall.
    """

    status: str
    kept_source: str | None = None
    kept_id: str | None = None
    kept_characters: int | None = None
    kept_truncated: bool | None = None
    n_removed: int | None = None
    n_kept: int | None = None
    n_shared: int | None = None
    new_words: int | None = None
    shared_buckets: int | None = None
    comparisons: int | None = None
    kept_text: str | None = None
    kept_buckets: bytes | None = None


Row = tuple[Member, Verdict]


def verdict_table(rows: Sequence[Row]) -> pa.Table:
    """Members and their verdicts as a table."""
    if not rows:
        return VERDICT_SCHEMA.empty_table()
    columns = zip(*((*member, *verdict) for member, verdict in rows), strict=True)
    return pa.table([list(column) for column in columns], schema=VERDICT_SCHEMA)


def count_equal(first: bytes, second: bytes) -> int:
    """Number of bands in which two documents share a bucket."""
    return int(np.count_nonzero(np.frombuffer(first, "<u8") == np.frombuffer(second, "<u8")))


def removal(
    member: Member, kept: Member, num_windows: tuple[int, int], found: Removal, new_words: int
) -> Verdict:
    """Evidence that `kept` holds `member`; `num_windows` are those of member and kept."""
    return Verdict(
        status=REMOVED,
        kept_source=kept.source,
        kept_id=kept.id,
        kept_characters=kept.characters,
        kept_truncated=kept.truncated,
        n_removed=num_windows[0],
        n_kept=num_windows[1],
        n_shared=found.shared,
        new_words=new_words,
        shared_buckets=count_equal(member.buckets, kept.buckets),
        comparisons=found.comparisons,
        kept_text=kept.text,
        kept_buckets=kept.buckets,
    )


def judge_members(params: Mapping[str, Any], tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Verdicts on members sorted by group and order.

    Removed members always give a row. Survivors do where their component was split or is being
    merged, because they meet again; so do members of a group that is too large, with the key of
    the part they belong to. Only such rows keep their text.
    """
    rules = Rules(float(params["containment"]), params["no_new_token"])
    waiting: list[list[Member]] = []
    characters = 0
    groups = bounded_groups(read_members(tables), params["max_documents"], params["max_characters"])
    for fits, members in groups:
        if not fits:
            parts = split_group(members, params["merging"])
            yield verdict_table([(member, Verdict(SPLIT)) for member in parts])
            continue
        waiting.append(members)
        characters += sum(len(member.body) for member in members)
        if characters >= BATCH_CHARACTERS:
            yield verdict_table(_judge_groups(waiting, rules, params["merging"] > 0))
            waiting, characters = [], 0
    yield verdict_table(_judge_groups(waiting, rules, params["merging"] > 0))


def _judge_groups(groups: Sequence[Sequence[Member]], rules: Rules, merging: bool) -> list[Row]:
    folded = [fold(member.body) for members in groups for member in members]
    windows = window_sets(folded)
    rows: list[Row] = []
    begin = 0
    for members in groups:
        end = begin + len(members)
        rows += _judge_group(members, folded[begin:end], windows[begin:end], rules, merging)
        begin = end
    return rows


class _TokenSets:
    """Distinct tokens of folded texts, split when first asked for."""

    def __init__(self, folded: Sequence[str]) -> None:
        self.folded = folded
        self.known: dict[int, set[str]] = {}

    def __call__(self, index: int) -> set[str]:
        if index not in self.known:
            self.known[index] = set(self.folded[index].split())
        return self.known[index]


def _judge_group(
    members: Sequence[Member],
    folded: Sequence[str],
    windows: Sequence[np.ndarray],
    rules: Rules,
    merging: bool,
) -> Iterator[Row]:
    tokens = _TokenSets(folded)
    verdicts = judge(windows, [not member.truncated for member in members], rules, tokens)
    meets_again = merging or members[0].level > 0
    for index, (member, found) in enumerate(zip(members, verdicts, strict=True)):
        if found is None:
            if meets_again:
                yield member, Verdict(SURVIVOR)
            continue
        kept = members[found.kept]
        sizes = len(windows[index]), len(windows[found.kept])
        new_words = len(tokens(index) - tokens(found.kept))
        verdict = removal(member, kept, sizes, found, new_words)
        if not merging:
            verdict = verdict._replace(kept_text=None, kept_buckets=None)
        yield (member if meets_again else member._replace(text=None)), verdict
