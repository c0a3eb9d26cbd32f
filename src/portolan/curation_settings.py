"""Settings of curation after exact dedup: near-duplicates, decontamination, and the data map."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from portolan.settings import PositiveInt, Settings

Seed = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ReviewedLoss(Settings):
    """A source that may lose more than half to near-duplicates: who looked at it, and why."""

    source: str
    reason: Annotated[str, Field(min_length=1)]
    reviewer: Annotated[str, Field(min_length=1)]
    max_loss: Share


class FuzzySettings(Settings):
    """Near-duplicates: MinHash proposes pairs of documents, verification decides.

    A document goes if a kept, longer one holds at least `containment` of its 3-token windows.
    Sources of `exempt_sources` keep theirs, with the evidence. `reviewed_losses` lets a source pass
    that loses more than half. `source_rank` names sources whose documents stay before longer ones
    of others. A group of more documents or characters than `max_part_*` is verified in parts.
    """

    enabled: bool = True
    signature: Literal["rensa", "reference"] = "rensa"
    shingle_unit: Literal["word", "char"] = "word"
    shingle_n: PositiveInt = 5
    bands: PositiveInt = 26
    rows: PositiveInt = 11
    containment: Share = 0.98
    no_new_token: bool = False
    exempt_sources: tuple[str, ...] = ()
    source_rank: tuple[str, ...] = ()
    max_part_documents: PositiveInt = 100_000
    max_part_characters: PositiveInt = 32 << 20
    reviewed_losses: tuple[ReviewedLoss, ...] = ()


class EvaluationSource(Settings):
    """One set of test items that training text must not hold: a jsonl file, or an lm-eval export.

    `excluded` gives the reason why a registered set is not searched for.
    """

    name: Annotated[str, Field(min_length=1)]
    path: str
    version: str = ""
    revision: str = ""
    split: str = ""
    license_spdx: str = "NOASSERTION"
    sha256: str = ""
    rows: PositiveInt | None = None
    fields: tuple[str, ...] = ()
    required: bool = True
    excluded: str = ""


class DecontaminationSettings(Settings):
    """Training documents that hold test items: those of `sets` and the own held-out documents."""

    enabled: bool = True
    fold: Literal["nfkc", "none"] = "nfkc"
    ngram_hash: Literal["xxh3", "blake2b"] = "xxh3"
    sets: tuple[EvaluationSource, ...] = ()


class EmbeddingSettings(Settings):
    """What turns a document into a vector; `hash` and `word-vectors` need no network.

    `model` is a name with a pinned `revision`, or a folder; `endpoint` the URL of an
    OpenAI-compatible server of embeddings, `key_variable` the environment variable that holds its
    key. `sample_documents` smallest hashes are drawn once, with `seed`, and all fits use them.
    """

    backend: Literal["hash", "word-vectors", "sentence-transformers", "http"] = "hash"
    model: str = ""
    revision: str = ""
    endpoint: str = ""
    key_variable: str = ""
    dimension: Annotated[int, Field(ge=8, le=8192)] = 256
    max_characters: PositiveInt = 100_000
    sample_documents: PositiveInt = 200_000
    seed: Seed = 42

    @pydantic.model_validator(mode="after")
    def _all_read(self) -> "EmbeddingSettings":
        unread = {
            "hash": {"model", "revision", "endpoint", "key_variable"},
            "word-vectors": {"model", "revision", "endpoint", "key_variable", "dimension"},
            "sentence-transformers": {"endpoint", "key_variable"},
            "http": set(),
        }
        for key in sorted(self.changed() & unread[self.backend]):
            raise ValueError(f"{key} means nothing for backend {self.backend!r}")
        return self


class DomainSettings(Settings):
    """Domains by meaning: fine spherical k-means, made coarse. Without `count` a source is one.

    `fine` clusters need 16 sampled documents each and four times `count`; a domain holds at least
    `minimum_share` of the sample. `labels_file` names domains by hand; names change no data.
    """

    count: PositiveInt | None = None
    fine: PositiveInt = 5_000
    iterations: PositiveInt = 20
    restarts: PositiveInt = 3
    minimum_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    seed: Seed = 42
    labels_file: str = ""


class QualitySettings(Settings):
    """Five buckets of quality from a scorer that learnt from labels; off without a `labeller`.

    `heuristic` labels offline, `import` reads `labels_file`, `llm` asks `model` at the
    OpenAI-compatible `endpoint`. `accept` gives the reason why a scorer that fails its gates may
    be used.
    """

    labeller: Literal["heuristic", "import", "llm"] | None = None
    sample_documents: PositiveInt = 20_000
    labels_file: str = ""
    endpoint: str = ""
    model: str = ""
    key_variable: str = ""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    accept: str = ""
    seed: Seed = 42

    @pydantic.model_validator(mode="after")
    def _all_read(self) -> "QualitySettings":
        asked = {"endpoint", "model", "key_variable", "temperature"}
        unread = {
            "heuristic": asked | {"labels_file"},
            "import": asked | {"sample_documents"},
            "llm": {"labels_file"},
        }
        for key in sorted(self.changed() & unread.get(self.labeller or "", set())):
            raise ValueError(f"{key} means nothing for labeller {self.labeller!r}")
        return self
