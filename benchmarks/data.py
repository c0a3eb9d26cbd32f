"""Speed of curation: normalise to training shards, tokenise, and locate sequences.

Run `python benchmarks/data.py [--quick] [--json FILE]`. The text is standard-library source;
one process; seconds of processor time, so that a busy machine does not change the claim.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import claim, main, report, row

from portolan.data.curate import curate_documents
from portolan.data.mixture import Mixture, Phase
from portolan.data.mixture_design import proportional_counts
from portolan.data.order import Geometry, SequenceOrder
from portolan.data.store_writing import cells_of_sources, write_store
from portolan.data.tokenizer import DocumentTokenizer, train_tokenizer_file
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings

LATTICE = 49_152
CHUNK = 1 << 17


def measure_curation(folder: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Rows of normalising, deduplicating, holding out, and tokenising one installed source."""
    source = SourceSettings(key="stdlib-sources", kind="installed", max_bytes=max_bytes)
    begin = time.process_time()
    corpus = curate_documents(DataSettings(sources=(source,)), folder)
    seconds = time.process_time() - begin
    found = corpus.sources[0]
    megabytes = found.train_text_bytes / 1e6
    shards = [(found.key, found.train_shards)]
    train_tokenizer_file(folder / "tokenizer.json", shards, vocab_size=512)
    tokenizer = DocumentTokenizer.from_file(folder / "tokenizer.json")
    begin = time.process_time()
    store = write_store(folder / "tokens", cells_of_sources(shards), tokenizer, inputs=[corpus.key])
    token_seconds = time.process_time() - begin
    tokens = sum(store.tokens_by_cell.values())
    return [
        row("curate documents", found.read / seconds, "documents/s"),
        row("curate text", megabytes / seconds, "MB/s"),
        row("tokenise and store, vocabulary 512", tokens / token_seconds, "tokens/s"),
    ]


def measure_locate(rounds: int) -> float:
    """Median sequences per second of `locate_many` over 200 cells."""
    cells = {
        f"c{i:02d}q{q}": 3_000_000 + 300 * (5 * i + q) ** 4 for i in range(40) for q in range(5)
    }
    counts = proportional_counts(dict.fromkeys(cells, 1), LATTICE)
    phase = Phase("main", 0, 1, counts)
    mixture = Mixture("benchmark", "tokenizer", "store", cells, (phase,), 1, LATTICE, LATTICE)
    order = SequenceOrder(mixture, [Geometry(0, 11_264, 1)], seed=0, block_tokens=256)
    order.locate_many(np.arange(1000))
    seconds = []
    for start in range(0, rounds * CHUNK, CHUNK):
        begin = time.process_time()
        order.locate_many(np.arange(start, start + CHUNK))
        seconds.append(time.process_time() - begin)
    return CHUNK / statistics.median(seconds)


def run(quick: bool) -> dict[str, Any]:
    """All measurements."""
    folder = Path(tempfile.mkdtemp(prefix="portolan-benchmark-"))
    try:
        rows = measure_curation(folder, 4_000_000 if quick else 12_000_000)
    finally:
        shutil.rmtree(folder)
    located = measure_locate(5 if quick else 20)
    rows.append(row("locate sequences among 200 cells", located, "sequences/s"))
    tokens = rows[2]["value"]
    claims = [
        claim("locating sequences", located, "sequences/s", "> 1,000,000", located > 1e6),
        claim("tokenising", tokens, "tokens/s", "> 700,000", tokens > 7e5),
    ]
    return report(rows, claims, ("portolan", "numpy", "pyarrow", "tokenizers"))


if __name__ == "__main__":
    main(__doc__, run)
