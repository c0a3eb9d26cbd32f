"""A made-up corpus of the public grid's size: 40 domains by 5 buckets, with every page filled."""

import csv
import random
from pathlib import Path
from typing import Any

from portolan.report.data_map.differences import align
from portolan.report.data_map.facts import (
    Contamination,
    Count,
    DataMap,
    Domain,
    EvaluationSetFacts,
    Example,
    Match,
    Overview,
    Pair,
    Pairs,
    SourceFlow,
    StageFacts,
    StepTime,
    containment_bin,
)

LABELS = {
    0: "geopolitics and world news",
    1: "consumer health",
    14: "software development and web code",
    26: "council and board meeting records",
    28: "performance logs and low-level code",
    30: "natural sciences",
    32: "software infrastructure and security",
    39: "mathematics",
}
SYLLABLES = "ka lo mi tre va son du pel ori gan ser tu bel fin mar que sto ril".split()
SOURCES = ("code/files", "papers", "web-crawl", "forum", "manuals", "encyclopedia")
TYPES = ("prose", "code", "math", "structured")
HOSTILE = "</script><script>window.hacked=1</script>"
GIGA = 10**9


def word(rng: random.Random) -> str:
    """A made-up word."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def sentence(rng: random.Random, length: int) -> str:
    """Made-up words with a full stop."""
    return " ".join(word(rng) for _ in range(length)).capitalize() + "."


def read_cells(path: Path) -> dict[tuple[str, int], int]:
    """Tokens by (domain, bucket) of the public grid."""
    with path.open(newline="") as file:
        return {
            (f"c{row['domain']}", b): round(float(row[f"q{b}"]) * GIGA)
            for row in csv.DictReader(file)
            for b in range(5)
        }


def make_overview(cells_csv: Path) -> Overview:
    """The public grid with made-up words; one domain is planted: only it speaks of telescopes."""
    rng = random.Random(0)
    tokens = read_cells(cells_csv)
    cells = {place: Count(max(1, number // 900), number) for place, number in tokens.items()}
    domains, examples = [], {}
    for i in range(40):
        keywords = tuple(word(rng) for _ in range(10))
        label = LABELS.get(i, ", ".join(keywords[:3]))
        if i == 30:
            keywords = ("telescope", *keywords[1:])
        name = f"c{i:02d}"
        domains.append(Domain(name, label, keywords, "imported" if i in LABELS else "keywords"))
        for b in range(5):
            texts = [" ".join(sentence(rng, 9) for _ in range(7))[:440] for _ in range(4)]
            if (i, b) == (0, 0):
                texts[0] = f"{HOSTILE} said the page."
            examples[name, b] = tuple(
                Example(rng.choice(SOURCES), f"{rng.getrandbits(128):032x}", text, True)
                for text in texts
            )
    buckets = [sum((cells[f"c{i:02d}", b] for i in range(40)), Count()) for b in range(5)]
    shares = [(0.35, 0.3, 0.2, 0.1, 0.04, 0.01), (0.05, 0.1, 0.4, 0.2, 0.15, 0.1)]
    by_source = {
        source: tuple(
            scaled(bucket, shares[0][s] * (4 - b) / 4 + shares[1][s] * b / 4)
            for b, bucket in enumerate(buckets)
        )
        for s, source in enumerate(SOURCES)
    }
    by_type = {
        kind: tuple(scaled(bucket, (0.5, 0.3, 0.15, 0.05)[t]) for bucket in buckets)
        for t, kind in enumerate(TYPES)
    }
    return Overview(
        domains=tuple(domains),
        num_buckets=5,
        cells=cells,
        by_source=by_source,
        by_type=by_type,
        by_domain_source={
            (domain.name, source): scaled(
                sum((cells[domain.name, b] for b in range(5)), Count()), s
            )
            for domain in domains
            for source, s in zip(SOURCES, shares[0], strict=True)
        },
        cuts={
            "prose": (0.282, 0.430, 0.608, 0.780),
            "code": (0.282, 0.564, 0.640, 0.747),
            "default": (0.282, 0.460, 0.610, 0.750),
        },
        examples=examples,
        store_digest="5" * 64,
    )


def scaled(count: Count, share: float) -> Count:
    """A share of a count."""
    return Count(int(count.documents * share), int(count.tokens * share))


def make_pairs() -> Pairs:
    """Pairs of three source pairs, of several sizes and containments."""
    rng = random.Random(1)
    rows = []
    for number in range(48):
        removed_source, kept_source = (
            ("forum", "papers"),
            ("papers", "papers"),
            ("web-crawl", HOSTILE),
        )[number % 3]
        text = " ".join(sentence(rng, 10) for _ in range(rng.choice((6, 20, 60, 700))))
        words = text.split()
        changed = rng.sample(range(len(words)), max(1, len(words) // 40))
        removed = " ".join("<b>X</b>" if i in changed else w for i, w in enumerate(words))
        kept = text + "\n\n" + sentence(rng, 30)
        containment = rng.choice((0.981, 0.99, 1.0, 0.93, 0.76))
        rows.append(
            Pair(
                f"{number:032x}",
                removed_source,
                f"{number + 9000:032x}",
                kept_source,
                containment,
                containment - 0.02,
                len(changed),
                len(removed),
                len(kept),
                rng.randint(2, 9),
                number % 16 == 0,
                align(removed, kept),
            )
        )
    strata: dict[tuple[str, str, int], int] = {}
    for row in rows:
        strata[row.stratum] = strata.get(row.stratum, 0) + 7
    assert all(containment_bin(row.containment) == row.stratum[2] for row in rows)
    losses = (
        ("forum", 310, 9_000, False),
        ("papers", 512, 22_000, False),
        ("web-crawl", 90, 400, True),
    )
    return Pairs("0123456789abcdef", tuple(rows), strata, 20, 0.98, 26, 11, "5 words", losses)


def make_contamination() -> Contamination:
    """Two sets, three matches."""
    sets = (
        EvaluationSetFacts("heldout", "", "", 400, 21_000, "required"),
        EvaluationSetFacts("arithmetic-test", "1.1", "MIT", 1_319, 60_412, "required"),
        EvaluationSetFacts("code-to-text", "", "", None, None, "excluded: public code"),
    )
    matches = tuple(
        Match(
            source,
            f"{i:032x}",
            name,
            f"item-{i}",
            rule,
            0.5 + i / 10,
            "the words of the item",
        )
        for i, (source, name, rule) in enumerate(
            [
                ("papers", "heldout", "paragraph"),
                ("forum", "arithmetic-test", "window"),
                (HOSTILE, "heldout", "window"),
            ]
        )
    )
    flags = {
        ("papers", "heldout"): 3,
        ("forum", "arithmetic-test"): 2,
        ("papers", "arithmetic-test"): 1,
    }
    return Contamination(
        "ab" * 8,
        flags,
        {"papers": 4, "forum": 2},
        {"papers": 22_000, "forum": 9_000, "code/files": 40_000},
        sets,
        matches,
        6,
        (
            ("verbatim", 300, 300),
            ("own paragraph", 300, 300),
            ("8-word lines", 300, 299),
            ("embedded", 300, 291),
        ),
    )


def make_mixture(name: str, cells: dict[str, int], *, tilt: float) -> dict[str, Any]:
    """Two phases over the cells; `tilt` moves weight to the high buckets."""
    lattice = 49_152

    def counts(power: float) -> dict[str, int]:
        weights = {c: tokens * (1 + power * int(c[-1])) for c, tokens in cells.items()}
        total = sum(weights.values())
        found = {c: int(w / total * lattice) for c, w in weights.items()}
        found[max(found, key=lambda c: found[c])] += lattice - sum(found.values())
        return found

    phases = [
        {"name": "main", "start_step": 0, "budget_tokens": 15 * 10**12, "counts": counts(tilt)},
        {
            "name": "cooldown",
            "start_step": 312_192,
            "budget_tokens": 375 * 10**10,
            "counts": counts(2 * tilt),
        },
    ]
    return {
        "format": "portolan-mixture",
        "format_version": 1,
        "name": name,
        "cells": cells,
        "phases": phases,
        "lattice": lattice,
        "cap_epochs": 8.0,
        "block_sequences": lattice,
        "sequence_length": 4096,
        "store_digest": "5" * 64,
        "tokenizer_digest": "6" * 64,
        "dropped_cells": [],
        "provenance": {},
    }


def make_map(cells_csv: Path) -> DataMap:
    """Every page of the made-up corpus."""
    overview = make_overview(cells_csv)
    cells = {f"{domain}q{b}": count.tokens for (domain, b), count in overview.cells.items()}
    rows = [
        {
            "key": source,
            "category": "web",
            "upstream": f"example/{source}",
            "subset": "",
            "revision": "a1" * 20,
            "tokens": (6 - i) * 10**11,
            "documents": (6 - i) * 10**6,
            "bytes": (6 - i) * 4 * 10**11,
            "synthetic": i == 3,
            "machine_translated": False,
            "pdf": False,
            "generator": "model" if i == 3 else "",
            "transform": "none",
            "license_raw": "MIT",
            "license_spdx": spdx,
            "license_class": name,
            "license_per_document": "",
            "accept_reason": "",
            "evidence_url": url,
            "retrieved_on": "",
            "evidence_digest": "",
            "row_hash": "c" * 64,
        }
        for i, (source, spdx, name, url) in enumerate(
            zip(
                SOURCES,
                ("MIT", "CC-BY-4.0", "CC0-1.0", "CC-BY-SA-4.0", "NOASSERTION", HOSTILE),
                ("permissive", "permissive", "public-domain", "share-alike", "unknown", "unknown"),
                ("https://example.org/licence", "javascript:alert(1)", "", "", "", ""),
                strict=True,
            )
        )
    ]
    flows = tuple(
        SourceFlow(
            source,
            1_000 * (i + 1),
            {"source_dup": 100, "global_dup": 50 * i, "fuzzy_dup": 60, "heldout": 20},
            20,
            1_000 * (i + 1) - 180 - 50 * i,
            10**9,
        )
        for i, source in enumerate(SOURCES)
    )
    stages = tuple(
        StageFacts(
            name,
            label,
            f"{i:016x}",
            f"corpus/documents/{label}_{i:016x}",
            (f"{i - 1:016x}",) if i else (),
            1_000 if i else None,
            900,
            123_456,
            3,
            i % 2,
            {"source_dup": 100},
            {"max_whitespace": 128, "text": HOSTILE},
        )
        for i, (name, label) in enumerate(
            [("normalise", "papers"), ("dup_doc", "dup_doc"), ("fuzzy_dup", "fuzzy_dup")]
        )
    )
    return DataMap(
        name="sample",
        store_digest="5" * 64,
        overview=overview,
        pairs=make_pairs(),
        contamination=make_contamination(),
        mixtures=(
            make_mixture("proportional", cells, tilt=0.0),
            make_mixture("tilted", cells, tilt=0.3),
        ),
        provenance=tuple(rows),
        flows=flows,
        stages=stages,
        steps=(StepTime("normalise papers", 900, 4_000_000, 1.5),),
    )
