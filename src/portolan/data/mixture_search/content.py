"""What a cell is about: the mean of hashed token counts over its first documents."""

import re
from typing import Any

import numpy as np

from portolan.data.mixing import fold
from portolan.data.mixture_search.space import Floats
from portolan.data.store import CellTokens, TokenStore

MAX_DOCUMENTS = 1_000
DIMENSION = 256
NUM_HASHES = 8
"""Coordinates of a token, as of a word in the hash embedder (data.md 6)."""
GRID_CELL = re.compile(r"c(\d\d)q(\d)")


def bucket_of(cell: str) -> int:
    """Quality bucket of a cell `cXXqY`; 0 for any other name."""
    match = GRID_CELL.fullmatch(cell)
    return int(match.group(2)) if match else 0


def mean_embeddings(store: TokenStore) -> Floats:
    """Mean unit vector of the first documents of each cell in byte order of names, [C, 256].

    Documents lie in the order of their ids, so the first ones are a random sample. A document is
    the signed sum of its tokens' coordinates with weights 1 + ln(count).
    """
    places, signs = _coordinates(store.vocab_size)
    cells = [store.cells[name] for name in sorted(store.cells, key=str.encode)]
    return np.stack([_mean(cell, places, signs) for cell in cells])


def _coordinates(vocab_size: int) -> tuple[Any, Any]:
    """Coordinates and signs of every token, each [V, 8]."""
    tokens = np.arange(vocab_size)
    words = np.stack([fold(tokens, j) for j in range(NUM_HASHES)], axis=1)
    places = (words % np.uint64(DIMENSION)).astype(np.int64)
    return places, np.where(words >> np.uint64(63), -1.0, 1.0)


def _mean(cell: CellTokens, places: Any, signs: Any) -> Floats:
    total, left = np.zeros(DIMENSION), MAX_DOCUMENTS
    for shard in cell.shards:
        for row in range(min(left, shard.num_documents)):
            tokens, counts = np.unique(
                shard.tokens[shard.offsets[row] : shard.offsets[row + 1]], return_counts=True
            )
            weights = (1 + np.log(counts))[:, None] * signs[tokens]
            vector = np.bincount(places[tokens].ravel(), weights.ravel(), minlength=DIMENSION)
            total += vector / max(float(np.linalg.norm(vector)), 1e-12)
        left -= min(left, shard.num_documents)
    return total / max(1, MAX_DOCUMENTS - left)
