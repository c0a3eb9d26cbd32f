"""Enrichment of a topic, source or content type in a bucket of quality, with its interval."""

import math
from typing import NamedTuple

from portolan.report.data_map.facts import Count

MINIMUM_DOCUMENTS = 20
Z_95 = 1.96


class Enrichment(NamedTuple):
    """E = (T_xb / T_b) / (T_x / T): its base-2 logarithm and half the width of its interval."""

    log2: float
    half_width: float

    @property
    def ratio(self) -> float:
        """E itself."""
        return 2.0**self.log2


def enrichment(within: Count, bucket: Count, group: Count, total: Count) -> Enrichment | None:
    """Enrichment by tokens of a group x in a bucket b, its interval by documents n.

    log2 E ± (1.96 / ln 2) · sqrt(1/n_xb − 1/n_b + 1/n_x − 1/n); the form of the interval is
    inferred, the public pages do not state it.

    Args:
        within: the group inside the bucket.
        bucket, group: the whole bucket, the whole group.
        total: the whole store.

    Returns:
        None under 20 documents, where it would say more about chance than about the data.
    """
    if within.documents < MINIMUM_DOCUMENTS or not within.tokens:
        return None
    share_in_bucket = within.tokens / bucket.tokens
    share = group.tokens / total.tokens
    variance = (
        1 / within.documents - 1 / bucket.documents + 1 / group.documents - 1 / total.documents
    )
    half_width = Z_95 / math.log(2) * math.sqrt(max(0.0, variance))
    return Enrichment(math.log2(share_in_bucket / share), half_width)
