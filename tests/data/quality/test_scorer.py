"""The scorer: ridge against a direct solution, gates, scores in any batch, buckets."""

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse, stats
from tests.data.normalized import rows_of, write_sources
from tests.data.topics import write_text

from portolan.curation_settings import EmbeddingSettings, QualitySettings
from portolan.data.embedding.attribute import codes_of, embed_sources
from portolan.data.embedding.sampling import draw_sample
from portolan.data.engine import Dataset, Engine
from portolan.data.quality.buckets import bucket_sources, calibrate, summarize_sources
from portolan.data.quality.calibration import Curve
from portolan.data.quality.features import count_words, windows_of
from portolan.data.quality.gates import SourceScores, auc, check_scorer, spearman
from portolan.data.quality.labelling import label_sample
from portolan.data.quality.ridge import PENALTIES, cross_validate, solve_ridge
from portolan.data.quality.scorer import fit_scorer, load_scorer, score_sources
from portolan.errors import UsageError


def leveled_texts(topic, count, seed):
    """Texts of levels 1 to 5: the lower, the more words of rubbish."""
    rng, texts = random.Random(seed), {}
    for i in range(count):
        level = i % 5 + 1
        words = write_text(topic, rng, 100).split()
        for place in rng.sample(range(100), 20 * (5 - level)):
            words[place] = rng.choice(("click", "buy", "cookie", "subscribe"))
        texts[" ".join(words)] = level
    return texts


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    corpus = tmp_path_factory.mktemp("project") / "corpus"
    levels = {"a": leveled_texts("sea", 100, 0), "b": leveled_texts("court", 100, 1)}
    sources = write_sources(corpus, {key: list(texts) for key, texts in levels.items()})
    settings = EmbeddingSettings(dimension=64)
    sample = draw_sample(Engine(), sources, [], settings, corpus)
    embeddings = embed_sources(Engine(), sources, sample, settings, corpus)
    level_of = {text: level for texts in levels.values() for text, level in texts.items()}
    return corpus, sources, sample, embeddings, level_of


def imported(project, name, level_of):
    """Labels of all documents by a function of their rows, and the settings to read them."""
    corpus, sources, sample, _, _ = project
    documents = [row for part in sample.sources.values() for row in rows_of(part)]
    rows = [
        {"id": r["id"], "content_type": "prose", "valid": True, "level": level_of(r)}
        for r in documents
    ]
    pq.write_table(pa.Table.from_pylist(rows), corpus.parent / name)
    settings = QualitySettings(labeller="import", labels_file=name)
    return label_sample(Engine(), sources, sample, {}, settings, corpus), settings


@pytest.fixture(scope="module")
def fitted(project):
    corpus, sources, _, embeddings, level_of = project
    labels, settings = imported(project, "labels.parquet", lambda row: level_of[row["text"]])
    fit = fit_scorer(Engine(), sources, labels, embeddings, settings, corpus)
    return fit, score_sources(Engine(), sources, embeddings, fit, corpus)


def test_ridge_equals_the_direct_solution():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(80, 30)) * (rng.random((80, 30)) < 0.4)
    targets, penalties = rng.normal(size=(80, 3)), np.array([0.1, 1.0, 30.0])
    found = solve_ridge(sparse.csr_array(dense), targets, penalties)
    for column, penalty in enumerate(penalties):
        direct = np.linalg.solve(
            dense.T @ dense + penalty * np.eye(30), dense.T @ targets[:, column]
        )
        np.testing.assert_allclose(found[:, column], direct, rtol=1e-3, atol=1e-4)
    folds = np.arange(80) % 5
    chosen = cross_validate(sparse.csr_array(dense), targets[:, 0], folds)
    assert chosen.penalty == 30.0 and set(chosen.errors) == set(PENALTIES)
    inside = folds != 0
    mean = targets[inside, 0].mean()
    direct = np.linalg.solve(
        dense[inside].T @ dense[inside] + 30 * np.eye(30),
        dense[inside].T @ (targets[inside, 0] - mean),
    )
    np.testing.assert_allclose(
        chosen.predictions[~inside], mean + dense[~inside] @ direct, atol=1e-4
    )


def test_windows():
    text = "".join(chr(97 + i // 1000) for i in range(9000))
    assert [w[0] for w in windows_of(text)] == ["a", "d", "g"]
    assert {len(w) for w in windows_of(text)} == {2048} and windows_of("short") == ["short"]
    counts = count_words(["sea sea ship", "", "sea " * 2000]).toarray()
    lengths = np.sqrt((counts**2).sum(axis=1))
    np.testing.assert_allclose(lengths, [1, 0, 1])
    assert sorted(counts[0][counts[0] > 0] * np.sqrt(1 + (1 + np.log(2)) ** 2)) == pytest.approx(
        [1, 1 + np.log(2)]
    )


def test_the_scorer_learns_and_passes_its_gates(project, fitted):
    fit, scores = fitted
    level_of = project[-1]
    assert fit.gates.auc_scorer > 0.95 > fit.gates.auc_source and not fit.gates.failures
    assert fit.gates.within_type["prose"] > 0.85
    texts = {r["id"]: r["text"] for part in project[2].sources.values() for r in rows_of(part)}
    rows = [row for dataset in scores.values() for row in rows_of(dataset)]
    levels = [level_of[texts[row["id"]]] for row in rows]
    assert stats.spearmanr(levels, [row["raw_score"] for row in rows]).statistic > 0.9
    assert {row["content_type"] for row in rows} == {"prose"}


def test_scores_do_not_depend_on_the_batch(project, fitted):
    scorer = load_scorer(fitted[0].folder)
    dataset = Dataset.open(project[1][0].folder)
    (documents,) = dataset.read(dataset.names[0])
    (vectors,) = project[3]["a"].read(dataset.names[0])
    texts, codes = documents["text"].to_pylist(), codes_of(vectors)
    together, _ = scorer.score(texts, codes)
    alone = [
        scorer.score([text], code[None])[0][0] for text, code in zip(texts, codes, strict=True)
    ]
    assert together.tobytes() == np.array(alone, np.float32).tobytes()
    stored = [row["raw_score"] for row in rows_of(fitted[1]["a"])][: len(texts)]
    assert together.tolist() == stored


def test_a_refit_of_the_calibration_does_not_rescore(project, fitted):
    corpus, sources, *_ = project
    fit, scores = fitted
    calibration = calibrate(fit, corpus)
    assert set(calibration.curves) == {"default", "prose"}
    before = bucket_sources(Engine(), sources, scores, calibration, corpus)
    rows = rows_of(before["a"])
    assert [r["id"] for r in rows] == [r["id"] for r in rows_of(scores["a"])]
    assert {r["source"] for r in rows} == {"a"} and {r["quality_bucket"] for r in rows} == set(
        range(5)
    )
    files = {path: path.stat().st_mtime_ns for path in scores["a"].paths}
    other = replace(calibration, key="0" * 16, curves={"default": Curve((2, 2, 2, 2), 0, 3, 9)})
    after = bucket_sources(Engine(), sources, scores, other, corpus)
    assert after["a"].key != before["a"].key
    assert {r["quality_bucket"] for r in rows_of(after["a"])} == {0}
    assert files == {path: path.stat().st_mtime_ns for path in scores["a"].paths}
    summary = summarize_sources(Engine(), before)["a"]
    raw = [r["raw_score"] for r in rows]
    assert summary.deviation == pytest.approx(np.std(raw)) and sum(summary.buckets) == 100
    assert summary.state == "mixed"
    assert summarize_sources(Engine(), after)["a"].state == "homogeneous"
    assert SourceScores(9, 1e-4, (9, 0, 0, 0, 0)).state == "uninformative"


def test_a_scorer_that_sorts_by_source_is_refused(project):
    """Labels that follow the source, with noise that text cannot explain (marin #6849)."""
    corpus, sources, _, embeddings, _ = project
    rng = random.Random(0)
    levels = np.array([5 if rng.random() < 0.9 else 1 for _ in range(400)])
    in_a = np.array([i % 2 == 0 for i in range(400)])
    levels = np.where(in_a, levels, 6 - levels)
    by_source = np.where(in_a, 0.6, 0.4) + np.linspace(0.3, -0.3, 400)
    keys = ["a" if inside else "b" for inside in in_a]
    gates = check_scorer(by_source, levels, ["prose"] * 400, keys, np.arange(400) % 5)
    assert gates.auc_source > 0.85 > gates.auc_scorer and "name of the source" in gates.failures[0]
    labels, settings = imported(project, "flat.parquet", lambda row: 5)
    with pytest.raises(UsageError, match="hardly vary"):
        fit_scorer(Engine(), sources, labels, embeddings, settings, corpus)
    accepted = settings.model_copy(update={"accept": "a test"})
    fit = fit_scorer(Engine(), sources, labels, embeddings, accepted, corpus)
    with pytest.raises(UsageError, match="no label has level 1"):
        calibrate(fit, corpus)


def test_types_are_learnt(project):
    corpus, sources, sample, embeddings, level_of = project
    labels, settings = imported(project, "types.parquet", lambda row: level_of[row["text"]])
    of_a = {row["id"] for row in rows_of(sample.sources["a"])}
    path = corpus.parent / "types.parquet"
    rows = [
        {**row, "content_type": "other" if row["id"] in of_a else "prose"}
        for row in pq.read_table(path).to_pylist()
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    labels = label_sample(Engine(), sources, sample, {}, settings, corpus)
    fit = fit_scorer(Engine(), sources, labels, embeddings, settings, corpus)
    scores = score_sources(Engine(), sources, embeddings, fit, corpus)
    assert {r["content_type"] for r in rows_of(scores["a"])} == {"other"}
    assert {r["content_type"] for r in rows_of(scores["b"])} == {"prose"}


def test_too_few_labels_are_refused(project):
    corpus, sources, sample, embeddings, _ = project
    settings = QualitySettings(labeller="heuristic", sample_documents=4)
    labels = label_sample(Engine(), sources, sample, {"a": "web", "b": "web"}, settings, corpus)
    with pytest.raises(UsageError, match="a scorer needs 10"):
        fit_scorer(Engine(), sources, labels, embeddings, settings, corpus)


def test_rank_statistics_equal_scipy():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 6, 60).astype(float), rng.normal(size=60)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    good = rng.random(60) < 0.4
    test = stats.mannwhitneyu(a[good], a[~good])
    assert auc(a, good) == pytest.approx(test.statistic / good.sum() / (~good).sum())
    assert spearman(np.ones(5), np.arange(5.0)) is None and auc(a, np.ones(60, bool)) is None
