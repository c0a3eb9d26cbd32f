"""Held-out documents packed into rows, domain by domain."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portolan.data.loader import label_weights
from portolan.data.store import CellTokens, TokenStore
from portolan.errors import UsageError

PADDING_SEGMENT = -1


class EvaluationRows(NamedTuple):
    """Rows of one or more domains, in order.

    tokens int32[R, L]; segments int32[R, L], -1 for padding; weights float32[R, L], 1 where the
    next token is a target; target_bytes int32[R, L], UTF-8 bytes of that target (0 for a target
    without text); domain int32[R], index into the domains of the set.
    """

    tokens: NDArray[np.int32]
    segments: NDArray[np.int32]
    weights: NDArray[np.float32]
    target_bytes: NDArray[np.int32]
    domain: NDArray[np.int32]

    @property
    def text_weights(self) -> NDArray[np.float32]:
        """Weights of the targets that stand for text: those of bits per byte, float32[R, L]."""
        return self.weights * (self.target_bytes > 0)


class EvaluationSet:
    """Rows of every domain of a held-out token store; each cell is a domain.

    A domain's documents are laid end to end in id order and cut into rows of L tokens; the last
    row is padded, so nothing is dropped. Ids are hashes: the first rows are a random sample.

    Args:
        store: the held-out store.
        sequence_length: L.
        token_bytes: int32[V], UTF-8 bytes a token stands for.
        max_rows: rows kept a domain, None for all.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        token_bytes: NDArray[np.int32],
        *,
        max_rows: int | None = None,
    ) -> None:
        if len(token_bytes) != store.vocab_size or sequence_length < 2:
            raise UsageError(
                f"{len(token_bytes)} token lengths for a vocabulary of {store.vocab_size}, rows of "
                f"{sequence_length} tokens",
                remedy="use the tokenizer of the store and rows of at least 2 tokens",
            )
        self.sequence_length, self.max_rows = sequence_length, max_rows
        self.tokenizer_digest, self.store_digest = store.tokenizer_digest, store.digest
        self.domains = [name for name, cell in store.cells.items() if cell.num_tokens > 1]
        if not self.domains:
            raise UsageError("no domain has held-out text", remedy="hold out more documents")
        self.rows: dict[str, EvaluationRows] = {}
        self.truncated: dict[str, bool] = {}
        for index, name in enumerate(self.domains):
            cell = store.cells[name]
            num_rows = -(-cell.num_tokens // sequence_length)
            kept = num_rows if max_rows is None else min(num_rows, max_rows)
            self.truncated[name] = kept < num_rows
            self.rows[name] = _pack(cell, kept, index, sequence_length, token_bytes, store.pad_id)
        self.target_bytes = {n: int(r.target_bytes.sum()) for n, r in self.rows.items()}
        self.num_targets = {n: int(r.weights.sum()) for n, r in self.rows.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of domains, tokenizer and rows: two values are comparable if it is equal."""
        digest = hashlib.sha256(f"{self.tokenizer_digest}:{self.sequence_length}\n".encode())
        for name, rows in self.rows.items():
            digest.update(f"{name}:{len(rows.tokens)}:{self.truncated[name]}\n".encode())
            for array in (rows.tokens, rows.segments, rows.target_bytes):
                digest.update(array.astype("<i4").tobytes())
        return digest.hexdigest()

    def all_rows(self) -> EvaluationRows:
        """The rows of all domains, one after the other."""
        parts: Sequence[EvaluationRows] = list(self.rows.values())
        return EvaluationRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def target_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token is a target, int64[V]."""
        rows = self.all_rows()
        targets = rows.tokens[:, 1:][rows.weights[:, :-1] > 0]
        return np.bincount(targets, minlength=vocab_size).astype(np.int64)


def _pack(
    cell: CellTokens,
    num_rows: int,
    domain: int,
    length: int,
    token_bytes: NDArray[np.int32],
    pad_id: int,
) -> EvaluationRows:
    tokens = np.full((num_rows, length), pad_id, np.int32)
    segments = np.full((num_rows, length), PADDING_SEGMENT, np.int32)
    for row in range(num_rows):
        count = min(length, cell.num_tokens - row * length)
        cell.read_row(row * length, tokens[row, :count], segments[row, :count])
    weights = label_weights(segments)
    following: NDArray[Any] = np.zeros_like(tokens)
    following[:, :-1] = token_bytes[tokens[:, 1:]]
    target_bytes = np.where(weights > 0, following, 0).astype(np.int32)
    return EvaluationRows(
        tokens, segments, weights, target_bytes, np.full(num_rows, domain, np.int32)
    )
