"""The intruder test: can somebody who reads k documents of a domain find one of another?"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from portolan.data.embedding.embedders import HashedFeatures
from portolan.data.embedding.words import damped_counts, holders_of

Pick = Callable[[Sequence[str]], int]
MIN_DOMAINS, TRIAL_DOCUMENTS, TRIAL_CHARACTERS = 2, 5, 2000


class Trial(NamedTuple):
    """Documents of one domain with one of another among them, at place `intruder`."""

    texts: tuple[str, ...]
    intruder: int
    domain: int


def make_trials(
    texts: Mapping[int, Sequence[str]],
    sizes: Mapping[int, int],
    *,
    num_trials: int,
    num_documents: int = TRIAL_DOCUMENTS,
    seed: int = 0,
) -> list[Trial]:
    """Trials of `num_documents` texts and an intruder, 2,000 characters of each.

    Domains are drawn in proportion to `sizes`: drawn uniformly, a huge domain of leftovers would
    count as little as a small clear one. Domains with fewer texts than a trial needs are left out.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    domains = sorted(domain for domain, of in texts.items() if len(of) >= num_documents)
    if len(domains) < MIN_DOMAINS:
        return []
    weights = np.array([sizes[domain] for domain in domains], np.float64)
    trials = []
    for _ in range(num_trials):
        own, other = generator.choice(len(domains), 2, replace=False, p=weights / weights.sum())
        of_domain, of_other = texts[domains[own]], texts[domains[other]]
        rows = generator.choice(len(of_domain), num_documents, replace=False)
        shown = [str(of_domain[row]) for row in rows]
        place = int(generator.integers(num_documents + 1))
        shown.insert(place, str(of_other[int(generator.integers(len(of_other)))]))
        beginnings = tuple(text[:TRIAL_CHARACTERS] for text in shown)
        trials.append(Trial(beginnings, place, domains[own]))
    return trials


def pick_by_words(texts: Sequence[str]) -> int:
    """The text that shares least with the others: cosine of damped word counts, rare words first.

    Reads the texts only, not the embedding that made the domains.
    """
    counts = damped_counts(HashedFeatures().count(texts))
    features, columns = np.unique(counts.indices, return_inverse=True)
    values = np.zeros((len(texts), len(features)))
    values[holders_of(counts), columns] = counts.data
    held = np.bincount(columns, minlength=len(features))
    weighted = values * np.log((1 + len(texts)) / (1 + held))
    lengths = np.sqrt(np.einsum("nd,nd->n", weighted, weighted))
    unit = weighted / np.maximum(lengths, 1e-12)[:, None]
    alike = np.einsum("nd,md->nm", unit, unit)
    np.fill_diagonal(alike, 0)
    return int(alike.sum(axis=1).argmin())


def coherence(trials: Sequence[Trial], pick: Pick = pick_by_words) -> float | None:
    """Share of trials whose intruder `pick` finds; None without trials.

    Chance is 1 in the number of texts shown.
    """
    if not trials:
        return None
    return sum(pick(trial.texts) == trial.intruder for trial in trials) / len(trials)
