"""Content of cells from their tokens, against the definition one token at a time."""

from collections import Counter

import numpy as np
import pytest

from portolan.data.mixing import fold
from portolan.data.mixture_search.content import bucket_of, mean_embeddings
from portolan.data.store_writing import cells_of_sources, write_store


def test_mean_embedding_is_the_mean_of_signed_token_counts(store):
    found = mean_embeddings(store)
    names = list(store.cells)
    assert found.shape == (len(names), 256)
    for name, vector in zip(names, found, strict=True):
        total = np.zeros(256)
        for shard in store.cells[name].shards:
            for start, stop in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
                one = np.zeros(256)
                for token, count in Counter(shard.tokens[start:stop].tolist()).items():
                    for j in range(8):
                        word = fold(token, j)
                        one[word % 256] += (-1 if word >> 63 else 1) * (1 + np.log(count))
                total += one / np.linalg.norm(one)
        assert vector == pytest.approx(total / store.cells[name].num_documents)


def test_only_the_first_thousand_documents_count(tmp_path, corpus, tokenizer, monkeypatch):
    import portolan.data.mixture_search.content as content

    monkeypatch.setattr(content, "MAX_DOCUMENTS", 7)
    few = mean_embeddings(write_store(tmp_path / "a", cells_of_sources(corpus), tokenizer,
                                      inputs=["0"], shard_tokens=500))  # fmt: skip
    many = mean_embeddings(write_store(tmp_path / "b", cells_of_sources(corpus), tokenizer,
                                       inputs=["0"], shard_tokens=9_000))  # fmt: skip
    assert np.array_equal(few, many)
    assert np.linalg.norm(few, axis=1).max() <= 1


def test_bucket_of_a_grid_cell():
    assert [bucket_of(name) for name in ("c00q0", "c39q4", "stdlib", "c1q2")] == [0, 4, 0, 0]
