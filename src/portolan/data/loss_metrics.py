"""Means of held-out losses over domains, bits per byte, and the entropy of a unigram model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class DomainLoss(NamedTuple):
    """Sums over a domain: loss in nats, targets, their UTF-8 bytes, nats of targets with text.

    `text_nats` leaves out targets that stand for no text (end of a document); None if they were
    not summed apart, which adds their loss to bits per byte.
    """

    nats: float
    num_targets: int
    target_bytes: int
    text_nats: float | None = None

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.nats / self.num_targets

    @property
    def bits_per_byte(self) -> float:
        """Bits a UTF-8 byte of text, from the totals of the whole domain."""
        nats = self.nats if self.text_nats is None else self.text_nats
        return nats / (math.log(2) * self.target_bytes)


def macro_loss(domains: Sequence[DomainLoss]) -> float:
    """Plain mean of the losses of the domains that have targets."""
    return _mean([domain.loss for domain in domains if domain.num_targets])


def micro_loss(domains: Sequence[DomainLoss]) -> float:
    """Loss over all targets of all domains."""
    return _total(domains).loss


def macro_bits_per_byte(domains: Sequence[DomainLoss]) -> float:
    """Plain mean of bits per byte of the domains that have target bytes."""
    return _mean([domain.bits_per_byte for domain in domains if domain.target_bytes])


def micro_bits_per_byte(domains: Sequence[DomainLoss]) -> float:
    """Bits per byte over all domains."""
    return _total(domains).bits_per_byte


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("no domain has a target: there is nothing to average")
    return math.fsum(values) / len(values)


def _total(domains: Sequence[DomainLoss]) -> DomainLoss:
    texts = [d.nats if d.text_nats is None else d.text_nats for d in domains]
    return DomainLoss(
        math.fsum(domain.nats for domain in domains),
        sum(domain.num_targets for domain in domains),
        sum(domain.target_bytes for domain in domains),
        math.fsum(texts),
    )


def summarize_losses(domains: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Metrics of an evaluation set from the fields of DomainLoss per domain.

    Keys: `<domain>/loss`, `<domain>/bpb`; `macro_loss`, `micro_loss`, `macro_bpb`, `micro_bpb`;
    and the two losses under every inner tag, for domains whose names form a tree by `/`.
    """
    sums = {name: DomainLoss(*fields) for name, fields in domains.items()}
    sums = {name: domain for name, domain in sums.items() if domain.num_targets}
    summary: dict[str, float] = {}
    groups: dict[str, list[DomainLoss]] = {}
    for name, domain in sums.items():
        summary[f"{name}/loss"] = domain.loss
        if domain.target_bytes:
            summary[f"{name}/bpb"] = domain.bits_per_byte
        parts = name.split("/")
        for depth in range(1, len(parts)):
            groups.setdefault("/".join(parts[:depth]), []).append(domain)
    for tag, members in groups.items():
        summary[f"{tag}/macro_loss"] = macro_loss(members)
        summary[f"{tag}/micro_loss"] = micro_loss(members)
    everything = list(sums.values())
    summary["macro_loss"], summary["micro_loss"] = macro_loss(everything), micro_loss(everything)
    if any(domain.target_bytes for domain in everything):
        summary["macro_bpb"] = macro_bits_per_byte(everything)
        summary["micro_bpb"] = micro_bits_per_byte(everything)
    return summary


def unigram_cross_entropy(
    train_counts: NDArray[Any], heldout_counts: NDArray[Any], *, smoothing: float = 1.0
) -> float:
    """Nats a held-out target under the token frequencies of the training text.

    Counts are [V]; `smoothing` is added to every training count, so that unseen tokens are finite.
    A model whose loss is not well below this has learned nothing but frequencies.
    """
    counts = np.asarray(train_counts, np.float64) + smoothing
    targets = np.asarray(heldout_counts, np.float64)
    if counts.shape != targets.shape or targets.sum() <= 0:
        raise ValueError(f"counts {counts.shape} and {targets.shape} must match, with targets")
    seen = targets > 0
    logarithms = np.log(counts[seen]) - math.log(counts.sum())
    return float(-(targets[seen] * logarithms).sum() / targets.sum())
