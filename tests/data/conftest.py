"""A small corpus, its tokenizer and its token store, made once."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from portolan.data.store import TokenStore
from portolan.data.store_writing import cells_of_sources, write_store
from portolan.data.tokenizer import DocumentTokenizer, train_tokenizer

WORDS = ["ship", "harbour", "tide", "wind", "sail", "rope", "chart", "star", "port", "mast", "fog"]


def make_texts(source: str, count: int) -> list[str]:
    """Texts of about 60 words, different in every source."""
    random_words = random.Random(source)
    return [
        f"{source} {index}: "
        + " ".join(random_words.choices(WORDS, k=random_words.randint(20, 99)))
        for index in range(count)
    ]


def write_documents(folder: Path, source: str, texts: list[str], num_shards: int = 2) -> list[Path]:
    """Write texts as the curation does: sorted by the hash that is their id."""
    rows = sorted((xxhash.xxh3_128_hexdigest(text.encode()), text) for text in texts)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(num_shards):
        part = rows[shard * len(rows) // num_shards : (shard + 1) * len(rows) // num_shards]
        path = folder / f"{source.replace('/', '~')}-{shard}.parquet"
        table = pa.table({"id": [row[0] for row in part], "text": [row[1] for row in part]})
        pq.write_table(table, path)
        paths.append(path)
    return paths


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[Path]]]:
    """(source key, shards) of three sources of different size."""
    folder = tmp_path_factory.mktemp("documents")
    sizes = {"manual": 60, "manual/log": 200, "web": 120}
    return [(key, write_documents(folder, key, make_texts(key, n))) for key, n in sizes.items()]


@pytest.fixture(scope="session")
def tokenizer() -> DocumentTokenizer:
    """A byte-level BPE of 320 tokens with BOS and EOS around every document."""
    texts = [text for key in ("manual", "web") for text in make_texts(key, 60)]
    return DocumentTokenizer(train_tokenizer(texts, vocab_size=320))


@pytest.fixture(scope="session")
def store(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: list[tuple[str, list[Path]]],
    tokenizer: DocumentTokenizer,
) -> TokenStore:
    """A store of one cell a source, in several shards."""
    folder = tmp_path_factory.mktemp("tokens")
    cells = cells_of_sources(corpus)
    return write_store(folder, cells, tokenizer, inputs=["0" * 16], shard_tokens=3000)
