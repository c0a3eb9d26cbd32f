"""Counts of the grid from the token store, and example documents of its cells."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portolan.data.documents import read_tables
from portolan.data.domains.attribute import DomainFit
from portolan.data.domains.labels import label_domains
from portolan.data.embedding.sampling import Sample
from portolan.data.engine import Dataset
from portolan.data.store import CellTokens, TokenStore
from portolan.report.data_map.corpus_files import CorpusFiles, read_texts, readable
from portolan.report.data_map.facts import Count, Domain, Example, Overview

GRID_CELL = re.compile(r"(?P<domain>c\d+)q(?P<bucket>\d)")
EXAMPLES_PER_CELL = 4
EXAMPLE_CHARACTERS = 460
NUM_BUCKETS = 5
DOMAIN, QUALITY, FIT, SAMPLE = "domain", "quality", "domains", "sample"
Ids = NDArray[np.bytes_]


def read_overview(corpus: CorpusFiles, store: TokenStore, labels_file: Path | None) -> Overview:
    """The overview of a store; without domains or quality its cells are named as they are."""
    domains, cuts = read_domains(corpus, labels_file), read_cuts(corpus)
    places = {name: place_of(name, corpus) for name in store.cells}
    num_buckets = NUM_BUCKETS if corpus.named(QUALITY) is not None else 1
    counts: dict[tuple[str, int], Count] = {}
    by_source: dict[str, list[Count]] = {}
    by_domain_source: dict[tuple[str, str], Count] = {}
    for name, cell in store.cells.items():
        domain, bucket = places[name]
        for source, (documents, tokens) in cell.count_sources().items():
            count = Count(documents, tokens)
            row = by_source.setdefault(source, [Count()] * num_buckets)
            row[bucket] += count
            key = domain, source
            by_domain_source[key] = by_domain_source.get(key, Count()) + count
            counts[domain, bucket] = counts.get((domain, bucket), Count()) + count
    by_type = _count_types(corpus, store, places, num_buckets)
    names = sorted({domain for domain, _ in places.values()}, key=str.encode)
    return Overview(
        domains=tuple(domains.get(name, Domain(name, name, (), "source")) for name in names),
        num_buckets=num_buckets,
        cells=counts,
        by_source={key: tuple(row) for key, row in sorted(by_source.items())},
        by_type={key: tuple(row) for key, row in sorted(by_type.items())},
        by_domain_source=by_domain_source,
        cuts=cuts,
        examples=_read_examples(corpus, store, places),
        store_digest=store.digest,
    )


def read_domains(corpus: CorpusFiles, labels_file: Path | None) -> dict[str, Domain]:
    """Label and distinctive words of every domain, by its name in a cell.

    They are found once in the sample that the domains were fitted to, and kept beside the fit.
    """
    fit = corpus.named(FIT)
    if fit is None:
        return {}
    parts = {
        stage.manifest["label"].removeprefix(f"{SAMPLE}/"): Dataset(stage.folder, stage.manifest)
        for stage in corpus.stages
        if stage.name == SAMPLE
    }
    labels = label_domains(
        Sample(parts, pinned=True),
        DomainFit(fit.folder, fit.manifest),
        corpus.folder,
        labels_file=labels_file,
    )
    return {
        name: Domain(name, label.label or name, label.keywords, label.source)
        for label in labels
        for name in [f"c{label.domain:02d}"]
    }


def read_cuts(corpus: CorpusFiles) -> dict[str, tuple[float, ...]]:
    """Raw scores between the buckets by content type."""
    quality = corpus.named(QUALITY)
    curves = quality.manifest["params"]["curves"] if quality else {}
    return {kind: tuple(float(cut) for cut in curve["cuts"]) for kind, curve in curves.items()}


def place_of(cell: str, corpus: CorpusFiles) -> tuple[str, int]:
    """Domain and bucket of a cell: `c07q3` is (c07, 3); without buckets a cell is a domain."""
    match = GRID_CELL.fullmatch(cell)
    if match is None or corpus.named(DOMAIN) is None or corpus.named(QUALITY) is None:
        return cell, 0
    return match["domain"], int(match["bucket"])


def _count_types(
    corpus: CorpusFiles,
    store: TokenStore,
    places: Mapping[str, tuple[str, int]],
    num_buckets: int,
) -> dict[str, list[Count]]:
    """Documents and tokens by content type and bucket.

    The shards of the attribute are read one after the other; ids rise within them and within a
    cell, so the documents of each are looked up by binary search. Memory: one attribute shard.
    """
    found: dict[str, list[Count]] = {}
    for source in corpus.sources():
        for path in corpus.attribute_of(QUALITY, source):
            for ids, types in _types_in(path):
                for name, cell in store.cells.items():
                    for kind, count in _count_matches(cell, source, ids, types).items():
                        row = found.setdefault(kind, [Count()] * num_buckets)
                        row[places[name][1]] += count
    return found


def _types_in(path: Any) -> Iterator[tuple[Ids, NDArray[Any]]]:
    for table in read_tables(path, ["id", "content_type"]):
        ids = np.frombuffer(bytes.fromhex("".join(table["id"].to_pylist())), "S16")
        if len(ids):
            yield ids, np.array(table["content_type"].to_pylist(), object)


def _count_matches(
    cell: CellTokens, source: str, ids: Ids, types: NDArray[Any]
) -> dict[str, Count]:
    """Counts by type of the documents of a source whose ids (sorted) stand in a cell."""
    found: dict[str, Count] = {}
    if source not in cell.sources:
        return found
    index = cell.sources.index(source)
    for shard in cell.shards:
        shard_ids = np.ascontiguousarray(shard.ids).view("S16").ravel()
        low = int(np.searchsorted(shard_ids, ids[0]))
        high = int(np.searchsorted(shard_ids, ids[-1], side="right"))
        rows = low + np.flatnonzero(shard.sources[low:high] == index)
        place = np.minimum(np.searchsorted(ids, shard_ids[rows]), len(ids) - 1)
        rows, place = (part[ids[place] == shard_ids[rows]] for part in (rows, place))
        lengths = shard.offsets[rows + 1] - shard.offsets[rows]
        for kind in set(types[place]):
            mine = types[place] == kind
            count = Count(int(mine.sum()), int(lengths[mine].sum()))
            found[kind] = found.get(kind, Count()) + count
    return found


def _read_examples(
    corpus: CorpusFiles, store: TokenStore, places: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, int], tuple[Example, ...]]:
    """The first documents of each cell: ids are hashes of texts, so these are a uniform sample."""
    wanted = {
        name: [
            (cell.sources[int(shard.sources[row])], shard.ids[row].tobytes().hex())
            for shard in cell.shards[:1]
            for row in range(min(EXAMPLES_PER_CELL, shard.num_documents))
        ]
        for name, cell in store.cells.items()
    }
    texts = read_texts(corpus, (pair for pairs in wanted.values() for pair in pairs))
    return {
        places[name]: tuple(
            _example(*pair, texts[pair]) for pair in pairs if pair in texts
        )
        for name, pairs in wanted.items()
    }  # fmt: skip


def _example(source: str, document: str, text: str) -> Example:
    is_cut = len(text) > EXAMPLE_CHARACTERS
    return Example(source, document, readable(text[:EXAMPLE_CHARACTERS]).strip(), is_cut)
