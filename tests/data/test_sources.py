"""The source registry: settings that are refused, licences, and content digests."""

import os

import pytest

from portolan.data import installed, sources
from portolan.data.sources import DigestCache, check_settings, content_digest, resolve_source
from portolan.errors import UsageError
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings


def settings_of(*rows, **fields):
    return DataSettings(sources=tuple(SourceSettings(**row) for row in rows), **fields)


TEXT = {"key": "notes", "kind": "text", "path": "in", "license_spdx": "MIT"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": "../x"}, "cannot name a folder"),
        ({"key": "a//b"}, "cannot name a folder"),
        ({"key": ".a"}, "cannot name a folder"),
        ({"key": "a~b"}, "cannot name a folder"),
        ({"category": "poetry"}, "unknown category 'poetry'"),
        ({"text_field": "body"}, "text_field means nothing for kind 'text'"),
        ({"id_field": "id"}, "id_field means nothing for kind 'text'"),
        (
            {
                "key": "manual-topics",
                "kind": "installed",
                "path": "in",
                "license_spdx": "NOASSERTION",
            },
            "path means nothing for kind 'installed'",
        ),
    ],
)
def test_settings_that_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        check_settings(settings_of({**TEXT, **change}))


def test_keys_that_differ_in_case_are_refused():
    with pytest.raises(UsageError, match="differ only in upper and lower case"):
        check_settings(settings_of(TEXT, {**TEXT, "key": "Notes"}))
    check_settings(settings_of(TEXT, {**TEXT, "key": "notes/more"}))


def resolve(folder, source, **fields):
    settings = settings_of(source, **fields)
    return resolve_source(settings.sources[0], settings, folder, DigestCache(folder / "corpus"))


def test_an_unaccepted_licence_is_refused_by_name(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("x")
    for expression, name in (("CC-BY-NC-SA-4.0", "non-commercial"), ("NOASSERTION", "unknown")):
        source = {**TEXT, "license_spdx": expression}
        with pytest.raises(
            UsageError, match=f"'notes': licence '{expression}' is of class '{name}'"
        ):
            resolve(tmp_path, source)
        assert resolve(tmp_path, source, accepted_license_classes=(name,)).key == "notes"
        accepted = resolve(tmp_path, {**source, "accept": "my own notes"})
        assert accepted.license_facts.license_class == name


def test_an_unknown_licence_is_warned_about(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("x")
    source = resolve(tmp_path, {**TEXT, "license_spdx": "Foo-1.0", "accept": "mine"})
    assert source.warnings == (
        "source 'notes': unknown licence 'Foo-1.0' counts as class 'unknown'",
    )


def test_packages_of_other_licences_are_left_out_and_counted(tmp_path):
    row = {"key": "package-readmes", "kind": "installed", "category": "code"}
    source = resolve(tmp_path, row, accepted_license_classes=("permissive",))
    assert source.license_column == "license"
    assert {file.path.split("-")[0] for file in source.refused} >= {"hypothesis"}
    assert source.license_facts.license_class == "permissive"
    with pytest.raises(UsageError, match="'package-readmes': licence"):
        resolve(tmp_path, row, accepted_license_classes=("no-derivatives",))


def test_an_installed_source_that_this_machine_lacks_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "list_installed", lambda key: [])
    source = resolve(tmp_path, {"key": "stdlib-tests", "kind": "installed"})
    assert (source.files, source.refused) == ((), ())
    installed.forget_listings()


def test_a_revision_names_a_local_source_and_its_content_decides(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("x")
    named = resolve(tmp_path, {**TEXT, "revision": "v1"})
    assert named.revision == "v1"
    assert named.content == resolve(tmp_path, TEXT).revision


def test_digests_are_remembered_until_a_file_changes(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/a.txt"
    path.write_text("one")
    first = resolve(tmp_path, TEXT).revision
    with monkeypatch.context() as patch:
        patch.setattr(sources, "content_digest", lambda *_: pytest.fail("read again"))
        assert resolve(tmp_path, TEXT).revision == first
    before = path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(before + 1, before + 1))
    assert resolve(tmp_path, TEXT).revision != first
    (tmp_path / "corpus/input-digests.json").write_text("{half")
    path.write_text("one")
    assert resolve(tmp_path, TEXT).revision == first


def test_a_missing_file_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("one")
    files = resolve(tmp_path, TEXT).files
    (tmp_path / "in/a.txt").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*a\.txt"):
        content_digest(files)
