import pytest

from portolan.record.licences import (
    NO_ASSERTION,
    LicenceError,
    LicenceRow,
    check_licences,
    licence_problems,
    unfounded_open_words,
)

ORDER = ["CC0-1.0", "MIT", "GPL-3.0-only", NO_ASSERTION]


def row(name, subject="corpus", licence="MIT", redistribution="public", **fields):
    return LicenceRow(name, subject, licence, licence, redistribution=redistribution, **fields)


def test_a_derivative_is_never_more_open_than_its_inputs():
    corpus = row("corpus", redistribution="metadata_only")
    for access, allowed in (("public", False), ("gated", False), ("metadata_only", True)):
        weights = row("weights", "weights", redistribution=access, derived_from=("corpus",))
        problems = licence_problems([corpus, weights], ORDER.index)
        assert (problems == []) == allowed
    cited = row("weights", "weights", derived_from=("corpus",), legal_basis="statement of 08-24")
    assert licence_problems([corpus, cited], ORDER.index) == []
    # The restriction passes through an intermediate: its own row must be as closed.
    middle = row("tokens", redistribution="public", derived_from=("corpus",))
    last = row("weights", "weights", derived_from=("tokens",))
    with pytest.raises(LicenceError, match="tokens is public, its input corpus only metadata_only"):
        check_licences([corpus, middle, last], ORDER.index)


def test_a_concluded_licence_is_never_broader_than_its_inputs():
    source = row("source", licence="GPL-3.0-only")
    broad = row("weights", "weights", "MIT", derived_from=("source",))
    assert "broader" in licence_problems([source, broad], ORDER.index)[0]
    unknown = row("source", licence=NO_ASSERTION)
    assert licence_problems([unknown, broad], ORDER.index)
    silent = row("weights", "weights", NO_ASSERTION, derived_from=("source",))
    assert licence_problems([unknown, silent], ORDER.index) == []


def test_malformed_tables_are_named():
    rows = [row("a", derived_from=("b", "a")), row("a")]
    text = " ".join(licence_problems(rows, ORDER.index))
    assert "same name" in text and "which has no row" in text and "from itself" in text


def test_open_is_refused_without_a_licence():
    rows = [row("code", "code"), row("weights", "weights", NO_ASSERTION)]
    text = "The code is open. We release open weights! The metrics are open too.\nOpen questions."
    assert unfounded_open_words(text, rows) == [
        "We release open weights",
        "The metrics are open too",
    ]
    closed = [row("weights", "weights", redistribution="withheld")]
    assert unfounded_open_words("an openly licensed model", closed)
