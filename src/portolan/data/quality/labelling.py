"""Labels of sampled documents: from rules, from a table, or from a chat endpoint."""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pydantic

from portolan.curation_settings import QualitySettings
from portolan.data.dedup import NormalizedSource, in_key_order
from portolan.data.documents import Stage
from portolan.data.embedding.sampling import (
    RankTask,
    Sample,
    documents_of,
    highest_ranks,
    is_taken,
    share_out,
)
from portolan.data.endpoint import Endpoint
from portolan.data.engine import Dataset, Engine, map_shards
from portolan.data.quality import heuristics
from portolan.data.quality.features import WINDOW_CHARACTERS, windows_of
from portolan.data.quality.rubric import LABEL_SCHEMA, RUBRIC, RUBRIC_DIGEST, Judgement
from portolan.errors import UsageError
from portolan.files import sha256_file

VERSION = 1
REQUESTS_AT_ONCE = 8
ASKED_TWICE = 2
IMPORTED = "import"
_GAP = "\n\n[...]\n\n"


class Label(NamedTuple):
    """A judgement of a document, or why there is none."""

    id: str
    judgement: Judgement | None
    windows: int
    failure: str = ""


def label_table(labels: Iterable[Label], labeller: str, rubric: str = RUBRIC_DIGEST) -> pa.Table:
    """Labels as a table, in their order."""
    rows = [
        {
            "id": label.id,
            "content_type": label.judgement and label.judgement.content_type,
            "valid": label.judgement and label.judgement.valid,
            "level": label.judgement and label.judgement.level,
            "labeller": labeller,
            "rubric": rubric,
            "windows": label.windows,
            "failure": label.failure,
        }
        for label in labels
    ]
    return pa.Table.from_pylist(rows, schema=LABEL_SCHEMA)


def label_by_rules(params: Mapping[str, Any], documents: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Labels of the heuristic labeller for the documents of a sample that `params` choose."""
    for table in documents:
        chosen = table.filter(is_taken(table["id"].to_pylist(), params))
        judged = (
            Label(name, heuristics.judge(text, params["category"]), 0)
            for name, text in _documents(chosen)
        )
        yield label_table(judged, params["labeller"])


def label_by_endpoint(
    params: Mapping[str, Any], documents: Iterator[pa.Table], *, settings: QualitySettings
) -> Iterator[pa.Table]:
    """Labels of a chat endpoint for the documents of a sample that `params` choose."""
    endpoint = Endpoint(settings.endpoint, settings.key_variable)
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for table in documents:
            chosen = table.filter(is_taken(table["id"].to_pylist(), params))
            ask = functools.partial(ask_endpoint, endpoint, settings)
            yield label_table(pool.map(ask, _documents(chosen)), params["labeller"])


def _documents(table: pa.Table) -> list[tuple[str, str]]:
    return list(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


def ask_endpoint(endpoint: Endpoint, settings: QualitySettings, document: tuple[str, str]) -> Label:
    """Ask for one label. An answer that does not fit the rubric is asked for once more."""
    name, text = document
    windows, problem = windows_of(text), ""
    body = {
        "model": settings.model,
        "temperature": settings.temperature,
        "messages": [
            {"role": "system", "content": RUBRIC},
            {"role": "user", "content": _GAP.join(windows)},
        ],
    }
    for _ in range(ASKED_TWICE):
        answer = endpoint.post(body)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise endpoint.refused("holds no choices[0].message.content") from error
        try:
            return Label(name, parse_judgement(content), len(windows))
        except ValueError as error:
            problem = str(error)
    return Label(name, None, len(windows), problem)


def parse_judgement(content: str) -> Judgement:
    """The JSON object in an answer, checked against the rubric.

    Raises:
        ValueError: there is none, or it does not fit.
    """
    begin, end = content.find("{"), content.rfind("}")
    if begin < 0 or end < begin:
        raise ValueError("no JSON object")
    try:
        return Judgement.model_validate_json(content[begin : end + 1])
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "answer"
        raise ValueError(f"{place}: {first['msg']}") from error


@functools.lru_cache(maxsize=1)
def read_labels(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a label table (Parquet, or jsonl) by id.

    Raises:
        UsageError: the file is not readable, or a row does not fit the rubric.
    """
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        else:
            with path.open(encoding="utf-8") as file:
                rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _bad_labels(path, f"is not readable: {error}") from error
    found: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        try:
            fields = {name: row[name] for name in ("content_type", "valid", "level")}
            judgement = Judgement.model_validate(fields)
            if found.setdefault(str(row["id"]), {**row, "judgement": judgement})["id"] != row["id"]:
                continue
        except (KeyError, TypeError) as error:
            raise _bad_labels(path, f"row {number} has no {error}") from error
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise _bad_labels(path, f"row {number}: {place}: {first['msg']}") from error
    return found


def _bad_labels(path: Path, problem: str) -> UsageError:
    return UsageError(
        f"data.quality.labels_file {path} {problem}",
        remedy="give a Parquet or jsonl table with the columns id, content_type, valid and level",
    )


def label_by_import(
    params: Mapping[str, Any], documents: Iterator[pa.Table], *, path: Path
) -> Iterator[pa.Table]:
    """Labels of a table for those of its documents that are here; `params` hold its digest."""
    known = read_labels(path)
    for table in documents:
        rows = [known[name] for name in table["id"].to_pylist() if name in known]
        for row in rows:
            label = Label(row["id"], row["judgement"], int(row.get("windows") or 0))
            labeller = str(row.get("labeller") or params["labeller"])
            yield label_table([label], labeller, str(row.get("rubric") or ""))


def label_sample(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    sample: Sample,
    categories: Mapping[str, str],
    settings: QualitySettings,
    corpus: Path,
) -> dict[str, Dataset]:
    """Labels of a part of the sample, source by source, co-partitioned with the documents.

    Each source gives documents in proportion to its part of the sample, those with the smallest
    XXH3-64 of `seed:source:id`. An imported table labels whatever documents it names.

    Raises:
        UsageError: a setting of the labeller is missing, or its table is not usable.
    """
    if settings.labeller == "import":
        return _import_labels(engine, sources, settings, corpus)
    tasks = [RankTask(shard, key) for key, part in sample.sources.items() for shard in part.shards]
    highest = highest_ranks(engine, tasks, settings.sample_documents, settings.seed, _label_quotas)
    labels: dict[str, Dataset] = {}
    for key, highest_rank in highest.items():
        params: dict[str, Any] = {
            "source": key,
            "seed": settings.seed,
            "highest_rank": highest_rank,
            "rubric": RUBRIC_DIGEST,
        }
        if settings.labeller == "llm":
            if not settings.model:
                raise UsageError(
                    'data.quality.labeller is "llm", but data.quality.model is empty',
                    remedy="name the model that data.quality.endpoint serves",
                )
            params |= {
                "labeller": settings.model,
                "temperature": settings.temperature,
                "window_characters": WINDOW_CHARACTERS,
            }
            function = functools.partial(label_by_endpoint, settings=settings)
        else:
            params |= {"labeller": heuristics.NAME, "category": categories[key]}
            function = label_by_rules
        part = sample.sources[key]
        stage = Stage("labels", VERSION, params, (part.key,), f"labels/{key}")
        labels[key] = map_shards(
            engine, corpus / "attributes", stage, function, [part], LABEL_SCHEMA
        )
    return labels


def _label_quotas(documents: Mapping[str, int], total: int) -> dict[str, int]:
    if sum(documents.values()) <= total:
        return dict(documents)
    return share_out(documents, total)


def _import_labels(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    settings: QualitySettings,
    corpus: Path,
) -> dict[str, Dataset]:
    path = corpus.parent / settings.labels_file
    if not settings.labels_file or not path.is_file():
        raise _bad_labels(path, "is no file")
    read_labels.cache_clear()
    params = {"labeller": IMPORTED, "sha256": sha256_file(path)}
    function = functools.partial(label_by_import, path=path.absolute())
    labels: dict[str, Dataset] = {}
    for source in in_key_order(sources):
        stage = Stage("labels", VERSION, params, (source.stage_key,), f"labels/{source.key}")
        labels[source.key] = map_shards(
            engine, corpus / "attributes", stage, function, [documents_of(source)], LABEL_SCHEMA
        )
    return labels
