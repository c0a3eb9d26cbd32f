"""Near-duplicates end to end: planted copies, order, alarm, exemptions, parts and their merges."""

import random

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.normalized import rows_of, write_source, write_sources

from portolan.curation_settings import FuzzySettings, ReviewedLoss
from portolan.data.documents import Stage, document_id, manifest_digest, run_stage, write_shard
from portolan.data.engine import Dataset, Engine, LocalExecutor
from portolan.data.fuzzy.members import Member
from portolan.data.fuzzy.merging import KEYED_SCHEMA, retest
from portolan.data.fuzzy.near_duplicates import FUZZY_SCHEMA, WipeOut, find_near_duplicates
from portolan.data.fuzzy.verdicts import REINSTATED, REMOVED, Verdict, verdict_table

WORDS = [f"w{number}" for number in range(3000)]


def make_text(generator, count=400):
    return " ".join(generator.choices(WORDS, k=count))


def change(generator, text, share):
    return " ".join(
        generator.choice(WORDS) if generator.random() < share else word for word in text.split()
    )


def reviewed(*sources):
    entries = [ReviewedLoss(source=s, reason="copies", reviewer="me", max_loss=1) for s in sources]
    return tuple(entries)


def run(folder, sources, removed=(), workers=1, **fields):
    nodes = fields.pop("max_nodes_in_memory", 10**7)
    with Engine(LocalExecutor(workers)) as engine:
        return find_near_duplicates(
            engine, sources, removed, FuzzySettings(**fields), folder, max_nodes_in_memory=nodes
        )


def removed_ids(found, source):
    return {row["id"] for row in rows_of(found.removed.within(source.replace("/", "~")))}


def test_planted_copies_are_found_and_unrelated_texts_stay(tmp_path):
    generator = random.Random(7)
    originals = [make_text(generator) for _ in range(400)]
    variants = {
        "cut": [" ".join(text.split()[:360]) for text in originals],
        "appended": [f"{text} {make_text(generator, 40)}" for text in originals],
        "changed": [change(generator, text, 0.01) for text in originals],
        "changed more": [change(generator, text, 0.02) for text in originals],
    }
    found = run(
        tmp_path,
        write_sources(tmp_path, {"original": originals, **variants}),
        containment=0.75,
        reviewed_losses=reviewed("original", *variants),
    )
    pairs = {}
    for source in ("original", *variants):
        for row in rows_of(found.evidence(source)):
            pairs[row["removed_id"]] = row["kept_id"]
    links = {frozenset(pair) for pair in pairs.items()}
    for name, texts in variants.items():
        # Pairs are judged by group; each original stands in one group with its variants.
        ids = [(document_id(a), document_id(b)) for a, b in zip(originals, texts, strict=True)]
        gone = sum(bool({a, b} & pairs.keys()) or frozenset((a, b)) in links for a, b in ids)
        assert gone / len(ids) >= 0.95, name
    family = {}
    for name in ("original", *variants):
        for place, text in enumerate(originals if name == "original" else variants[name]):
            family[document_id(text)] = place
    assert all(family[removed] == family[kept] for removed, kept in pairs.items())


def test_recall_of_2_percent_changes_is_the_predicted_one(tmp_path):
    generator = random.Random(8)
    originals = [make_text(generator) for _ in range(600)]
    changed = [change(generator, text, 0.02) for text in originals]
    found = run(
        tmp_path,
        write_sources(tmp_path, {"a": originals, "b": changed}),
        containment=0.75,
        reviewed_losses=reviewed("a", "b"),
    )
    removed = removed_ids(found, "a") | removed_ids(found, "b")
    assert len(removed) / 600 == pytest.approx(0.948, abs=0.04)


def test_evidence_justifies_each_removal(tmp_path):
    generator = random.Random(9)
    long = make_text(generator, 200)
    short = " ".join(long.split()[:190])
    found = run(
        tmp_path,
        write_sources(tmp_path, {"a": [short, make_text(generator)], "a/b": [long, long + " x"]}),
        reviewed_losses=reviewed("a", "a/b"),
    )
    assert removed_ids(found, "a") == {document_id(short)}
    assert removed_ids(found, "a/b") == {document_id(long)}
    (row,) = rows_of(found.evidence("a"))
    assert (row["kept_source"], row["kept_id"]) == ("a/b", document_id(long + " x"))
    assert (row["n_removed"], row["n_shared"], row["containment"]) == (188, 188, 1.0)
    assert row["jaccard"] == 188 / row["n_kept"] and row["n_kept"] == 199
    assert (row["chars_removed"], row["chars_kept"]) == (len(short), len(long) + 2)
    assert (row["component_size"], row["new_words"], row["comparisons"]) == (3, 0, 1)
    assert row["shared_buckets"] > 0 and not row["exempt"] and not row["truncated"]
    assert found.counts["a"]["removed"] == 1 and found.counts["a"]["documents"] == 2


def planted(generator):
    """Texts of which a third are contained in others."""
    originals = [make_text(generator, 60) for _ in range(30)]
    return originals + [" ".join(text.split()[:59]) for text in originals[:15]]


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_order_of_documents_and_sources_changes_nothing(tmp_path_factory, generator):
    texts = planted(random.Random(3))
    expected = None
    for _ in range(2):
        folder = tmp_path_factory.mktemp("corpus")
        sources = write_sources(folder, {"a": texts[:20], "b": texts[20:]})
        generator.shuffle(texts[:20])
        generator.shuffle(sources)
        found = run(folder, sources, reviewed_losses=reviewed("a", "b"))
        digest = manifest_digest(found.removed.folder)
        assert expected in (None, digest)
        expected = digest


def test_workers_and_the_place_of_components_change_no_byte(tmp_path):
    texts = planted(random.Random(4))
    digests = set()
    for workers, nodes in ((1, 10**7), (2, 10**7), (1, 1)):
        folder = tmp_path / f"{workers}-{nodes}"
        sources = write_sources(folder, {"a": texts[:20], "b": texts[20:]})
        options = {"reviewed_losses": reviewed("a", "b"), "max_nodes_in_memory": nodes}
        found = run(folder, sources, workers=workers, **options)
        digests.add((found.key, manifest_digest(found.removed.folder)))
        again = run(folder, sources, **options)
        assert again.skipped and not found.skipped
        assert not (folder / "fuzzy").exists()
    assert len(digests) == 1


def test_every_parameter_changes_the_key_and_a_review_does_not(tmp_path):
    sources = write_sources(tmp_path, {"a": ["one two three four five six"], "b": ["seven"]})
    base = run(tmp_path, sources).key
    changed = [
        {"containment": 0.75},
        {"exempt_sources": ("a",)},
        {"source_rank": ("b",)},
        {"no_new_token": True},
        {"shingle_unit": "char"},
        {"shingle_n": 4},
        {"bands": 20},
        {"rows": 10},
        {"signature": "reference"},
        {"max_part_documents": 99},
        {"max_part_characters": 10**6},
    ]
    keys = [run(tmp_path, sources, **fields).key for fields in changed]
    assert len({base, *keys}) == len(changed) + 1
    assert run(tmp_path, sources, reviewed_losses=reviewed("a")).key == base


def test_a_templated_source_raises_the_alarm_until_it_is_exempt_or_reviewed(tmp_path):
    template = make_text(random.Random(1), 200)
    texts = [f"{template} number {number}" for number in range(40)]
    sources = write_sources(tmp_path, {"forms": texts, "web": [make_text(random.Random(2))]})
    with pytest.raises(WipeOut, match=r"forms: 39 of 40 documents \(97.5%\)"):
        run(tmp_path, sources)
    found = run(tmp_path, sources, exempt_sources=("forms",))
    assert not removed_ids(found, "forms") and found.counts["forms"]["exempt"] == 39
    rows = rows_of(found.evidence("forms"))
    assert len(rows) == 39 and all(row["exempt"] for row in rows)
    assert (
        len(removed_ids(run(tmp_path, sources, reviewed_losses=reviewed("forms")), "forms")) == 39
    )
    tight = (ReviewedLoss(source="forms", reason="r", reviewer="me", max_loss=0.6),)
    with pytest.raises(WipeOut):
        run(tmp_path, sources, reviewed_losses=tight)


def test_ranked_sources_stay_before_longer_documents(tmp_path):
    text = make_text(random.Random(1), 200)
    sources = write_sources(tmp_path, {"derived": [f"{text} end"], "original": [text]})
    options = {"reviewed_losses": reviewed("derived", "original"), "containment": 0.9}
    assert removed_ids(run(tmp_path, sources, **options), "original") == {document_id(text)}
    found = run(tmp_path, sources, source_rank=("original",), **options)
    assert removed_ids(found, "derived") and not removed_ids(found, "original")


def test_texts_without_spaces_and_without_words_are_counted_and_kept(tmp_path):
    unsegmented = ["字" * 100 + str(number) for number in range(3)]
    sources = write_sources(tmp_path, {"a": [*unsegmented, "?!", "x y", "X  y"]})
    found = run(tmp_path, sources)
    assert found.counts["a"]["unsegmented"] == 3 and found.counts["a"]["empty"] == 1
    assert removed_ids(found, "a") == {document_id("x y")}


def test_what_other_steps_removed_takes_no_part(tmp_path):
    text = make_text(random.Random(1), 200)
    source = write_source(tmp_path, "a", [text, f"{text} end", "x y z"])

    def build(folder):
        entries = []
        for name in source.shard_names:
            rows = [
                {"id": row["id"], "fuzzy_dup": True}
                for row in rows_of(Dataset(source.folder, source.manifest))
                if row["text"].endswith("end")
            ]
            table = pa.Table.from_pylist(rows, schema=FUZZY_SCHEMA)
            entries.append(write_shard(folder, f"a/{name}", FUZZY_SCHEMA, [table]))
        return entries, {}

    folder, manifest, _ = run_stage(tmp_path / "attributes", Stage("heldout", 1, {}), build)
    found = run(tmp_path, [source], [Dataset(folder, manifest)])
    assert not removed_ids(found, "a") and found.counts["a"]["documents"] == 2


def near_equal_texts(generator, count):
    """Texts that differ in their last word and in how often they repeat another."""
    begin = generator.choices(WORDS, k=40)
    return [
        " ".join([*begin, *["end"] * generator.randint(1, 6), f"n{number}"])
        for number in range(count)
    ]


@pytest.mark.parametrize("limit", [30, 12])
def test_a_group_verified_in_parts_keeps_one_survivor_and_justifies_each_removal(tmp_path, limit):
    texts = near_equal_texts(random.Random(5), 60)
    sources = write_sources(tmp_path, {"a": texts[:40], "b": texts[40:]})
    options = {"containment": 0.75, "reviewed_losses": reviewed("a", "b")}
    found = run(tmp_path, sources, max_part_documents=limit, **options)
    removed = removed_ids(found, "a") | removed_ids(found, "b")
    rows = [row for key in "ab" for row in rows_of(found.evidence(key))]
    assert {row["removed_id"] for row in rows} == removed and len(rows) == len(removed)
    assert not {row["kept_id"] for row in rows} & removed
    assert any(row["split_level"] > 0 or row["part"] for row in rows)
    by_id = {document_id(text): text.split() for text in texts}
    for row in rows:
        own, kept = (
            {tuple(words[i : i + 3]) for i in range(len(words) - 2)}
            for words in (by_id[row["removed_id"]], by_id[row["kept_id"]])
        )
        assert (len(own & kept), len(own), len(kept)) == (
            row["n_shared"],
            row["n_removed"],
            row["n_kept"],
        )
        assert row["containment"] >= 0.75
    if limit == 30:
        assert len(removed) == 59


def test_a_document_whose_representative_falls_is_tested_again_or_reinstated():
    words = [f"t{number}" for number in range(100)]
    new = " ".join(words[:80])
    held, apart = " ".join(words[:60]), " ".join(words[40:90])
    fallen = member("fallen", " ".join(words[:90]))
    fall = Verdict(REMOVED, "s", "new", len(new), False, kept_text=new, kept_buckets=bytes(16))
    removal = Verdict(REMOVED, "s", "fallen", 9, False, 58, 88, 58, 0, 2, 1)
    rows = [(fallen, fall), (member("held", held), removal), (member("apart", apart), removal)]
    other = (member("other", held), removal._replace(kept_id="stays"))
    table = verdict_table([*rows, other])
    names = pa.array(["s|fallen"] * 3 + ["s|stays"], pa.string())
    table = table.add_column(0, KEYED_SCHEMA.field(0), names)
    (found,) = retest({"containment": "0.9", "no_new_token": False}, iter([table]))
    by_id = {row["id"]: row for row in found.to_pylist()}
    assert by_id["fallen"]["kept_id"] == "new" and by_id["fallen"]["kept_text"] is None
    assert by_id["held"]["kept_id"] == "new" and by_id["held"]["comparisons"] == 2
    assert (by_id["held"]["n_shared"], by_id["held"]["n_kept"]) == (58, 78)
    assert by_id["held"]["shared_buckets"] == 2
    assert by_id["apart"]["status"] == REINSTATED and by_id["apart"]["kept_id"] is None
    assert by_id["other"]["kept_id"] == "stays"


def member(name, text):
    return Member("c", 0, -len(text), "s", name, "c", 4, "", 1, False, bytes(16), text)
