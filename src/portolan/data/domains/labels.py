"""Names of domains: their most distinctive words, or names that a person gave."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from portolan.data.documents import Stage, run_stage
from portolan.data.domains.attribute import SAMPLE_DOMAINS, DomainFit
from portolan.data.domains.coherence import TRIAL_DOCUMENTS, coherence, make_trials
from portolan.data.embedding.sampling import FITS, Sample
from portolan.data.embedding.words import separate_words
from portolan.errors import UsageError
from portolan.files import read_json
from portolan.settings import Settings

VERSION = 2
NUM_KEYWORDS, LABEL_KEYWORDS = 10, 3
MAX_DOCUMENTS, MAX_CHARACTERS, MIN_DOCUMENTS, SPECIFICITY = 1000, 10_000, 3, 4
COHERENCE_TRIALS = 100
_NAMEABLE = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class DomainLabel:
    """What a domain is called, its distinctive words, and where the name comes from."""

    domain: int
    label: str
    keywords: tuple[str, ...]
    source: Literal["keywords", "llm", "imported", "human"] = "keywords"
    author: str = ""
    date: str = ""


class NamedDomain(Settings):
    """An entry of a file of names."""

    label: str
    source: Literal["llm", "imported", "human"] = "human"
    author: str = ""
    date: str = ""


class LabelFile(Settings):
    """A file of names: the key of the fit that they are for, and a name by number of domain."""

    fit: str
    labels: dict[str, NamedDomain]


def keywords(
    texts: Mapping[int, Sequence[str]], number: int = NUM_KEYWORDS
) -> dict[int, list[str]]:
    """The words that are a domain's own, those with the largest p ln(1 + A / f) first.

    p is the word's share of the domain's words, f its count in all, A the mean number of words a
    domain. Its own are words of at least 3 letters and nothing else that stand in 3 of its
    documents, and in at least 4 times as large a share of them as of the documents of the other
    domains on average: words of grammar differ in how often they are said, but stand in most
    documents everywhere. Ties in order of the words.
    """
    counts: dict[int, Counter[str]] = {}
    shares: dict[int, dict[str, float]] = {}
    for domain, of_domain in texts.items():
        counts[domain], holders = Counter(), Counter[str]()
        for text in of_domain:
            words = Counter(_nameable_words(text))
            counts[domain].update(words)
            holders.update(words.keys())
        shares[domain] = {word: held / len(of_domain) for word, held in holders.items()}
    everywhere: Counter[str] = Counter()
    total_shares: Counter[str] = Counter()
    for domain, of_domain in counts.items():
        everywhere.update(of_domain)
        total_shares.update(shares[domain])
    mean_words, others = everywhere.total() / max(1, len(counts)), max(1, len(counts) - 1)
    chosen = {}
    for domain, of_domain in counts.items():
        size, documents = of_domain.total(), len(texts[domain])
        scores = {}
        for word, share in shares[domain].items():
            is_held = round(share * documents) >= min(MIN_DOCUMENTS, documents)
            if is_held and share >= SPECIFICITY * (total_shares[word] - share) / others:
                rarity = math.log1p(mean_words / everywhere[word])
                scores[word] = of_domain[word] / size * rarity
        chosen[domain] = sorted(scores, key=lambda word: (-scores[word], word))[:number]
    return chosen


def _nameable_words(text: str) -> list[str]:
    words = separate_words(text).decode().split()
    return [word for word in words if _NAMEABLE.fullmatch(word)]


def sampled_texts(sample: Sample, fit: DomainFit) -> dict[int, list[str]]:
    """First 10,000 characters of the 1,000 sampled documents of each domain with smallest ids."""
    wanted: dict[tuple[str, str], int] = {}
    by_domain: dict[int, list[tuple[str, str]]] = {}
    for table in fit.read(SAMPLE_DOMAINS):
        for row in table.select(["id", "source", "domain"]).to_pylist():
            by_domain.setdefault(row["domain"], []).append((row["id"], row["source"]))
    for domain, places in by_domain.items():
        wanted |= dict.fromkeys(sorted(places)[:MAX_DOCUMENTS], domain)
    texts: dict[int, list[str]] = {domain: [] for domain in range(fit.num_domains)}
    for source, part in sample.sources.items():
        for shard in part.shards:
            for table in shard.read():
                for row in table.to_pylist():
                    if (domain := wanted.get((row["id"], source))) is not None:
                        texts[domain].append(row["text"][:MAX_CHARACTERS])
    return texts


def label_domains(
    sample: Sample, fit: DomainFit, corpus: Path, *, labels_file: Path | None = None
) -> list[DomainLabel]:
    """A label for every domain: from `labels_file` where it has one, else its first 3 keywords.

    A domain without a word of its own has an empty label.

    Labels are for people: no key depends on them. The words, and how coherent the domains are by
    the intruder test, are found once and kept beside the fit. Memory: 1,000 documents a domain.

    Raises:
        UsageError: the file is not readable, or names the domains of another fit.
    """
    params = {
        "keywords": NUM_KEYWORDS,
        "documents": MAX_DOCUMENTS,
        "characters": MAX_CHARACTERS,
        "specificity": SPECIFICITY,
        "trials": COHERENCE_TRIALS,
    }
    stage = Stage("keywords", VERSION, params, (fit.key,))

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        texts = sampled_texts(sample, fit)
        found = keywords(texts)
        sizes = {domain: len(of_domain) for domain, of_domain in texts.items()}
        return [], {
            "keywords": [found[domain] for domain in range(fit.num_domains)],
            "coherence": coherence(make_trials(texts, sizes, num_trials=COHERENCE_TRIALS)),
            "coherence_by_chance": 1 / (TRIAL_DOCUMENTS + 1),
        }

    _, manifest, _ = run_stage(corpus / FITS, stage, build)
    words = [tuple(of_domain) for of_domain in manifest["keywords"]]
    labels = [
        DomainLabel(domain, ", ".join(of_domain[:LABEL_KEYWORDS]), of_domain)
        for domain, of_domain in enumerate(words)
    ]
    for name, given in _read_names(labels_file, fit).items():
        domain = int(name)
        labels[domain] = DomainLabel(domain, keywords=words[domain], **given.model_dump())
    return labels


def _read_names(path: Path | None, fit: DomainFit) -> dict[str, NamedDomain]:
    if path is None:
        return {}
    try:
        names = LabelFile.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        if isinstance(error, pydantic.ValidationError):
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            error = ValueError(f"{place}: {first['msg']}")
        raise UsageError(
            f"data.domains.labels_file {path}: {error}",
            remedy='write {"fit": "<key of the fit>", "labels": {"0": {"label": "..."}}}',
        ) from error
    if names.fit != fit.key:
        raise UsageError(
            f"data.domains.labels_file {path} names the domains of fit {names.fit!r}, "
            f"but this corpus has fit {fit.key!r}",
            remedy=f'look at the new domains, then set "fit": "{fit.key}" in that file',
        )
    if unknown := sorted(set(names.labels) - {str(i) for i in range(fit.num_domains)}):
        raise UsageError(
            f"data.domains.labels_file {path}: there is no domain {unknown[0]!r}",
            remedy=f"number domains 0 to {fit.num_domains - 1}",
        )
    return names.labels
