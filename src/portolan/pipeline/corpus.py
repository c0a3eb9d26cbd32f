"""The curated corpus of a project: tokenizer, token store, held-out set, and their summary."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from portolan.canonical import digest, stringify_floats
from portolan.files import read_json
from portolan.pipeline.course import Course, plan_course
from portolan.pipeline.mixing import build_mixture, epoch_prefixes, simulated_epochs
from portolan.project import Project
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

SUMMARY = "summary.json"
VERSION = 2


def corpus_key(recipe: Recipe) -> str:
    """Digest of the settings that change the corpus."""
    settings = {
        "data": recipe.data.model_dump(mode="json"),
        "tokenizer": recipe.tokenizer.model_dump(mode="json"),
        "rows": recipe.evaluation.max_sequences_per_domain,
        "sequence_length": recipe.shape(recipe.model.width).sequence_length,
        "version": VERSION,
    }
    return digest(stringify_floats(settings))


@dataclass(frozen=True)
class Corpus:
    """What the training stages need of the corpus; files are opened when they are asked for."""

    project: Project
    summary: dict[str, Any]

    @property
    def store_digest(self) -> str:
        """Digest of all training tokens."""
        return self.summary["store"]["digest"]

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer file."""
        return self.summary["tokenizer"]["digest"]

    @property
    def evaluation_digest(self) -> str:
        """Digest of the held-out rows that every evaluation sees."""
        return self.summary["heldout"]["digest"]

    @property
    def domains(self) -> list[str]:
        """Names of the held-out domains."""
        return list(self.summary["heldout"]["domains"])

    def path(self, part: str) -> Path:
        """Path of a part: `tokenizer`, `store` or `heldout`."""
        return self.project.root / self.summary[part]["path"]

    def tokenizer(self) -> Any:
        """The tokenizer with its boundary policy."""
        return load_tokenizer(self.path("tokenizer"), self.project.recipe)

    @cached_property
    def store(self) -> Any:
        """The memory-mapped token store."""
        from portolan.data.store import TokenStore

        return TokenStore(self.path("store"))

    @cached_property
    def evaluation_set(self) -> Any:
        """Held-out rows of the length that the models train on."""
        return open_evaluation_set(self.path("heldout"), self.tokenizer(), self.project.recipe)

    def evaluation_rows(self, length: int) -> Any:
        """The same held-out text, as much of it, in rows of another length."""
        tokenizer, recipe = self.tokenizer(), self.project.recipe
        return open_evaluation_set(self.path("heldout"), tokenizer, recipe, length)

    def loader(
        self,
        rung: Rung,
        seed: int,
        reference_tokens: int,
        *,
        course: Course | None = None,
        simulate_epochs: bool = True,
    ) -> Any:
        """Batches of a run: the mixture on this store, with the epochs of the target.

        The target has its own epochs: it passes `simulate_epochs` = False.
        """
        from portolan.data.loader import Loader

        course = course or plan_course(self.project.recipe, rung)
        mixture = self.mixture(rung, course)
        simulated = simulated_epochs(rung, reference_tokens) if simulate_epochs else None
        prefixes = epoch_prefixes(mixture, simulated)
        return Loader(self.store, mixture, geometry=course.geometry, seed=seed, prefixes=prefixes)

    def mixture(self, rung: Rung, course: Course | None = None) -> Any:
        """Counts per cell of every phase of the run."""
        return build_mixture(self, rung, course or plan_course(self.project.recipe, rung))

    def artifacts(self) -> Iterator[tuple[str, str, list[Path], str]]:
        """(kind, name, files, text) of everything that the record must name."""
        summary, store = self.summary, self.summary["store"]
        key = summary["key"][:16]
        files = [path for path in self.path("store").rglob("*") if path.is_file()]
        text = f"training tokens: {store['tokens']} in {store['documents']} documents"
        yield "dataset", f"token store {key}", files, text
        files = [path for path in self.path("heldout").rglob("*") if path.is_file()]
        yield "dataset", f"held-out tokens {key}", files, "documents that no model is trained on"
        text = f"byte-level BPE of {summary['tokenizer']['vocab_size']} tokens"
        yield "tokenizer", f"tokenizer {key}", [self.path("tokenizer")], text
        files = [self.project.root / path for path in summary["manifests"]]
        text = "what each step of curation read and wrote"
        yield "dataset", f"curation manifests {key}", files, text
        files = [self.project.corpus / SUMMARY]
        yield "dataset", f"corpus summary {key}", files, "what the corpus is, in numbers"

    def describe(self) -> list[str]:
        """Lines for a person."""
        lines = []
        for s in self.summary["sources"]:
            text = (
                f"{s['key']}: {s['documents']:,} documents, {s['bytes'] / 1e6:.1f} MB, "
                f"{s['tokens']:,} tokens, {s['heldout_documents']} held out, {s['license_class']}"
            )
            dropped = sorted(s["dropped"].items())
            reasons = [f"{number:,} {why}" for why, number in dropped if why != "heldout"]
            lines.append("; left out: ".join(filter(None, [text, ", ".join(reasons)])))
        store, cells = self.summary["store"], self.summary["cells"]
        return [
            *lines,
            f"token store: {store['tokens']:,} tokens in {len(cells)} cells, digest "
            f"{store['digest'][:16]}",
        ]


def load_tokenizer(path: Path, recipe: Recipe) -> Any:
    """A tokenizer file with the recipe's boundary policy."""
    from portolan.data.tokenizer import BoundaryPolicy, DocumentTokenizer

    policy = BoundaryPolicy(bos=recipe.tokenizer.bos, eos=recipe.tokenizer.eos)
    return DocumentTokenizer.from_file(path, policy)


def open_evaluation_set(
    folder: Path, tokenizer: Any, recipe: Recipe, length: int | None = None
) -> Any:
    """The held-out store as rows of the first length or another, capped as the recipe says."""
    from portolan.data.evaluation_set import EvaluationSet
    from portolan.data.store import TokenStore
    from portolan.data.tokenizer import token_bytes

    first = recipe.shape(recipe.model.width).sequence_length
    max_rows = recipe.evaluation.max_sequences_per_domain
    return EvaluationSet(
        TokenStore(folder),
        length or first,
        token_bytes(tokenizer),
        max_rows=max(1, max_rows * first // (length or first)),
    )


def find_corpus(project: Project) -> Corpus | None:
    """The corpus of this recipe, if its stage is complete."""
    path = project.corpus / SUMMARY
    if not path.is_file():
        return None
    summary = read_json(path)
    return Corpus(project, summary) if summary["key"] == corpus_key(project.recipe) else None
