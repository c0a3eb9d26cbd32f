"""Recall by injection: items of the sets, planted in four layouts, and how many are flagged."""

import itertools
from collections.abc import Callable, Sequence

import pyarrow as pa

from portolan.curation_settings import DecontaminationSettings
from portolan.data.decontamination.features import WINDOW_TOKENS, Laid, fold_text, paragraphs
from portolan.data.decontamination.hits import scan
from portolan.data.decontamination.index import EvaluationIndex
from portolan.data.decontamination.registry import Registry
from portolan.data.decontamination.rules import Hits, judge
from portolan.data.engine.streams import group_tables
from portolan.data.ngrams import hash_strings

MAX_ITEMS = 300
LINE_WORDS = 8


def _filler(count: int) -> str:
    """Words that no test item holds."""
    return " ".join(f"filler{number}" for number in range(count))


def _verbatim(words: Sequence[str]) -> str:
    return " ".join(words)


def _own_paragraph(words: Sequence[str]) -> str:
    return f"{_filler(len(words))}\n{' '.join(words)}\n{_filler(len(words))}"


def _lines(words: Sequence[str]) -> str:
    begins = range(0, len(words), LINE_WORDS)
    return "\n".join(" ".join(words[begin : begin + LINE_WORDS]) for begin in begins)


def _embedded(words: Sequence[str]) -> str:
    return f"{_filler((len(words) + 1) // 2)} {' '.join(words)} {_filler(len(words) // 2)}"


LAYOUTS: dict[str, Callable[[Sequence[str]], str]] = {
    "verbatim": _verbatim,
    "own paragraph": _own_paragraph,
    f"lines of {LINE_WORDS} words": _lines,
    "embedded in equal filler": _embedded,
}


def flag_texts(
    texts: Sequence[str], index: EvaluationIndex, settings: DecontaminationSettings
) -> list[bool]:
    """Whether each text would be flagged, without the frequency filters."""
    laid = Laid.of([paragraphs(text, settings.fold) for text in texts])
    ids = [f"{place:08d}" for place in range(len(texts))]
    flagged = dict.fromkeys(ids, False)
    for name, tables in group_tables([scan(laid, ids, index, settings.ngram_hash)], "id"):
        flagged[name] = bool(judge(Hits.of(pa.concat_tables(tables)))[0])
    return list(flagged.values())


def injection_recall(
    registry: Registry, index: EvaluationIndex, settings: DecontaminationSettings
) -> dict[str, dict[str, int]]:
    """Items injected and found, by layout: at most 300 passages, those of the smallest hashes."""
    passages = [
        text
        for found in registry.sets
        for item in found.items()
        for text in item.passages
        if len(fold_text(text, settings.fold).split()) >= WINDOW_TOKENS
    ]
    ranks = hash_strings(passages).tolist() if passages else []
    chosen = [text for _, text in sorted(zip(ranks, passages, strict=True))]
    words = [text.split() for text in itertools.islice(dict.fromkeys(chosen), MAX_ITEMS)]
    report = {}
    for name, layout in LAYOUTS.items():
        flagged = flag_texts([layout(item) for item in words], index, settings)
        report[name] = {"items": len(words), "found": sum(flagged)}
    return report
