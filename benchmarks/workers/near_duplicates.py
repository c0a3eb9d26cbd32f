"""A peer's side of `curation.py`: near-duplicate removal by one library, processor time of it.

Run by the benchmark with the interpreter of the peers' environment, never by hand: the name of the
library, a Parquet file of documents, a folder for what it writes. Prints one line of JSON.
Documents are read before the clock starts; cleaning, shingling and removal are inside.
"""

import contextlib
import io
import json
import resource
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

SHINGLE_WORDS, BANDS, ROWS, SEED = 5, 26, 11, 42
DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def shingles(text: str) -> list[str]:
    """Cleaned text as overlapping runs of 5 words."""
    words = text.lower().translate(DELETE_PUNCTUATION).split()
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    return [" ".join(words[i : i + SHINGLE_WORDS]) for i in range(last)]


def remove_with_rensa(texts: list[str], folder: Path) -> int:
    """Documents that share a band with another; nothing is verified."""
    import rensa

    sets = [shingles(text) for text in texts]
    matrix = rensa.RMinHash.digest_matrix_from_token_sets(sets, BANDS * ROWS, SEED)
    index = rensa.RMinHashLSH(0.75, BANDS * ROWS, BANDS)
    return sum(index.query_duplicate_flags_matrix_one_shot(matrix))


def remove_with_datasketch(texts: list[str], folder: Path) -> int:
    """Documents that share a band with an earlier one; nothing is verified."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    removed = 0
    for number, text in enumerate(texts):
        signature = MinHash(num_perm=BANDS * ROWS, seed=SEED)
        signature.update_batch([shingle.encode() for shingle in shingles(text)])
        if index.query(signature):
            removed += 1
        else:
            index.insert(number, signature)
    return removed


def remove_with_datatrove(texts: list[str], folder: Path) -> int:
    """The four steps of its MinHash pipeline, 5-word shingles, its 14 bands of 8 rows."""
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.writers.jsonl import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(n_grams=SHINGLE_WORDS, hash_config=HashConfig(precision=64))
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    signatures, buckets, removal = (str(folder / name) for name in ("sigs", "buckets", "ids"))
    steps: list[list[Any]] = [
        [documents, MinhashDedupSignature(signatures, config)],
        [MinhashDedupBuckets(signatures, buckets, config=config)],
        [MinhashDedupCluster(buckets, removal, config=config)],
        [documents, MinhashDedupFilter(removal), JsonlWriter(str(folder / "kept"))],
    ]
    for number, pipeline in enumerate(steps):
        tasks = config.num_buckets if number == 1 else 1
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=1, logging_dir=str(folder / f"logs-{number}")
        ).run()
    kept = count_lines(folder / "kept")
    return len(texts) - kept


def count_lines(folder: Path) -> int:
    """Lines of compressed JSON files."""
    import gzip

    total = 0
    for path in folder.glob("*.jsonl.gz"):
        with gzip.open(path) as file:
            total += sum(1 for _ in file)
    return total


PEERS: dict[str, Callable[[list[str], Path], int]] = {
    "rensa": remove_with_rensa,
    "datasketch": remove_with_datasketch,
    "datatrove": remove_with_datatrove,
}


def processor_seconds() -> float:
    """User and system time of this process and of those it has waited for."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    name, path, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    texts = pq.read_table(path, columns=["text"])["text"].to_pylist()
    begin = processor_seconds()
    with contextlib.redirect_stdout(io.StringIO()):
        removed = PEERS[name](texts, folder)
    seconds = processor_seconds() - begin
    print(json.dumps({"documents": len(texts), "removed": removed, "seconds": seconds}))
