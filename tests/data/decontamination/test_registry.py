"""Evaluation sets: what is registered, found, counted, and refused."""

import json

import pytest
import zstandard

from portolan.curation_settings import DecontaminationSettings, EvaluationSource
from portolan.data.decontamination.index import build_index, open_index
from portolan.data.decontamination.registry import open_registry
from portolan.errors import UsageError

QUESTION = " ".join(f"word{number}" for number in range(20))


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(zstandard.compress(content) if path.suffix == ".zst" else content)


def registry_of(folder, *sets):
    settings = DecontaminationSettings(sets=sets)
    return open_registry(settings, folder), settings


def index_of(folder, *sets):
    registry, settings = registry_of(folder, *sets)
    path, manifest = build_index(registry, settings, folder / "corpus")
    return open_index(str(path)), manifest


def test_items_of_jsonl_and_compressed_files(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"q": QUESTION, "n": 3, "choices": ["yes", "no it is not"]}])
    write_lines(tmp_path / "b.jsonl.zst", [{"text": QUESTION}, {"text": QUESTION}])
    registry, _ = registry_of(
        tmp_path,
        EvaluationSource(name="a", path="a.jsonl", fields=("q", "choices")),
        EvaluationSource(name="b", path="b.jsonl.zst"),
    )
    first, second = registry.sets
    assert [item.passages for item in first.items()] == [(QUESTION, "yes", "no it is not")]
    assert [item.name for item in second.items()] == ["0", "1"]


def test_an_lm_eval_folder_gives_its_documents_and_not_the_answers(tmp_path):
    row = {"doc_id": 0, "doc": {"question": QUESTION, "answer": "B"}, "resps": [["wrong text"]]}
    write_lines(tmp_path / "out" / "model" / "samples_quiz_2026-01-01T00-00-00.jsonl", [row])
    registry, _ = registry_of(tmp_path, EvaluationSource(name="quiz", path="out"))
    (item,) = registry.sets[0].items()
    assert item.passages == (QUESTION, "B")


def test_a_list_of_documents_is_read_too(tmp_path):
    (tmp_path / "docs.json").write_text(json.dumps([{"q": QUESTION}, QUESTION]))
    registry, _ = registry_of(tmp_path, EvaluationSource(name="a", path="docs.json"))
    assert [item.passages for item in registry.sets[0].items()] == [(QUESTION,), (QUESTION,)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "absent.jsonl"}, "nothing at absent.jsonl"),
        ({"sha256": "0" * 64}, "the recipe says 0000"),
        ({"rows": 3}, "has 2 rows, not 3"),
        ({"fields": ("title",)}, "line 1 has no field 'title'"),
        ({"path": "empty.jsonl"}, "no passage that could be found"),
        ({"fields": ("number",)}, "no passage that could be found"),
        ({"path": "broken.jsonl"}, "broken.jsonl"),
    ],
)
def test_a_required_set_that_is_not_what_the_recipe_says_is_refused(tmp_path, fields, message):
    rows = [{"q": QUESTION, "number": "1 2 3"}, {"q": QUESTION, "number": "4"}]
    write_lines(tmp_path / "a.jsonl", rows)
    write_lines(tmp_path / "empty.jsonl", [])
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(UsageError, match=message):
        index_of(tmp_path, EvaluationSource(**{"name": "a", "path": "a.jsonl", **fields}))


def test_two_sets_of_one_name_are_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"q": QUESTION}])
    source = EvaluationSource(name="a", path="a.jsonl")
    with pytest.raises(UsageError, match="registered twice"):
        registry_of(tmp_path, source, source)


def test_exclusion_acts_by_name_whatever_lies_on_disk(tmp_path):
    write_lines(tmp_path / "stale.jsonl", [{"q": QUESTION}])
    write_lines(tmp_path / "other.jsonl", [{"q": f"other {QUESTION}"}])
    index, manifest = index_of(
        tmp_path,
        EvaluationSource(name="stale", path="stale.jsonl", excluded="public text"),
        EvaluationSource(name="gone", path="gone.jsonl", required=False),
        EvaluationSource(name="other", path="other.jsonl"),
    )
    assert {name.split(":")[0] for name in index.items} == {"other"}
    assert manifest["excluded"] == {"stale": "public text"}
    assert manifest["missing"] == ["gone"]
    assert [found["rows"] for found in manifest["sets"]] == [1]


def test_the_index_depends_on_content_and_not_on_where_it_lies(tmp_path):
    keys = []
    for name, text in (("a", QUESTION), ("b", QUESTION), ("c", f"{QUESTION} more")):
        folder = tmp_path / name
        write_lines(folder / f"{name}.jsonl", [{"q": text}])
        keys.append(index_of(folder, EvaluationSource(name="s", path=f"{name}.jsonl"))[1]["key"])
    assert keys[0] == keys[1] != keys[2]
