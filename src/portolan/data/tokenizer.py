"""Tokenizers: training a byte-level BPE on the corpus, and encoding whole documents."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from portolan.errors import PortolanError, UsageError
from portolan.files import write_bytes_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
MINIMUM_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
DEFAULT_SAMPLE_BYTES = 16 << 20
# Contractions, letters with one leading character, up to three digits, punctuation with its line
# ends, line ends, spaces: the split used by the tokenizers of Llama 3 (arXiv 2407.21783).
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class BoundaryPolicy:
    """Whether the beginning and end tokens surround every document."""

    bos: Literal["none", "document"] = "document"
    eos: Literal["none", "document"] = "document"

    def __post_init__(self) -> None:
        for name, value in (("bos", self.bos), ("eos", self.eos)):
            if value not in ("none", "document"):
                raise UsageError(
                    f"tokenizer {name} policy is {value!r}", remedy='use "none" or "document"'
                )


@dataclass(frozen=True)
class SampleDocument:
    """One document chosen for training a tokenizer, with the hash that chose it."""

    rank: int
    source: str
    document_id: str
    num_bytes: int


def sample_documents(
    sources: Sequence[tuple[str, Sequence[Path]]], *, seed: int, budget_bytes: int
) -> list[SampleDocument]:
    """Choose documents with the smallest XXH3-64 of `seed:source:id` up to a budget of UTF-8 bytes.

    The choice depends on the set of documents only, not on their order or sharding. At least one
    document is returned; the first that would pass the budget ends the sample.
    """
    import pyarrow.compute as pc
    import xxhash

    found: list[SampleDocument] = []
    for source, shards in sources:
        for batch in _read_columns(shards, ("id", "text")):
            lengths = pc.binary_length(batch.column("text")).to_pylist()  # pyright: ignore
            for document_id, num_bytes in zip(batch.column("id").to_pylist(), lengths, strict=True):
                rank = xxhash.xxh3_64_intdigest(f"{seed}:{source}:{document_id}".encode())
                found.append(SampleDocument(rank, source, document_id, num_bytes))
    if not found:
        raise UsageError(
            "no documents to train a tokenizer on", remedy="check the sources of the corpus"
        )
    found.sort(key=lambda document: (document.rank, document.source, document.document_id))
    chosen, total_bytes = [], 0
    for document in found:
        total_bytes += document.num_bytes
        if chosen and total_bytes > budget_bytes:
            break
        chosen.append(document)
    return chosen


def _read_columns(shards: Sequence[Path], columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for shard in shards:
        with pq.ParquetFile(shard) as file:
            yield from file.iter_batches(batch_size=4096, columns=list(columns))


def read_sample(
    sources: Sequence[tuple[str, Sequence[Path]]], sample: Sequence[SampleDocument]
) -> list[str]:
    """Texts of a sample, in its order."""
    position = {(item.source, item.document_id): index for index, item in enumerate(sample)}
    texts: list[str] = [""] * len(sample)
    for source, shards in sources:
        for batch in _read_columns(shards, ("id", "text")):
            for row, document_id in enumerate(batch.column("id").to_pylist()):
                index = position.get((source, document_id))
                if index is not None:
                    texts[index] = batch.column("text")[row].as_py()
    return texts


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, extra_special_tokens: Sequence[str] = ()
) -> bytes:
    """Train a byte-level BPE and return the bytes of its `tokenizer.json`.

    Special tokens come first, then the 256 byte symbols, so every Unicode text can be written.

    Raises:
        UsageError: the size is under 259, or the texts hold too few distinct pairs to reach it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MINIMUM_VOCAB_SIZE:
        raise UsageError(
            f"tokenizer vocab_size is {vocab_size}",
            remedy=f"use at least {MINIMUM_VOCAB_SIZE}: 256 byte symbols and the special tokens",
        )
    special = [*SPECIAL_TOKENS, *extra_special_tokens]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UsageError(
            f"the sample supports {tokenizer.get_vocab_size()} tokens, vocab_size is {vocab_size}",
            remedy="lower tokenizer vocab_size, or raise its sample bytes or the corpus size",
        )
    return tokenizer.to_str(pretty=True).encode() + b"\n"


def train_tokenizer_file(
    path: Path,
    sources: Sequence[tuple[str, Sequence[Path]]],
    *,
    vocab_size: int,
    seed: int = 0,
    sample_bytes: int = DEFAULT_SAMPLE_BYTES,
) -> str:
    """Train on a sample of Parquet shards per source, write `path`, return its SHA-256."""
    sample = sample_documents(sources, seed=seed, budget_bytes=sample_bytes)
    content = train_tokenizer(read_sample(sources, sample), vocab_size=vocab_size)
    write_bytes_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class DocumentTokenizer:
    """A `tokenizer.json` with a boundary policy, probed with exactly the options that it uses.

    Text that looks like a special token is encoded as ordinary text. Truncation, padding and
    templates stored in the file are switched off.
    """

    content: bytes = field(repr=False)
    policy: BoundaryPolicy = field(default_factory=BoundaryPolicy)
    bos_token: str = BOS
    eos_token: str = EOS
    backend: "Tokenizer" = field(init=False, repr=False, compare=False)
    digest: str = field(init=False)
    vocab_size: int = field(init=False)
    bos_id: int | None = field(init=False)
    eos_id: int | None = field(init=False)

    @classmethod
    def from_file(cls, path: Path, policy: BoundaryPolicy | None = None, **names: str) -> Any:
        """Read any `tokenizer.json`; `bos_token` and `eos_token` name its boundary tokens."""
        return cls(path.read_bytes(), policy or BoundaryPolicy(), **names)

    def __post_init__(self) -> None:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.content.decode())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        for name, value in (
            ("backend", backend),
            ("digest", hashlib.sha256(self.content).hexdigest()),
            ("vocab_size", max(backend.get_vocab(with_added_tokens=True).values()) + 1),
            ("bos_id", self._boundary_id(backend, "bos", self.bos_token)),
            ("eos_id", self._boundary_id(backend, "eos", self.eos_token)),
        ):
            object.__setattr__(self, name, value)
        self._probe()

    def _boundary_id(self, backend: "Tokenizer", name: str, token: str) -> int | None:
        identifier = backend.token_to_id(token)
        if identifier is None and getattr(self.policy, name) == "document":
            raise UsageError(
                f"the tokenizer has no token {token!r} for its {name} policy",
                remedy=f'name its token, or set the {name} policy to "none"',
            )
        return identifier

    def _probe(self) -> None:
        texts = ["Ahoy, world!\n\tx = 1\n", f"{self.bos_token} and {self.eos_token}"]
        for text, ids in zip(texts, self.encode_documents(texts), strict=True):
            self.check_boundaries(ids, np.array([0, len(ids)]), place=f"probe {text!r}")

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for no text, increasing."""
        added = self.backend.get_added_tokens_decoder()
        ids = {identifier for identifier, token in added.items() if token.special}
        boundary = ((self.policy.bos, self.bos_id), (self.policy.eos, self.eos_id))
        ids.update(i for use, i in boundary if use == "document" and i is not None)
        return tuple(sorted(ids))

    @property
    def pad_id(self) -> int:
        """Id that fills the end of a partial row; its weight is always 0."""
        identifier = self.backend.token_to_id(PAD)
        return 0 if identifier is None else identifier

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encode each text with its boundary tokens; the library uses its threads on a batch."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        before = [self.bos_id] if self.policy.bos == "document" else []
        after = [self.eos_id] if self.policy.eos == "document" else []
        return [np.array([*before, *encoding.ids, *after], np.int32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Encode a piece of text without boundary tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def check_boundaries(
        self, tokens: NDArray[np.integer[Any]], offsets: NDArray[np.integer[Any]], *, place: str
    ) -> None:
        """Require BOS first, EOS last and neither inside, for documents laid end to end.

        `offsets` int64[n+1] are document starts and the total length.
        """
        for name, identifier, where in (
            ("bos", self.bos_id, offsets[:-1]),
            ("eos", self.eos_id, offsets[1:] - 1),
        ):
            if identifier is None:
                continue
            expected = len(where) if getattr(self.policy, name) == "document" else 0
            occurrences = int(np.count_nonzero(tokens == identifier))
            at_place = int(np.count_nonzero(tokens[where] == identifier)) if expected else 0
            if at_place != expected or occurrences != expected:
                raise PortolanError(
                    f"{place}: {name} token {identifier} stands at {at_place} of {expected} "
                    f"document boundaries and {occurrences - at_place} other places",
                    remedy="use a tokenizer whose special tokens are marked special",
                )


def token_bytes(tokenizer: DocumentTokenizer) -> NDArray[np.int32]:
    """UTF-8 bytes that each token stands for, int32[V]; 0 for special tokens and unused ids."""
    from tokenizers import pre_tokenizers

    added = tokenizer.backend.get_added_tokens_decoder()
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    is_byte_level = "ByteLevel" in tokenizer.content.decode()
    lengths = np.zeros(tokenizer.vocab_size, np.int32)
    for piece, identifier in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if identifier in added:
            lengths[identifier] = len(added[identifier].content.encode())
        elif is_byte_level and alphabet.issuperset(piece):
            lengths[identifier] = len(piece)
        elif _BYTE_FALLBACK.fullmatch(piece):
            lengths[identifier] = 1
        else:
            lengths[identifier] = len(piece.replace("▁", " ").encode())
    lengths[list(tokenizer.special_ids)] = 0
    return lengths
