"""Licence classes, expressions, and facts read from a distribution's metadata."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.licenses import (
    UNSPECIFIED_BSD,
    classify_license,
    join_expressions,
    license_from_metadata,
)

EXAMPLES = {
    "CC0-1.0": "public-domain",
    "0BSD": "public-domain",
    "LicenseRef-US-Gov-PD": "public-domain",
    "MIT": "permissive",
    "apache-2.0": "permissive",
    "PSF-2.0": "permissive",
    "ODC-By-1.0": "permissive",
    "CC-BY-SA-4.0": "share-alike",
    "GFDL-1.3-or-later": "share-alike",
    "LGPL-2.1-only": "share-alike",
    "GPL-2.0+": "share-alike",
    "AGPL-3.0-or-later": "share-alike",
    "LicenseRef-model-output-acme": "model-output-terms",
    "CC-BY-ND-4.0": "no-derivatives",
    "CC-BY-NC-4.0": "non-commercial",
    "CC-BY-NC-SA-4.0": "non-commercial",
    "CC-BY-NC-ND-4.0": "non-commercial",
    "LicenseRef-crawl-terms": "custom-terms",
    "NOASSERTION": "unknown",
    "": "unknown",
    "  ": "unknown",
    "Totally-Made-Up-1.0": "unknown",
    "MIT AND GPL-3.0-only": "share-alike",
    "MIT OR GPL-3.0-only": "permissive",
    "GPL-2.0-only WITH Classpath-exception-2.0": "share-alike",
    "MIT OR CC-BY-NC-4.0 AND CC0-1.0": "permissive",
    "(MIT OR CC-BY-NC-4.0) AND CC-BY-ND-4.0": "no-derivatives",
    "MIT OR AFL-2.1": "permissive",
    "MIT AND AFL-2.1": "unknown",
    "MIT AND": "unknown",
    "(MIT": "unknown",
    "MIT License, see file": "unknown",
    UNSPECIFIED_BSD: "permissive",
}


@pytest.mark.parametrize(("expression", "expected"), EXAMPLES.items())
def test_class_of_expression(expression, expected):
    assert classify_license(expression).license_class == expected


def test_unknown_identifiers_are_named():
    assert classify_license("MIT AND Foo-1 AND Bar-2").unknown == ("Bar-2", "Foo-1")
    assert classify_license("MIT").unknown == ()
    assert classify_license("NOASSERTION").unknown == ()


identifiers = st.sampled_from(["CC0-1.0", "MIT", "GPL-3.0-only", "CC-BY-ND-4.0", "LicenseRef-x"])


@given(st.lists(identifiers, min_size=1, max_size=5))
def test_and_takes_the_largest_or_the_smallest(names):
    numbers = [classify_license(name).number for name in names]
    assert classify_license(" AND ".join(names)).number == max(numbers)
    assert classify_license(" OR ".join(names)).number == min(numbers)
    assert classify_license(join_expressions(names)).number == max(numbers)


@pytest.mark.parametrize(
    ("expression", "stated", "classifiers", "expected"),
    [
        ("MIT AND PSF-2.0", "ignored", [], "MIT AND PSF-2.0"),
        (None, "BSD-3-Clause", ["License :: OSI Approved :: BSD License"], "BSD-3-Clause"),
        (None, "3-Clause BSD License", [], "BSD-3-Clause"),
        (None, "Apache License, Version 2.0", [], "Apache-2.0"),
        (None, "Apache 2.0", [], "Apache-2.0"),
        (None, "BSD", [], UNSPECIFIED_BSD),
        (
            None,
            "Copyright (c) 2001 Somebody\nAll rights reserved.",
            ["License :: OSI Approved :: MIT License"],
            "MIT",
        ),
        (
            None,
            None,
            [
                "License :: OSI Approved :: Apache Software License",
                "License :: OSI Approved :: MIT License",
            ],
            "Apache-2.0 AND MIT",
        ),
        (None, None, ["License :: Other/Proprietary License"], "NOASSERTION"),
        (None, None, ["Programming Language :: Python"], "NOASSERTION"),
        (None, "UNKNOWN", [], "NOASSERTION"),
    ],
)
def test_license_from_metadata(expression, stated, classifiers, expected):
    assert license_from_metadata(expression, stated, classifiers)[0] == expected
