"""Text found on this machine: what is listed, what is taken from a module, what is left out."""

import json
import textwrap

import pytest

from portolan.data.installed import (
    is_stdlib_test,
    list_distributions,
    list_installed,
    module_docstrings,
    read_description,
    read_topics,
)
from portolan.data.readers import Drop, InputFile, ReadOptions
from portolan.source_settings import INSTALLED_SOURCES

MODULE = textwrap.dedent(
    '''
    """Module.

        Indented."""
    def first():
        """One."""
        def inner():
            "Inner."
    class Second:
        """Two."""
        async def method(self):
            r"""Three \\d."""
        def silent(self):
            return """not a docstring"""
    raise SystemExit("never executed")
    '''
)


def test_docstrings_in_source_order():
    assert module_docstrings(MODULE, "pack.mod") == (
        "pack.mod\n\nModule.\n\nIndented.\n\n"
        "pack.mod.first\n\nOne.\n\n"
        "pack.mod.first.inner\n\nInner.\n\n"
        "pack.mod.Second\n\nTwo.\n\n"
        "pack.mod.Second.method\n\nThree \\d.\n"
    )
    assert module_docstrings("x = 1", "m") == ""


@pytest.mark.parametrize("text", ["def (", "(" * 1000 + ")" * 1000, "print 'two'", "\x00"])
def test_a_module_that_cannot_be_parsed(text):
    assert module_docstrings(text, "m") is None


def test_old_escapes_do_not_warn():
    assert module_docstrings('"""a \\d"""', "m") == "m\n\na \\d\n"


def test_every_source_lists_sorted_relative_paths_with_a_licence():
    for key in INSTALLED_SOURCES:
        files = list_installed(key)
        paths = [file.path for file in files]
        assert paths == sorted(set(paths), key=str.encode), key
        assert not any(path.startswith("/") or ".." in path for path in paths)
        assert all(file.license for file in files)
        assert files or key == "stdlib-tests"


def test_own_files_and_foreign_packages_are_left_out():
    assert "portolan" not in {one.name for one in list_distributions()}
    for key in ("package-sources", "package-docstrings", "package-readmes", "package-licences"):
        assert not [f.path for f in list_installed(key) if "portolan" in f.path.lower()]
    for file in list_installed("stdlib-sources"):
        assert "site-packages" not in file.path
        assert not is_stdlib_test(file.path)
        assert not file.path.startswith("_sysconfigdata")
    assert all(is_stdlib_test(file.path) for file in list_installed("stdlib-tests"))


def test_distributions_state_their_licences():
    found = {one.name: one.license for one in list_distributions()}
    assert found["pydantic"] == "MIT"
    assert found["jax"] == "Apache-2.0"
    assert found["hypothesis"] == "MPL-2.0"


def test_topics_of_the_manual():
    (file,) = list_installed("manual-topics")
    documents = list(read_topics(file, ReadOptions("topics", 1 << 24)))
    assert len(documents) > 60
    by_name = {document.source_id: document.text for document in documents}
    assert "assert" in by_name
    assert "AssertionError" in by_name["assert"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("Name: a\n\n# Title\n\nText é\n", "# Title\n\nText é\n"),
        ("Name: a\nDescription: Old\n        style\n", "Old\nstyle"),
        ("Name: a\n\nUNKNOWN\n", None),
        ("Name: a\n", None),
    ],
)
def test_description(tmp_path, metadata, expected):
    path = tmp_path / "METADATA"
    path.write_text(metadata, encoding="utf-8")
    file = InputFile(str(path), "a.dist-info/METADATA", path.stat().st_size, None, "MIT")
    (item,) = read_description(file, ReadOptions("description", 1000))
    if expected is None:
        assert item == Drop("empty", file.path, 0)
    else:
        assert (item.text, item.license) == (expected, "MIT"), json.dumps(item.text)
