"""Labels from a chat endpoint and from a table."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.json_server import answering
from tests.data.normalized import rows_of, write_sources
from tests.data.topics import topic_texts

from portolan.curation_settings import EmbeddingSettings, QualitySettings
from portolan.data import endpoint
from portolan.data.embedding.sampling import draw_sample
from portolan.data.engine import Engine
from portolan.data.quality.labelling import label_sample, parse_judgement
from portolan.data.quality.rubric import RUBRIC, RUBRIC_DIGEST
from portolan.errors import UsageError


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT_SECONDS", 0.0)
    corpus = tmp_path / "corpus"
    sources = write_sources(corpus, {"a": topic_texts({"sea": 12}), "b": topic_texts({"court": 4})})
    sample = draw_sample(Engine(), sources, [], EmbeddingSettings(), corpus)
    return corpus, sources, sample


def label(project, settings):
    corpus, sources, sample = project
    categories = {"a": "code", "b": "web"}
    return label_sample(Engine(), sources, sample, categories, settings, corpus)


def answer(content):
    return {"choices": [{"message": {"content": content}}]}


GOOD = '{"content_type": "prose", "valid": true, "level": 4}'


@pytest.mark.parametrize(
    ("content", "level"),
    [
        (GOOD, 4),
        (f"Here it is:\n```json\n{GOOD}\n```", 4),
        ('{"content_type": "code", "valid": false, "level": 5}', 1),
    ],
)
def test_good_answers(content, level):
    assert parse_judgement(content).level == level


@pytest.mark.parametrize(
    "content",
    [
        "",
        "four",
        "{}",
        '{"content_type": "poem", "valid": true, "level": 4}',
        '{"content_type": "prose", "valid": true, "level": 6}',
        '{"content_type": "prose", "valid": true, "level": "4"}',
        '{"content_type": "prose", "valid": true}',
        '{"content_type": "prose", "valid": false}',
        '{"content_type": "prose", "valid": true, "level": 4, "note": ""}',
        '{"content_type": "prose", "valid": 1, "level": 4}',
    ],
)
def test_bad_answers(content):
    with pytest.raises(ValueError, match=r"JSON|: "):
        parse_judgement(content)


def test_the_endpoint_is_asked_once_more_and_failures_are_counted(project):
    tries = {}

    def reply(body, number):
        text = body["messages"][1]["content"]
        tries[text] = tries.get(text, 0) + 1
        if "verdict" in text:
            return answer("I cannot say")
        return answer(GOOD if tries[text] > 1 else '{"level": 3}')

    with answering(reply) as (url, requests):
        settings = QualitySettings(labeller="llm", endpoint=url, model="m", temperature=0.5)
        labels = label(project, settings)
        rows = {key: rows_of(dataset) for key, dataset in labels.items()}
        assert len(requests) == 32 and set(tries.values()) == {2}
        assert label(project, settings)["a"].key == labels["a"].key and len(requests) == 32
        (body, _), *_ = requests
        assert body["temperature"] == 0.5 and body["messages"][0]["content"] == RUBRIC
    assert {(r["level"], r["failure"]) for r in rows["a"]} == {(4, "")}
    assert {(r["level"], r["valid"], r["failure"]) for r in rows["b"]} == {
        (None, None, "no JSON object")
    }
    assert {r["rubric"] for r in rows["a"]} == {RUBRIC_DIGEST} and rows["a"][0]["labeller"] == "m"


def test_model_and_temperature_change_the_key(project):
    keys = set()
    with answering(lambda body, number: answer(GOOD)) as (url, _):
        for fields in ({}, {"model": "n"}, {"temperature": 1.0}):
            settings = QualitySettings(
                **{"labeller": "llm", "model": "m", "endpoint": url} | fields
            )
            keys.add(label(project, settings)["a"].key)
    assert len(keys) == 3
    with pytest.raises(UsageError, match="model is empty"):
        label(project, QualitySettings(labeller="llm", endpoint=url))


def test_a_wrong_endpoint_is_an_error_not_a_label(project):
    with answering(lambda body, number: {"oops": 1}) as (url, _):
        settings = QualitySettings(labeller="llm", endpoint=url, model="m")
        with pytest.raises(Exception, match="no choices"):
            label(project, settings)


def test_the_heuristic_labels_a_part_of_each_source(project):
    labels = label(project, QualitySettings(labeller="heuristic", sample_documents=8))
    rows = {key: rows_of(dataset) for key, dataset in labels.items()}
    assert {key: len(found) for key, found in rows.items()} == {"a": 6, "b": 2}
    assert {r["content_type"] for r in rows["a"]} == {"code"} and rows["b"][0]["windows"] == 0


def test_imported_labels(project):
    corpus, _, sample = project
    ids = [row["id"] for row in rows_of(sample.sources["a"])]
    rows = [
        {"id": name, "content_type": "prose", "valid": True, "level": 3, "labeller": "me"}
        for name in [*ids[:5], "elsewhere"]
    ]
    pq.write_table(pa.Table.from_pylist(rows), corpus.parent / "labels.parquet")
    settings = QualitySettings(labeller="import", labels_file="labels.parquet")
    found = label(project, settings)
    assert [r["id"] for r in rows_of(found["a"])] == sorted(ids[:5]) and not rows_of(found["b"])
    assert rows_of(found["a"])[0]["labeller"] == "me"
    path = corpus.parent / "labels.jsonl"
    settings = settings.model_copy(update={"labels_file": "labels.jsonl"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = label(project, settings)
    assert rows_of(again["a"]) == rows_of(found["a"]) and again["a"].key != found["a"].key
    for line, message in [
        ('{"id": "x"}', "row 1 has no 'content_type'"),
        (json.dumps({**rows[0], "level": 9}), "row 1: level"),
        ("{", "not readable"),
    ]:
        path.write_text(line)
        with pytest.raises(UsageError, match=message):
            label(project, settings)
    with pytest.raises(UsageError, match="is no file"):
        label(project, QualitySettings(labeller="import"))
