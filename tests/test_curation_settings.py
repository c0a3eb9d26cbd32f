"""Settings that nothing reads are refused."""

import pytest

from portolan.curation_settings import EmbeddingSettings, QualitySettings


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        (EmbeddingSettings, {"model": "m"}, "model means nothing for backend 'hash'"),
        (EmbeddingSettings, {"backend": "word-vectors", "dimension": 8}, "dimension means nothing"),
        (EmbeddingSettings, {"backend": "sentence-transformers", "endpoint": "x"}, "endpoint"),
        (QualitySettings, {"labeller": "heuristic", "model": "m"}, "model means nothing"),
        (QualitySettings, {"labeller": "import", "sample_documents": 9}, "sample_documents"),
        (QualitySettings, {"labeller": "llm", "labels_file": "x"}, "labels_file means nothing"),
    ],
)
def test_settings_that_nothing_reads(settings, fields, message):
    with pytest.raises(ValueError, match=message):
        settings(**fields)
