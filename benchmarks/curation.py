"""Speed of curation: near-duplicates with verification, exact dedup, and k-means, against peers.

Run `python benchmarks/curation.py [--quick] [--json FILE] [--peer-python PYTHON]`. Documents are
pieces of installed Python sources (about 340 words; 85 where time is compared over sizes), a tenth
of them near-copies of others that the benchmark plants.
All numbers are processor time of one run on one core each, whatever else the machine does; the
clock begins when the documents are read. rensa and datasketch propose with the same 5-word shingles
and 26 bands of 11 rows as we do, datatrove with its own defaults; none of them verifies, we do. The
peers run in a virtual environment that the first run makes in a cache folder, unless --peer-python
names one: `python -m venv FOLDER`, then `pip install` of the packages in `PEER_PACKAGES`.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import claim, main, report, row
from threadpoolctl import threadpool_limits

from portolan.curation_settings import FuzzySettings, ReviewedLoss
from portolan.data.dedup import NormalizedSource, find_duplicates
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    document_id,
    run_stage,
    shard_name,
    write_shard,
)
from portolan.data.domains.kmeans import (
    cluster_sums,
    fit_once,
    initial_rows,
    lengths_of,
    round_centroids,
)
from portolan.data.embedding.embedders import HashedFeatures, HashEmbedder, weights_of_features
from portolan.data.embedding.quantization import dequantize, quantize, step_size
from portolan.data.engine import Engine
from portolan.data.fuzzy.near_duplicates import find_near_duplicates
from portolan.data.installed import list_installed

WORKERS = Path(__file__).resolve().parent / "workers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser())) / "portolan-bench"
PEER_PACKAGES = (
    *("datasketch==2.0.0", "datatrove[processing]==0.10.1", "spacy", "orjson"),
    *("rensa==0.5.0", "faiss-cpu==1.15.1", "pyarrow"),
)
HAS_PEERS = "import datasketch, datatrove, spacy, rensa, faiss, pyarrow"
INSTALLED = ("stdlib-sources", "stdlib-tests", "package-sources")
PIECE_CHARACTERS, SHORT_PIECE_CHARACTERS, MIN_CHARACTERS = 4000, 1000, 200
PLANTED_SHARE, SEED = 0.1, 0
CONTAINMENT = 0.75
"""What the public run used: more is removed, and verified, than by default."""
DATATROVE_SHARE = 0.1
ROWS_A_GROUP = 8192
EMBEDDED_DIMENSION, ITERATIONS = 256, 20


def make_documents(count: int, characters: int = PIECE_CHARACTERS) -> list[str]:
    """Distinct pieces of installed sources, and planted near-copies, in a fixed random order."""
    generator = random.Random(SEED)
    pieces: dict[str, None] = {}
    wanted = round(count * (1 - PLANTED_SHARE))
    files = [file for key in INSTALLED for file in list_installed(key)]
    generator.shuffle(files)
    for file in files:
        text = Path(file.url).read_text("utf-8", errors="replace")
        for begin in range(0, len(text), characters):
            piece = text[begin : begin + characters]
            if len(piece) >= MIN_CHARACTERS and not piece.isspace():
                pieces[piece] = None
        if len(pieces) >= wanted:
            break
    texts = list(pieces)[:wanted]
    vocabulary = " ".join(texts[:200]).split()
    for number in range(count - len(texts)):
        words = generator.choice(texts).split(" ")
        cut = max(1, len(words) // 10)
        if number % 3 == 0:
            words = words[:-cut]
        elif number % 3 == 1:
            words += generator.choices(vocabulary, k=cut)
        else:
            words[len(words) // 2] = generator.choice(vocabulary)
        texts.append(" ".join(words))
    generator.shuffle(texts)
    return texts


def write_source(corpus: Path, key: str, texts: Sequence[str]) -> NormalizedSource:
    """The documents as the normalise step leaves them."""
    rows = sorted({document_id(text): text for text in texts}.items())

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        tables = []
        for begin in range(0, len(rows), ROWS_A_GROUP):
            ids, part = zip(*rows[begin : begin + ROWS_A_GROUP], strict=True)
            nulls = [None] * len(part)
            columns = [ids, part, nulls, nulls, [""] * len(part), range(len(part)), nulls]
            tables.append(pa.table([list(c) for c in columns], schema=DOCUMENT_SCHEMA))
        entry = write_shard(folder, shard_name(0, 1), DOCUMENT_SCHEMA, tables)
        counts = {"kept": len(rows), "kept_text_bytes": entry["text_bytes"]}
        return [entry], {"counts": counts}

    stage = Stage("normalise", 1, {"count": len(rows)}, label=key)
    folder, manifest, _ = run_stage(corpus / "documents", stage, build)
    return NormalizedSource(key, folder, manifest)


def remove_ours(
    folder: Path, texts: Sequence[str], signature: Any = "rensa", containment: float = CONTAINMENT
) -> dict[str, Any]:
    """Our removal, signatures to evidence: seconds of processor time, and the ids removed."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        corpus = Path(name)
        source = write_source(corpus, "a", texts)
        review = ReviewedLoss(source="a", reason="planted", reviewer="benchmark", max_loss=1)
        settings = FuzzySettings(
            signature=signature, containment=containment, reviewed_losses=(review,)
        )
        begin = time.process_time()
        found = find_near_duplicates(Engine(), [source], [], settings, corpus)
        seconds = time.process_time() - begin
        removed = [
            name
            for shard in found.removed.within("a").shards
            for table in shard.read(["id"])
            for name in table["id"].to_pylist()
        ]
    return {"documents": source.kept, "seconds": seconds, "ids": set(removed)}


def remove_theirs(python: Path, name: str, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Removal by a peer in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        path = Path(work) / "documents.parquet"
        pq.write_table(pa.table({"text": list(texts)}), path)
        command = [str(python), str(WORKERS / "near_duplicates.py"), name, str(path), work]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rate(results: Sequence[dict[str, Any]]) -> float:
    """Median documents a second of processor time."""
    return statistics.median(result["documents"] / result["seconds"] for result in results)


def measure_near_duplicates(
    folder: Path, count: int, rounds: int, python: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ours and the peers in turn, the agreement of both signatures, and the flatness of time."""
    texts = make_documents(count)
    ours, rensa, sketch = [], [], []
    for number in range(rounds):
        ours.append(remove_ours(folder, texts))
        if python:
            rensa.append(remove_theirs(python, "rensa", folder, texts))
            if not number:
                sketch.append(remove_theirs(python, "datasketch", folder, texts))
    speed = rate(ours)
    removed = ours[0]["ids"]
    what = "near-duplicates removed with verification, ours"
    rows = [row(what, speed, "documents/s"), row("removed by us", len(removed), "documents")]
    claims = []
    if python:
        few = texts[: round(count * DATATROVE_SHARE)]
        trove = [remove_theirs(python, "datatrove", folder, few)]
        for name, results, target in (
            ("rensa, unverified", rensa, 0.6),
            ("datasketch, unverified", sketch, 3.0),
            ("datatrove, unverified", trove, 20.0),
        ):
            ratio = speed / rate(results)
            rows.append(row(f"near-duplicates, {name}", rate(results), "documents/s"))
            rows.append(row(f"removed by {name}", results[0]["removed"], "documents"))
            claims.append(claim(f"speed over {name}", ratio, "x", f">= {target}", ratio >= target))
    for containment in (FuzzySettings().containment, CONTAINMENT):
        default, reference = (
            remove_ours(folder, texts, signature, containment)
            for signature in ("rensa", "reference")
        )
        same = 1 - len(default["ids"] ^ reference["ids"]) / reference["documents"]
        name = f"documents both signatures treat alike at containment {containment}"
        claims.append(claim(name, 100 * same, "%", ">= 99", same >= 0.99))
    rows.append(row("with reference signatures", rate([reference]), "documents/s"))
    return rows, claims


def measure_flatness(folder: Path, few: int, many: int) -> tuple[list[Any], list[Any]]:
    """Time a document of a corpus and of one ten times (quick: four times) as large.

    Each has its own planted copies: a part of the large one would hold copies without originals.
    """
    small, large = (
        remove_ours(folder, make_documents(count, SHORT_PIECE_CHARACTERS)) for count in (few, many)
    )
    ratio = rate([small]) / rate([large])
    rows = [
        row(f"near-duplicates, {found['documents']:,} documents", rate([found]), "documents/s")
        for found in (small, large)
    ]
    name = f"time a document at {many:,} over {few:,}"
    return rows, [claim(name, ratio, "x", "<= 1.2", ratio <= 1.2)]


def measure_exact(folder: Path, count: int) -> float:
    """Documents a second of global exact dedup over two sources that share half of theirs."""
    texts = [f"document {number}" for number in range(count)]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        corpus = Path(name)
        parts = {"a": texts[: 2 * count // 3], "b": texts[count // 3 :]}
        sources = [write_source(corpus, key, part) for key, part in parts.items()]
        begin = time.process_time()
        _, manifest, _ = find_duplicates(Engine(), sources, corpus / "attributes")
        seconds = time.process_time() - begin
        assert sum(manifest["dup_doc"].values()) == len(set(parts["a"]) & set(parts["b"]))
        return sum(source.kept for source in sources) / seconds


def measure_kmeans(
    folder: Path, count: int, python: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Spherical k-means of document vectors from the same start, both on one thread.

    Rounding leads the two to different optima, so ours goes on until its loss is that of 20
    iterations of faiss, never fewer than those and at most twice as many; all of them are timed.
    """
    texts = make_documents(count)
    features = HashedFeatures().count(texts)
    weights = weights_of_features(count, np.asarray((features > 0).sum(axis=0)).ravel())
    codes = quantize(HashEmbedder(weights, EMBEDDED_DIMENSION).embed(texts))
    codes = codes[np.abs(codes).max(axis=1) > 0]
    ids = [f"{number:08d}" for number in range(len(codes))]
    start = codes[initial_rows(ids, len(codes) // 64, SEED, 0)].astype(np.int64)
    centroids = round_centroids(start, lengths_of(start))
    theirs = cluster_with_faiss(folder, python, codes, centroids) if python else None
    with threadpool_limits(1):
        needed = ITERATIONS
        if theirs:
            losses = fit_once(codes, centroids, 2 * ITERATIONS).losses
            reached = [i for i, loss in enumerate(losses) if loss <= theirs["loss"]]
            needed = max(ITERATIONS, reached[0]) if reached else len(losses) - 1
        begin = time.process_time()
        found = fit_once(codes, centroids, needed)
        seconds = time.process_time() - begin
    rows = [row(f"k-means, {len(codes):,} x {len(start)}, ours", seconds, "s")]
    rows.append(row("k-means, iterations, ours", len(found.losses) - 1, ""))
    rows.append(row("k-means, loss a row, ours", found.losses[-1] / len(codes), ""))
    if not theirs:
        return rows, []
    rows.append(row(f"k-means, {ITERATIONS} iterations, faiss", theirs["seconds"], "s"))
    rows.append(row("k-means, loss a row, faiss", theirs["loss"] / len(codes), ""))
    ratio, excess = seconds / theirs["seconds"], found.losses[-1] / theirs["loss"]
    return rows, [
        claim("k-means: time over faiss", ratio, "x", "<= 2.5", ratio <= 2.5),
        claim("k-means: loss over faiss", excess, "x", "<= 1.0001", excess <= 1.0001),
    ]


def cluster_with_faiss(
    folder: Path, python: Path, codes: np.ndarray, centroids: np.ndarray
) -> dict[str, float]:
    """Seconds and loss of faiss from the same centroids."""
    np.save(folder / "rows.npy", dequantize(codes).astype(np.float32))
    np.save(folder / "start.npy", (centroids / 32767).astype(np.float32))
    command = [str(python), str(WORKERS / "faiss_kmeans.py"), str(folder), str(ITERATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    sums = cluster_sums(codes, np.load(folder / "labels.npy").astype(np.int32), len(centroids))
    lengths = float(lengths_of(sums).sum())
    return {"seconds": seconds, "loss": len(codes) - step_size(codes.shape[1]) * lengths}


def find_peers(python: Path | None) -> Path | None:
    """The interpreter of the peers' environment, made if needed; None without a network."""
    if python is not None:
        return python
    folder = CACHE / "curation"
    python = folder / "bin" / "python"
    if python.exists() and not subprocess.run([python, "-c", HAS_PEERS], check=False).returncode:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
    if subprocess.run(command, check=False).returncode:
        print(
            f"the peers could not be installed ({' '.join(PEER_PACKAGES)}, into {folder}): only "
            "our side is measured. Connect to a network, or pass --peer-python.",
            file=sys.stderr,
        )
        return None
    return python


def run(quick: bool, peer_python: Path | None = None) -> dict[str, Any]:
    """All measurements."""
    python = find_peers(peer_python)
    with tempfile.TemporaryDirectory(prefix="portolan-benchmark-") as name:
        folder = Path(name)
        rows, claims = measure_near_duplicates(
            folder, 5_000 if quick else 20_000, 1 if quick else 3, python
        )
        sizes = (5_000, 20_000) if quick else (20_000, 200_000)
        found = [
            measure_flatness(folder, *sizes),
            measure_kmeans(folder, 10_000 if quick else 40_000, python),
        ]
        for more, checked in found:
            rows, claims = rows + more, claims + checked
        exact = measure_exact(folder, 60_000 if quick else 300_000)
    rows.append(row("exact dedup over sources", exact, "documents/s"))
    claims.append(claim("exact dedup", exact, "documents/s", ">= 10,000", exact >= 1e4))
    return report(rows, claims, ("portolan", "numpy", "polars", "polars-hash", "pyarrow", "rensa"))


if __name__ == "__main__":
    main(__doc__, run, {"--peer-python": {"type": Path, "metavar": "PYTHON", "default": None}})
