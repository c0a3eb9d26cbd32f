"""The corpus of a project as a whole: its summary adds up, and the verb's options are checked."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.pipeline.tiny import write_documents, write_recipe

from portolan.data.documents import document_id
from portolan.data.tokenizer import BoundaryPolicy, DocumentTokenizer
from portolan.errors import PortolanError, UsageError
from portolan.pipeline.corpus import find_corpus
from portolan.pipeline.corpus_summary import check_store, counts_by_source
from portolan.pipeline.curation import Place, build_corpus, choices_of, open_engine
from portolan.project import create_project, open_project

MAP = (
    "data.domains.count=2",
    "data.domains.fine=8",
    "data.domains.minimum_share=0.05",
    "data.quality.labeller=import",
    "data.quality.labels_file=labels.jsonl",
    "data.quality.accept=a test",
)


def write_labels(folder):
    """Labels of all five levels, in proportion to the share of one word."""
    paths = sorted((folder / "documents").rglob("*.txt"))
    texts = sorted((path.read_text() for path in paths), key=lambda text: text.count("loss"))
    labels = [
        {"id": document_id(text), "content_type": "prose", "valid": True, "level": level}
        for index, text in enumerate(dict.fromkeys(texts))
        for level in [1 + 5 * index // len(texts)]
    ]
    lines = "".join(json.dumps(label) + "\n" for label in labels)
    (folder / "project/labels.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with domains and buckets, curated."""
    folder = tmp_path_factory.mktemp("curation")
    write_documents(folder / "documents")
    for number in range(20):  # equal texts of two sources, and near-copies in one
        text = (folder / f"documents/prose/{number:03d}.txt").read_text()
        (folder / f"documents/tables/copy{number:03d}.txt").write_text(text)
        if number < 10:
            (folder / f"documents/tables/near{number:03d}.txt").write_text(f"{text} at the end\n")
    write_recipe(folder / "recipe.toml", folder / "documents")
    create_project(folder / "project", str(folder / "recipe.toml"), exist_ok=False)
    write_labels(folder)
    project = open_project(folder / "project", MAP)
    build_corpus(project, Place(workers=1))
    return project


def test_every_document_and_token_is_accounted_for(project):
    corpus = find_corpus(project)
    summary, store = corpus.summary, corpus.store
    kept = counts_by_source(store)
    for source in summary["sources"]:
        assert source["read"] == source["documents"] + sum(source["dropped"].values())
        assert kept[source["key"]] == (source["documents"], source["tokens"])
        tokens = dict(source["dropped_tokens"])
        assert tokens.keys() == source["dropped_bytes"].keys()
        assert tokens.pop("heldout") == source["heldout_tokens"]
        assert all(tokens.values())
    by_key = {source["key"]: source["dropped"] for source in summary["sources"]}
    assert by_key["tables"]["global_dup"] == 20
    assert by_key["prose"]["fuzzy_dup"] > 0
    cells = summary["cells"]
    assert all(cell["name"][:3] in ("c00", "c01") for cell in cells)
    assert all(cell["name"][3] == "q" for cell in cells)
    for what in ("documents", "tokens", "bytes"):
        assert sum(c[what] for c in cells) == sum(s[what] for s in summary["sources"])
    assert sum(c["tokens"] for c in cells) == summary["store"]["tokens"]
    assert [cell["name"] for cell in cells] == list(store.cells)


def test_removed_tokens_are_those_of_their_texts(project):
    """The count agrees with an encoding of the normalised documents that are not in the store."""
    import pyarrow.parquet as pq

    corpus = find_corpus(project)
    tokenizer = DocumentTokenizer.from_file(corpus.path("tokenizer"), BoundaryPolicy())
    held = {
        span.document_id
        for cells in (corpus.store.cells,)
        for cell in cells.values()
        for span in cell.documents(0, cell.num_tokens)
        if span.source == "prose"
    }
    (folder,) = (project.corpus / "documents").glob("prose_*")
    rows = pq.read_table(folder / "part-00000-of-00001.parquet").to_pylist()
    lost = [row["text"] for row in rows if row["id"] not in held]
    expected = sum(map(len, tokenizer.encode_documents(lost)))
    (source,) = (s for s in corpus.summary["sources"] if s["key"] == "prose")
    assert sum(source["dropped_tokens"].values()) == expected


def test_the_loader_reads_cells_and_names_sources(project):
    from portolan.pipeline.plan import plan_width

    corpus = find_corpus(project)
    rung = plan_width(project.recipe, project.recipe.model.width)
    loader = corpus.loader(rung, 0, rung.tokens, simulate_epochs=False)
    documents = [document for row in loader.show_batch(0) for document in row.documents]
    assert {document.source for document in documents} == {"prose", "tables"}
    epochs = {cell["name"]: float(cell["epochs"]) for cell in corpus.summary["cells"]}
    assert {row.cell for row in loader.show_batch(0)} <= set(epochs)
    for source in corpus.summary["sources"]:
        mean = sum(
            epochs[cell["name"]] * cell["sources"][source["key"]][1]
            for cell in corpus.summary["cells"]
            if source["key"] in cell["sources"]
        )
        assert float(source["epochs"]) == pytest.approx(mean / source["tokens"])


def test_what_a_person_decided_is_in_the_store(project):
    store = find_corpus(project).store
    choices = store.manifest["params"]["choices"]
    assert choices == choices_of(project.recipe.data)
    assert choices["accepted_license_classes"] == ["public-domain", "permissive", "share-alike"]
    exempt = open_project(project.root, (*MAP, 'data.fuzzy.exempt_sources=["prose"]'))
    assert choices_of(exempt.recipe.data)["exempt_sources"] == ["prose"]


def test_a_store_of_another_corpus_is_refused(project):
    corpus = find_corpus(project)
    source = corpus.summary["sources"][0]

    wrong = SimpleNamespace(
        key=source["key"], train_documents=source["documents"] + 1, cell_counts={}
    )
    curated: Any = SimpleNamespace(sources=(wrong,))
    removed = {source["key"]: {"heldout": source["heldout_tokens"]}}
    held = {source["key"]: source["heldout_tokens"]}
    with pytest.raises(PortolanError, match=f"documents of source {source['key']}"):
        check_store(curated, corpus.store, counts_by_source(corpus.store), held, removed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('license_spdx = "CC-BY-NC-SA-4.0"', "is of class 'non-commercial'"),
        ('license_spdx = "CC0-1.0"\nrevision = "sha256:0"', "the content digest of its files is"),
    ],
)
def test_the_verb_refuses_a_source_by_name(tmp_path, cli, change, message):
    write_documents(tmp_path / "documents")
    write_recipe(tmp_path / "recipe.toml", tmp_path / "documents")
    text = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace('license_spdx = "CC0-1.0"', change, 1))
    create_project(tmp_path / "project", str(tmp_path / "recipe.toml"), exist_ok=False)
    result = cli("-C", tmp_path / "project", "curate")
    assert result.code == 2
    assert "source 'prose'" in result.err
    assert message in result.err
    assert not list((tmp_path / "project/corpus").glob("documents/*"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place("dask"), "executor 'dask' is unknown"),
        (Place("local", "ray://here"), "--address ray://here means nothing"),
    ],
)
def test_where_curation_runs(place, message):
    with pytest.raises(UsageError, match=message), open_engine(place):
        pass


def test_the_summary_names_every_stage(project):
    summary = json.loads((project.corpus / "summary.json").read_text())
    names = {
        path.split("/")[2].rsplit("_", 1)[0].split("~")[0] for path in summary["manifests"][:-2]
    }
    assert {"prose", "tables", "dup_doc", "heldout", "contaminated", "fuzzy_dup"} <= names
    assert {"embedding", "domain", "quality", "calibration", "scorer", "train"} <= names
