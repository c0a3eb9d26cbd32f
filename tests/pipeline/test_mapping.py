"""The verb `map` on a corpus with domains, quality, near-duplicates and a leaked test item."""

import csv
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from portolan.data.store import TokenStore
from portolan.errors import UsageError
from portolan.files import read_json
from portolan.pipeline.curation import Place, build_corpus
from portolan.pipeline.mapping import make_map
from portolan.project import create_project, open_project
from portolan.report.data_map.gather import read_map, read_strata
from portolan.report.data_map.review import COLUMNS

TOPICS = (
    "harbour anchor sail keel mast rudder compass tide current chart island reef vessel".split(),
    "enzyme protein tissue membrane nucleus ribosome bacteria culture sample reagent assay".split(),
)
COMMON = "the of and to that have with".split()
ITEM = "which instrument shows the heading of a ship when neither stars nor coast can be seen"
HOSTILE = "<script>window.hacked=1</script>"
RECIPE = """\
name = "mapped"
seed = 0
[data]
heldout_bytes_per_domain = 4_000
heldout_documents_per_domain = 8
[[data.sources]]
key = "port"
kind = "text"
path = "{folder}/port"
license_spdx = "CC0-1.0"
[[data.sources]]
key = "lab/notes"
kind = "text"
path = "{folder}/lab"
license_spdx = "MIT"
[[data.decontamination.sets]]
name = "quiz"
path = "{folder}/quiz.jsonl"
[data.domains]
count = 2
fine = 8
[data.quality]
labeller = "heuristic"
[tokenizer]
vocab_size = 320
sample_bytes = 60_000
[model]
family = "micro"
width = 96
overrides = {{ sequence_length = 64, window = 32, num_experts = 8 }}
[budget]
tokens_per_active_param = 0.26
batch_policy = "fixed"
batch_sequences = 16
[ladder]
widths = [48, 64, 80]
[optimizer]
hyperball_scope = "per_expert"
newton_schulz_dtype = "float32"
[train]
[evaluation]
"""


def document(rng: random.Random, topic: int, faults: int) -> str:
    """Twelve lines about a topic; each fault fails one more check of the heuristic labeller."""
    words = TOPICS[topic] if faults else [*TOPICS[topic], *COMMON]
    lines = [" ".join(rng.choice(words) for _ in range(9)) for _ in range(12)]
    if faults > 1:
        lines = [line for line in lines[:6] for _ in range(2)]
    if faults > 2:
        lines = [line + "..." for line in lines]
    if faults > 3:
        lines = ["- " + line for line in lines]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curated project with its pages."""
    folder, rng = tmp_path_factory.mktemp("mapped"), random.Random(0)
    for topic, name in enumerate(("port", "lab")):
        (folder / name).mkdir()
        for number in range(110):
            text = document(rng, topic, number % 5)
            (folder / name / f"{number:03d}.txt").write_text(text)
            if number == 50:
                longer = text + " ".join(rng.choice(TOPICS[topic]) for _ in range(12))
                (folder / name / "longer.txt").write_text(longer)
    leaked = f"{HOSTILE} {document(rng, 0, 0)}\n{ITEM}\n"
    (folder / "port" / "leaked.txt").write_text(leaked)
    (folder / "quiz.jsonl").write_text(json.dumps({"question": ITEM}) + "\n")
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    create_project(folder / "project", str(folder / "recipe.toml"), exist_ok=False)
    project = open_project(folder / "project")
    build_corpus(project, Place(workers=1))
    make_map(project)
    return folder / "project"


@pytest.fixture(scope="module")
def facts(mapped: Path) -> Any:
    return read_map(mapped, "mapped")


def test_pages_are_written_and_linked(mapped):
    assert {path.name for path in (mapped / "site" / "map").glob("*.html")} == {
        "index.html", "domains.html", "pairs.html", "decontamination.html", "mixture.html",
        "provenance.html", "stages.html",
    }  # fmt: skip
    assert 'href="map/index.html"' in (mapped / "site" / "index.html").read_text()
    for path in (mapped / "site" / "map").glob("*.html"):
        assert HOSTILE not in path.read_text()


def test_the_overview_counts_what_the_store_holds(mapped, facts):
    overview, summary = facts.overview, read_json(mapped / "corpus" / "summary.json")
    store = TokenStore(mapped / summary["store"]["path"])
    assert overview.total == (summary["store"]["documents"], summary["store"]["tokens"])
    assert overview.store_digest == store.digest
    assert overview.num_buckets == 5 and len(overview.domains) == 2
    by_cell = {f"{d}q{b}": count.tokens for (d, b), count in overview.cells.items()}
    assert by_cell == store.tokens_by_cell
    for groups in (overview.by_source, overview.by_type):
        for bucket in range(5):
            rows = [row[bucket] for row in groups.values()]
            assert tuple(map(sum, zip(*rows, strict=True))) == overview.by_bucket[bucket]
    assert set(overview.by_source) == {"port", "lab/notes"}
    assert set(overview.cuts) >= {"default"} and all(
        len(cuts) == 4 for cuts in overview.cuts.values()
    )


def test_domains_have_the_words_of_their_topic(facts):
    found = {
        next(i for i, topic in enumerate(TOPICS) if set(topic) & set(domain.keywords))
        for domain in facts.overview.domains
    }
    assert found == {0, 1}
    for domain in facts.overview.domains:
        examples = [e for b in range(5) for e in facts.overview.examples.get((domain.name, b), ())]
        assert examples and all(e.text and e.source in ("port", "lab/notes") for e in examples)


def test_evidence_names_the_planted_duplicates_and_the_leaked_item(facts):
    pairs = {(row.removed_source, row.kept_source): row for row in facts.pairs.rows}
    for source in ("port", "lab/notes"):
        row = pairs[source, source]
        assert row.containment == 1.0 and row.chars_kept > row.chars_removed
        assert row.segments[-1][0] == "" and row.segments[-1][1].strip()
    assert facts.pairs.num_evidence == len(facts.pairs.rows)
    found = facts.contamination
    assert found.flags["port", "quiz"] == 1 and found.flagged["port"] >= 1
    (match,) = [match for match in found.matches if match.evaluation_set == "quiz"]
    assert ITEM in match.matched and match.source == "port"
    assert {one.name for one in found.sets} == {"heldout", "quiz"}
    assert all(items >= hits >= 0 for _, items, hits in found.recall)


def test_stages_add_up_and_come_after_what_they_read(facts):
    assert all(flow.is_complete for flow in facts.flows)
    place = {stage.key: i for i, stage in enumerate(facts.stages)}
    names = [stage.name for stage in facts.stages]
    for stage in facts.stages:
        assert all(place[key] < place[stage.key] for key in stage.inputs if key in place)
    assert names[-1] == "store" and {"normalise", "contaminated", "fuzzy_dup", "domain"} <= set(
        names
    )
    train = next(stage for stage in facts.stages if stage.name == "train")
    assert train.rows_out == sum(flow.kept for flow in facts.flows)
    assert train.rows_in == sum(
        stage.rows_out for stage in facts.stages if stage.name == "normalise"
    )


def test_the_time_of_every_step_is_kept_outside_the_corpus(mapped, facts):
    steps = {step.name: step for step in facts.steps}
    assert {"normalise port", "dedup", "near-duplicates", "domains", "quality"} <= set(steps)
    assert steps["normalise port"].documents == 112 and steps["dedup"].seconds > 0


def test_labels_give_precision_by_source_pair(cli, mapped, facts, tmp_path):
    path = tmp_path / "labels.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for key in (facts.pairs.evidence_key, "0" * 16):
            for row in facts.pairs.rows:
                writer.writerow([key, row.removed_source, row.removed_id, row.kept_source,
                                 row.kept_id, row.containment, "correct"])  # fmt: skip
    done = cli("-C", mapped, "map", "--labels", path)
    assert (done.code, done.err) == (0, "")
    assert f"{len(facts.pairs.rows)} labels belong to other evidence" in done.out
    assert re.search(r"port -> port: precision 1\.000 \[0\.\d+, 1\.000\]", done.out)
    assert "all evidence: precision 1.000, judged for 100.0% of the pairs" in done.out
    assert sum(read_strata(mapped)[1].values()) == len(facts.pairs.rows)


def test_a_damaged_corpus_leaves_the_report_as_it_is(cli, mapped, tmp_path):
    project = shutil.copytree(mapped, tmp_path / "project")
    summary = read_json(project / "corpus" / "summary.json")
    for path in (project / summary["store"]["path"]).rglob("*.arrow"):
        path.write_bytes(b"")
    done = cli("-C", project, "report")
    assert (done.code, done.err) == (0, "")
    assert "the data map is left as it was" in done.out and "page: " in done.out


def test_a_project_without_a_corpus_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no curated corpus"):
        read_map(tmp_path, "empty")
