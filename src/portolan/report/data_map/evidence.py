"""Samples of the evidence that removals left: pairs of near-duplicates, matches of test items."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.data.documents import read_tables
from portolan.report.data_map.corpus_files import CorpusFiles, StageFolder, read_texts, readable
from portolan.report.data_map.differences import align
from portolan.report.data_map.facts import Pair, Pairs, containment_bin

if TYPE_CHECKING:
    import polars

PER_STRATUM = 20
MAX_PAIRS = 400
PAIR_STRATUM = ("removed_source", "kept_source", "bin")


def sample_strata(
    shards: Sequence[Path], stratum: Sequence[str], order: Sequence[str], *, most: int
) -> tuple[list[dict[str, Any]], dict[tuple[Any, ...], int], int]:
    """The first rows of every stratum, the size of every stratum, and rows taken of each.

    Rows are taken in the order of `order`, whose first column is a document id: a hash, so that
    they are a random sample which every run repeats. At most 20 a stratum, fewer where there are so
    many strata that more than `most` rows would be shown. Memory: a row group and the sample.
    """
    import polars

    kept: polars.DataFrame | None = None
    sizes: Counter[tuple[Any, ...]] = Counter()
    for frame in _frames(shards):
        counted = frame.group_by(stratum).len()
        sizes.update({tuple(row[:-1]): row[-1] for row in counted.iter_rows()})
        both = frame if kept is None else polars.concat([kept, frame.select(kept.columns)])
        kept = _first(both.sort([*stratum, *order]), stratum, PER_STRATUM)
    if kept is None:
        return [], {}, PER_STRATUM
    each = PER_STRATUM
    while each > 1 and sum(min(each, size) for size in sizes.values()) > most:
        each -= 1
    return _first(kept, stratum, each).to_dicts()[:most], dict(sorted(sizes.items())), each


def _first(frame: "polars.DataFrame", stratum: Sequence[str], number: int) -> "polars.DataFrame":
    """The first rows of every stratum."""
    return frame.group_by(stratum, maintain_order=True).head(number)


def read_pair_strata(corpus: CorpusFiles, stage: StageFolder) -> Mapping[tuple[str, str, int], int]:
    """Size of every (removed source, kept source, containment bin)."""
    return sample_strata(corpus.evidence_of(stage), PAIR_STRATUM, ("removed_id",), most=0)[1]


def _frames(shards: Sequence[Path]) -> Iterator["polars.DataFrame"]:
    import polars

    for path in shards:
        for table in read_tables(path):
            frame = polars.DataFrame(table)
            if "containment" in frame.columns:
                bins = [containment_bin(value) for value in frame["containment"]]
                frame = frame.with_columns(bin=polars.Series(bins, dtype=polars.Int64))
            yield frame


def read_pairs(corpus: CorpusFiles, stage: StageFolder) -> Pairs:
    """The sample of the evidence with both texts aligned, and the losses of every source."""
    order = ("removed_id", "kept_id")
    rows, sizes, each = sample_strata(
        corpus.evidence_of(stage), PAIR_STRATUM, order, most=MAX_PAIRS
    )
    sides = ("removed", "kept")
    texts = read_texts(
        corpus, [(row[f"{side}_source"], row[f"{side}_id"]) for row in rows for side in sides]
    )
    params = stage.manifest["params"]
    return Pairs(
        evidence_key=stage.key,
        rows=tuple(_pair(row, texts) for row in rows),
        strata=sizes,
        per_stratum=each,
        threshold=float(params["containment"]),
        bands=params["bands"],
        band_rows=params["rows"],
        shingle=f"{params['shingle_n']} {params['shingle_unit']}s",
        losses=tuple(
            (source, lost["removed"] or lost["exempt"], lost["documents"], not lost["removed"])
            for source, lost in stage.manifest["counts"].items()
            if lost["removed"] or lost["exempt"]
        ),
    )


def _pair(row: Mapping[str, Any], texts: Mapping[tuple[str, str], str]) -> Pair:
    removed, kept = (
        readable(texts.get((row[f"{side}_source"], row[f"{side}_id"]), ""))
        for side in ("removed", "kept")
    )
    return Pair(
        removed_id=row["removed_id"],
        removed_source=row["removed_source"],
        kept_id=row["kept_id"],
        kept_source=row["kept_source"],
        containment=row["containment"],
        jaccard=row["jaccard"],
        new_words=row["new_words"],
        chars_removed=row["chars_removed"],
        chars_kept=row["chars_kept"],
        component_size=row["component_size"],
        is_exempt=bool(row["exempt"]),
        segments=align(removed, kept),
    )
