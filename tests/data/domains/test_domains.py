"""The fit of domains and the attribute: planted topics are found, named, and kept."""

import json
from collections import Counter

import numpy as np
import pytest
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from tests.data.normalized import rows_of, write_source, write_sources
from tests.data.topics import TOPICS, topic_of, topic_texts

from portolan.curation_settings import DomainSettings, EmbeddingSettings
from portolan.data.domains.attribute import (
    DomainFit,
    assign_domains,
    check_sizes,
    fit_domains,
    training_rows,
)
from portolan.data.domains.coherence import coherence, make_trials
from portolan.data.domains.labels import keywords, label_domains, sampled_texts
from portolan.data.embedding.attribute import SampleVectors, embed_sources
from portolan.data.embedding.sampling import draw_sample
from portolan.data.engine import Engine
from portolan.errors import UsageError

EMBEDDING = EmbeddingSettings(dimension=64)
DOMAINS = DomainSettings(count=3, fine=12)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    corpus = tmp_path_factory.mktemp("project") / "corpus"
    texts = {
        "mixed": [*topic_texts({"sea": 70, "kitchen": 30}), "..."],
        "other": topic_texts({"kitchen": 50, "court": 60}, seed=1),
    }
    sources = write_sources(corpus, texts)
    sample = draw_sample(Engine(), sources, [], EMBEDDING, corpus)
    embeddings = embed_sources(Engine(), sources, sample, EMBEDDING, corpus)
    fit = fit_domains(Engine(), sample, embeddings, DOMAINS, corpus)
    domains = assign_domains(Engine(), sources, embeddings, fit, corpus)
    return corpus, sources, sample, embeddings, fit, domains


def test_planted_topics_are_found_and_named(built):
    corpus, _, sample, _, fit, domains = built
    texts = {r["id"]: r["text"] for part in sample.sources.values() for r in rows_of(part)}
    rows = [row for dataset in domains.values() for row in rows_of(dataset)]
    pairs = Counter(
        (topic_of(texts[r["id"]]), r["domain"]) for r in rows if len(texts[r["id"]]) > 3
    )
    assert len(pairs) == 3 and sum(pairs.values()) == 210
    (empty,) = [row for row in rows if texts[row["id"]] == "..."]
    assert empty["similarity"] == 0
    assert min(r["similarity"] for r in rows if r is not empty) > 0.5
    by_domain = {domain: topic for topic, domain in pairs}
    for label in label_domains(sample, fit, corpus):
        assert set(label.keywords[:5]) <= set(TOPICS[by_domain[label.domain]].split())
        assert label.label == ", ".join(label.keywords[:3]) and label.source == "keywords"
    assert fit.statistics["without_direction"] == 1
    assert sum(fit.statistics["shares"]) == pytest.approx(1)


def test_the_fit_does_not_depend_on_shards(built, tmp_path):
    _, sources, sample, _, fit, _ = built
    texts = {}
    for key, part in sample.sources.items():
        texts[key] = [row["text"] for row in rows_of(part)][::-1]
    corpus = tmp_path / "corpus"
    other = [write_source(corpus, source.key, texts[source.key], 3) for source in sources[::-1]]
    again = draw_sample(Engine(), other, [], EMBEDDING, corpus)
    embeddings = embed_sources(Engine(), other, again, EMBEDDING, corpus)
    found = fit_domains(Engine(), again, embeddings, DOMAINS, corpus)
    assert [s["digest"] for s in found.manifest["shards"]] == [
        s["digest"] for s in fit.manifest["shards"]
    ]


def test_names_given_by_hand(built):
    corpus, _, sample, _, fit, _ = built
    path = corpus.parent / "names.json"

    def name(fit_key, **labels):
        path.write_text(json.dumps({"fit": fit_key, "labels": labels}))
        return label_domains(sample, fit, corpus, labels_file=path)

    labels = name(fit.key, **{"1": {"label": "the sea", "author": "me", "date": "2026-01-01"}})
    assert (labels[1].label, labels[1].source, labels[1].author) == ("the sea", "human", "me")
    assert labels[0].source == "keywords" and labels[1].keywords
    for arguments, message in [
        (("0" * 16, {}), "this corpus has fit"),
        ((fit.key, {"3": {"label": "x"}}), "no domain '3'"),
        ((fit.key, {"1": {"name": "x"}}), "labels.1"),
    ]:
        with pytest.raises(UsageError, match=message):
            name(arguments[0], **arguments[1])
    with pytest.raises(UsageError, match="nowhere"):
        label_domains(sample, fit, corpus, labels_file=corpus / "nowhere.json")


def test_keywords_are_a_domains_own():
    texts = {0: ["the sea the ship"] * 4, 1: ["the bread the oven"] * 4, 2: ["the x1 ab the"] * 4}
    found = keywords(texts, 3)
    assert found == {0: ["sea", "ship"], 1: ["bread", "oven"], 2: []}


def test_words_of_grammar_name_no_domain():
    """Prose says them up to 30 times as often as code, but most code has one somewhere."""
    grammar = sorted(word for word in ENGLISH_STOP_WORDS if word.isalpha() and len(word) > 2)
    random = np.random.default_rng(0)

    def text(topic, times, share):
        said = random.choice(grammar, int(share * len(grammar)), replace=False)
        return " ".join([*np.repeat(said, times), *random.choice(topic.split(), 9)])

    prose, code, numbers = TOPICS["sea"], TOPICS["kitchen"], TOPICS["court"]
    texts = {
        0: [text(prose, 30, 0.95) for _ in range(60)],
        1: [text(code, 1, 0.5) for _ in range(60)],
        2: [text(numbers, 2, 0.3) for _ in range(60)],
    }
    for domain, topic in enumerate((prose, code, numbers)):
        found = keywords(texts)[domain]
        assert len(found) >= 5 and set(found) <= set(topic.split())
    counts = Counter(word for document in texts[0] for word in document.split())
    assert set(dict(counts.most_common(20))) <= set(grammar), "counting words would choose them"


@pytest.mark.parametrize(
    ("documents", "fields"),
    [(211, {"fine": 14}), (2000, {"count": 8, "fine": 20}), (200, {"count": 40, "fine": 160})],
)
def test_too_small_a_sample_proposes_values_that_do(documents, fields):
    settings = DomainSettings(**{"count": 3, **fields})
    with pytest.raises(UsageError) as caught:
        check_sizes(documents, settings)
    pairs = dict(part.removeprefix("data.domains.").split(" = ") for part in
                 caught.value.remedy.removeprefix("set ").split(" and "))  # fmt: skip
    proposed = {name: int(value) for name, value in pairs.items()}
    assert check_sizes(documents, settings.model_copy(update=proposed)) == proposed["count"]


def test_impossible_settings_are_refused():
    with pytest.raises(UsageError, match="more than all"):
        check_sizes(10_000, DomainSettings(count=20, fine=80, minimum_share=0.1))
    with pytest.raises(UsageError, match="count is not set"):
        check_sizes(10_000, DomainSettings())
    with pytest.raises(UsageError, match="leave data"):
        check_sizes(20, DomainSettings(count=2, fine=8))


def test_training_rows_take_one_of_each_source():
    vectors = SampleVectors(
        ["a"] * 50 + ["b"] * 30 + ["c"], [str(i) for i in range(81)], np.ones((81, 4), np.int8)
    )
    rows = training_rows(vectors, 20, 43)
    assert Counter(vectors.sources[row] for row in rows) == {"a": 12, "b": 7, "c": 1}
    assert (np.diff(rows) > 0).all()
    assert len(training_rows(vectors, 81, 43)) == 81


def test_intruders_are_found_among_planted_topics(built):
    _, _, sample, _, fit, _ = built
    texts = sampled_texts(sample, fit)
    trials = make_trials(texts, {d: len(t) for d, t in texts.items()}, num_trials=40)
    assert coherence(trials) > 0.9
    assert coherence(trials, lambda texts: 0) < 0.5
    assert make_trials({0: ["a"]}, {0: 1}, num_trials=3) == []
    assert coherence([]) is None


def test_a_fit_is_opened_from_its_folder(built):
    fit = built[4]
    assert DomainFit(fit.folder, fit.manifest).num_domains == 3
