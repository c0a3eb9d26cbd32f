"""The summary of a corpus: its sources and cells in numbers, and the check that all add up."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.canonical import stringify_floats
from portolan.errors import PortolanError
from portolan.pipeline.corpus import corpus_key, open_evaluation_set
from portolan.project import Project

if TYPE_CHECKING:
    from portolan.data.curate import CuratedCorpus, CuratedSource
    from portolan.data.store import TokenStore

REMEDY = "delete the folder `corpus` and run `portolan curate`; report it if it comes back"


def summarize(
    project: Project,
    curated: "CuratedCorpus",
    provenance: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    path: Path,
    store: "TokenStore",
    held: "TokenStore",
    removed: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """JSON object of the corpus; floats are decimal strings.

    `removed` are tokens by source and reason. Counts come from manifests and from the document
    tables of the stores.

    Raises:
        PortolanError: documents, bytes or tokens do not add up.
    """
    recipe = project.recipe
    evaluation = open_evaluation_set(held.folder, tokenizer, recipe)
    rows = {row["key"]: row for row in provenance}
    kept = counts_by_source(store)
    heldout = {key: tokens for key, (_, tokens) in counts_by_source(held).items()}
    check_store(curated, store, kept, heldout, removed)
    sources = [
        {
            **_source(source, rows[source.key], kept.get(source.key, (0, 0))[1]),
            "heldout_tokens": heldout.get(source.key, 0),
            "dropped_tokens": dict(removed[source.key]),
        }
        for source in curated.sources
    ]
    tokens = sum(source["tokens"] for source in sources)
    summary = {
        "key": corpus_key(recipe),
        "documents_key": curated.key,
        "sources": sources,
        "cells": [_cell(name, cell) for name, cell in store.cells.items()],
        "tokenizer": {
            "path": project.relative(path),
            "vocab_size": tokenizer.vocab_size,
            "digest": tokenizer.digest,
            "bos": recipe.tokenizer.bos,
            "eos": recipe.tokenizer.eos,
            "bytes_per_token": sum(s["bytes"] for s in sources) / max(1, tokens),
        },
        "store": {
            "path": project.relative(store.folder),
            "digest": store.digest,
            "tokens": tokens,
            "documents": sum(source["documents"] for source in sources),
        },
        "heldout": {
            "path": project.relative(held.folder),
            "digest": evaluation.digest,
            "domains": evaluation.domains,
            "rows": {name: len(rows.tokens) for name, rows in evaluation.rows.items()},
            "truncated": evaluation.truncated,
        },
        "manifests": [
            project.relative(path)
            for path in (*curated.manifests, *sorted(project.corpus.glob("provenance.*")))
        ],
        "unigram_cross_entropy": _unigram(store, evaluation),
        "warnings": list(curated.warnings),
    }
    return stringify_floats(summary)


def _source(source: "CuratedSource", row: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    return {
        "key": source.key,
        "category": source.category,
        "license_spdx": row["license_spdx"],
        "license_class": row["license_class"],
        "read": source.read,
        "documents": source.train_documents,
        "bytes": source.train_text_bytes,
        "tokens": tokens,
        "heldout_documents": source.heldout_documents,
        "dropped": source.dropped,
        "dropped_bytes": source.dropped_bytes,
        "provenance": row["row_hash"],
    }


def _cell(name: str, cell: Any) -> dict[str, Any]:
    """Counts of a cell, and (documents, tokens) of its sources."""
    return {
        "name": name,
        "documents": cell.num_documents,
        "bytes": cell.text_bytes,
        "tokens": cell.num_tokens,
        "sources": {key: list(counts) for key, counts in cell.count_sources().items()},
    }


def counts_by_source(store: "TokenStore") -> dict[str, tuple[int, int]]:
    """(documents, tokens) of each source over all cells."""
    total: dict[str, tuple[int, int]] = {}
    for cell in store.cells.values():
        for key, (documents, tokens) in cell.count_sources().items():
            known = total.get(key, (0, 0))
            total[key] = known[0] + documents, known[1] + tokens
    return total


def tokens_by_source(store: "TokenStore") -> dict[str, int]:
    """Tokens of each source over all cells."""
    return {key: tokens for key, (_, tokens) in counts_by_source(store).items()}


def check_store(
    curated: "CuratedCorpus",
    store: "TokenStore",
    kept: Mapping[str, tuple[int, int]],
    heldout: Mapping[str, int],
    removed: Mapping[str, Mapping[str, int]],
) -> None:
    """Require that the store holds what curation left, cell by cell and source by source.

    Every number on the left comes from the stages' manifests, every one on the right from the
    store's own document tables.
    """
    pairs: list[tuple[str, Any, Any]] = []
    for source in curated.sources:
        documents, _ = kept.get(source.key, (0, 0))
        pairs.append((f"documents of source {source.key}", source.train_documents, documents))
        counted = removed[source.key].get("heldout", 0)
        pairs.append((f"held-out tokens of {source.key}", counted, heldout.get(source.key, 0)))
    for name, (documents, num_bytes) in _cells_of(curated.sources).items():
        cell = store.cells[name]
        found = (cell.num_documents, cell.text_bytes)
        pairs.append((f"documents and bytes of cell {name}", (documents, num_bytes), found))
    sums = sum(tokens for _, tokens in kept.values()), sum(store.tokens_by_cell.values())
    pairs.append(("tokens over sources and over cells", *sums))
    wrong = [f"{what}: {a} and {b}" for what, a, b in pairs if a != b]
    if wrong:
        raise PortolanError(f"the corpus does not add up: {'; '.join(wrong)}", remedy=REMEDY)


def _cells_of(sources: Iterable["CuratedSource"]) -> dict[str, tuple[int, int]]:
    """(documents, bytes of text) of each cell over the sources."""
    total: dict[str, tuple[int, int]] = {}
    for source in sources:
        for name, (documents, num_bytes) in source.cell_counts.items():
            known = total.get(name, (0, 0))
            total[name] = known[0] + documents, known[1] + num_bytes
    return total


def _unigram(store: "TokenStore", evaluation: Any) -> dict[str, float]:
    """Nats per held-out token under training frequencies: mean over domains, and over tokens."""
    import numpy as np

    from portolan.data.loss_metrics import unigram_cross_entropy

    vocab_size = store.vocab_size
    train_counts = np.zeros(vocab_size, np.int64)
    for cell in store.cells.values():
        train_counts += cell.count_tokens(vocab_size)
    per_domain = []
    for rows in evaluation.rows.values():
        targets = rows.tokens[:, 1:][rows.weights[:, :-1] > 0]
        counts = np.bincount(targets, minlength=vocab_size)
        per_domain.append(unigram_cross_entropy(train_counts, counts))
    return {
        "macro": float(np.mean(per_domain)),
        "micro": unigram_cross_entropy(train_counts, evaluation.target_counts(vocab_size)),
    }
