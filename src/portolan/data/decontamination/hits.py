"""The hit stage of a source: every window and short paragraph that is a test item's, unfiltered.

What is common in a source is judged later, so a new source never forces a new scan of the others.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.curation_settings import DecontaminationSettings
from portolan.data.decontamination.features import WINDOW_TOKENS, Laid, paragraphs
from portolan.data.decontamination.index import EvaluationIndex, open_index
from portolan.data.dedup import NormalizedSource
from portolan.data.documents import Stage
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.ngrams import batches

VERSION = 1
HIT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("hash", pa.uint64(), nullable=False),
        pa.field("short", pa.bool_(), nullable=False),
        pa.field("paragraph", pa.int64(), nullable=False),
        pa.field("paragraph_windows", pa.int64(), nullable=False),
        pa.field("crosses", pa.bool_(), nullable=False),
    ]
)


def find_hits(
    engine: Engine,
    source: NormalizedSource,
    index_folder: Path,
    index_key: str,
    settings: DecontaminationSettings,
    corpus: Path,
) -> Dataset:
    """One row a hit, by document, in the order of its tokens; short items after the windows.

    `paragraph` counts the lines that have tokens, `paragraph_windows` the windows that lie in it,
    `crosses` says that a window does not end in the paragraph where it begins.
    """
    stage = Stage(
        "eval_hits",
        VERSION,
        {"fold": settings.fold, "ngram_hash": settings.ngram_hash},
        (source.stage_key, index_key),
        label=f"eval_hits/{source.key}",
    )
    documents = Dataset(source.folder, source.manifest)
    function = partial(scan_documents, index_folder=str(index_folder))
    return map_shards(engine, corpus / "attributes", stage, function, [documents], HIT_SCHEMA)


def scan_documents(
    params: Mapping[str, Any], documents: Iterator[pa.Table], *, index_folder: str
) -> Iterator[pa.Table]:
    """Hits in document tables."""
    index = open_index(index_folder)
    for table in documents:
        texts, ids = table["text"].to_pylist(), table["id"].to_pylist()
        for run in batches([len(text) for text in texts]):
            laid = Laid.of([paragraphs(text, params["fold"]) for text in texts[run]])
            yield scan(laid, ids[run], index, params["ngram_hash"])


def scan(laid: Laid, ids: list[str], index: EvaluationIndex, hashing: Any) -> pa.Table:
    """Hits in documents that have been laid out."""
    windows = laid.windows(hashing)
    found = np.flatnonzero(index.contains(windows.hashes))
    document = np.searchsorted(windows.offsets, found, side="right") - 1
    token = found - windows.offsets[document] + laid.tokens.offsets[document]
    begins = _of(laid, token, windows.hashes[found], short=False)
    lines, hashes = laid.short_paragraphs(hashing)
    is_item = index.contains_short(hashes)
    shorts = _of(laid, laid.begins[lines[is_item]], hashes[is_item], short=True)
    columns = [np.concatenate(pair) for pair in zip(begins, shorts, strict=True)]
    order = np.lexsort((columns[2], columns[4], columns[0]))
    place, *others = (column[order] for column in columns)
    names = pa.array(ids, pa.string()).take(pa.array(place))
    return pa.table([names, *(pa.array(column) for column in others)], schema=HIT_SCHEMA)


def _of(laid: Laid, token: np.ndarray, hashes: np.ndarray, *, short: bool) -> list[np.ndarray]:
    """Columns of hits that begin at given tokens of all documents; first the document's place."""
    document = np.searchsorted(laid.tokens.offsets, token, side="right") - 1
    paragraph = np.searchsorted(laid.begins, token, side="right") - 1
    end = laid.begins[paragraph + 1]
    return [
        document,
        laid.tokens.counts[document],
        token - laid.tokens.offsets[document],
        hashes,
        np.full(len(token), short),
        paragraph - laid.first_paragraph[document],
        np.maximum(end - laid.begins[paragraph] - WINDOW_TOKENS + 1, 0),
        np.full(len(token), False) if short else token + WINDOW_TOKENS > end,
    ]
