"""Reading what decontamination left: flags, sets, recall by injection, a sample of the evidence."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from portolan.report.data_map.corpus_files import CorpusFiles, StageFolder, readable
from portolan.report.data_map.evidence import sample_strata
from portolan.report.data_map.facts import Contamination, EvaluationSetFacts, Match

INDEX, ITEMS = "eval_index", "items.parquet"
MAX_MATCHES = 400
STRATUM = ("source", "eval_set", "rule")


def read_contamination(corpus: CorpusFiles, stage: StageFolder) -> Contamination:
    """Facts of the page from the stage that flagged documents and from its index."""
    shards = corpus.evidence_of(stage)
    rows, sizes, _ = sample_strata(shards, STRATUM, ("id", "position"), most=MAX_MATCHES)
    flags: Counter[tuple[str, str]] = Counter()
    for path in shards:
        frame = pq.read_table(path, columns=["source", "eval_set", "id"])
        held = set(zip(*(frame[name].to_pylist() for name in frame.column_names), strict=True))
        flags.update((source, name) for source, name, _ in held)
    counts = stage.manifest["counts"]
    return Contamination(
        key=stage.key,
        flags=dict(flags),
        flagged={source: found["contaminated"] for source, found in counts.items()},
        documents={source: found["documents"] for source, found in counts.items()},
        sets=tuple(_sets(corpus)),
        matches=tuple(_match(row) for row in rows),
        num_evidence=sum(sizes.values()),
        recall=tuple(
            (layout, found["items"], found["found"])
            for layout, found in stage.manifest["recall"].items()
        ),
    )


def _match(row: dict[str, Any]) -> Match:
    return Match(
        source=row["source"],
        document=row["id"],
        evaluation_set=row["eval_set"],
        item=row["eval_item"],
        rule=row["rule"],
        score=row["score"],
        matched=readable(row["matched"]),
    )


def _sets(corpus: CorpusFiles) -> Iterator[EvaluationSetFacts]:
    """Sets that were searched for, then those left out with the reason."""
    index = corpus.named(INDEX)
    if index is None:
        return
    windows: Counter[str] = Counter()
    for path in index.shards():
        if path.name == ITEMS:
            table = pq.read_table(path, columns=["set", "windows"])
            for name, number in zip(*(c.to_pylist() for c in table.columns), strict=True):
                windows[name] += number
    for row in index.manifest["sets"]:
        yield EvaluationSetFacts(
            name=row["name"],
            version=row["version"],
            license_spdx=row["license_spdx"],
            rows=row["rows"],
            ngrams=windows[row["name"]],
            state="required" if row["required"] else "searched for",
        )
    for name, reason in index.manifest["excluded"].items():
        yield EvaluationSetFacts(name, "", "", None, None, f"excluded: {reason}")
    for name in index.manifest["missing"]:
        yield EvaluationSetFacts(name, "", "", None, None, "not there")
