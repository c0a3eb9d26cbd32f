"""Remote sources: pinned, fetched whole or not at all, resumed, and named when they fail."""

import gzip
import io
import json
import shutil
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.servers import COMMIT, serve

from portolan.data import sources, staging
from portolan.data.engine import Engine
from portolan.data.normalize import normalize_source
from portolan.data.sources import DigestCache, check_settings, resolve_source
from portolan.errors import UsageError
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings

LONG = "".join(json.dumps({"text": f"line {i} of a long file"}) + "\n" for i in range(200_000))
FILES = {
    "corpus/a.jsonl": b'{"text": "ahoy"}\n',
    "corpus/deep/b.jsonl.gz": gzip.compress(LONG.encode(), mtime=0),
    "corpus/long.jsonl": LONG.encode(),
    "corpus/notes.txt": b"no data",
    "other/c.jsonl": b"not below the root",
}


def settings_of(**fields):
    source = {"key": "far", "kind": "jsonl", "license_spdx": "MIT", "revision": "v1", **fields}
    return DataSettings(sources=(SourceSettings(**source),))


def resolve(folder, settings):
    check_settings(settings)
    return resolve_source(settings.sources[0], settings, folder, DigestCache(folder / "corpus"))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(staging, "RETRY_SECONDS", 0.0)


@pytest.fixture
def site():
    with serve(dict(FILES)) as site:
        yield site


def contents(source):
    return {file.path: Path(file.url).read_bytes() for file in source.files}


def test_a_folder_on_the_web_is_copied_once(tmp_path, site):
    settings = settings_of(path=f"{site.url}/corpus/")
    source = resolve(tmp_path, settings)
    names = ("a.jsonl", "deep/b.jsonl.gz", "long.jsonl")
    assert contents(source) == {name: FILES[f"corpus/{name}"] for name in names}
    assert source.revision == "v1"
    site.requests.clear()
    again = resolve(tmp_path, settings)
    assert (site.requests, again.files, again.content) == ([], source.files, source.content)
    # The content digest can be the pin: the same bytes pass, others do not.
    pinned = {"path": f"{site.url}/corpus/", "revision": f"sha256:{source.content}"}
    assert resolve(tmp_path, settings_of(**pinned)).content == source.content
    site.files["corpus/a.jsonl"] = b'{"text": "AHOY"}\n'
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(UsageError, match="the content digest of its files is"):
        resolve(tmp_path, settings_of(**pinned))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on_where_it_broke(tmp_path, site, ranges):
    site.ranges, site.cut = ranges, {"corpus/long.jsonl": 3_000_000}
    source = resolve(tmp_path, settings_of(path=f"{site.url}/corpus/long.jsonl"))
    assert contents(source) == {"long.jsonl": FILES["corpus/long.jsonl"]}
    gets = [wanted for command, _, wanted in site.requests if command == "GET"]
    assert len(gets) >= 2
    assert any(wanted and not wanted.startswith("bytes=0") for wanted in gets) == ranges


def test_a_source_that_disappears_is_named_and_resumed(tmp_path, site):
    settings = settings_of(path=f"{site.url}/corpus/")
    site.gone.add("corpus/long.jsonl")
    with pytest.raises(UsageError, match=r"'far': .*long\.jsonl has gone: .*\n.*same command"):
        resolve(tmp_path, settings)
    site.gone.clear()
    site.requests.clear()
    assert set(contents(resolve(tmp_path, settings))) == {
        "a.jsonl",
        "deep/b.jsonl.gz",
        "long.jsonl",
    }
    assert "/corpus/a.jsonl" not in {path for c, path, _ in site.requests if c == "GET"}
    assert not list((tmp_path / "corpus/inputs").rglob("*.partial"))


def test_a_server_that_stays_broken_is_named_and_what_came_is_kept(tmp_path, site, monkeypatch):
    settings = settings_of(path=f"{site.url}/corpus/long.jsonl")
    site.cut = {"corpus/long.jsonl": 3_000_000}
    with monkeypatch.context() as patch:
        patch.setattr(staging, "ATTEMPTS", 1)
        with pytest.raises(UsageError, match=r"long\.jsonl breaks off"):
            resolve(tmp_path, settings)
    (partial,) = (tmp_path / "corpus/inputs").rglob("*.partial")
    assert 0 < partial.stat().st_size < len(LONG)
    # Another version upstream: what came of the old one is not mixed with it.
    site.files["corpus/long.jsonl"] = LONG.upper().encode()
    assert contents(resolve(tmp_path, settings)) == {"long.jsonl": LONG.upper().encode()}


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, site):
    site.change = {"corpus/a.jsonl": b'{"text": "AHOY"}\n'}
    with pytest.raises(UsageError, match=r"a\.jsonl changed while it was read"):
        resolve(tmp_path, settings_of(path=f"{site.url}/corpus/a.jsonl"))
    assert not list((tmp_path / "corpus/inputs").rglob("*.jsonl"))


def test_a_copy_that_was_cut_short_is_fetched_again(tmp_path, site):
    settings = settings_of(path=f"{site.url}/corpus/a.jsonl")
    (file,) = resolve(tmp_path, settings).files
    Path(file.url).write_bytes(b"{")
    assert contents(resolve(tmp_path, settings)) == {"a.jsonl": FILES["corpus/a.jsonl"]}


def test_other_file_systems_are_staged_as_well(tmp_path):
    system = fsspec.filesystem("memory")
    system.pipe("/far/a.jsonl", b'{"text": "ahoy"}\n')
    source = resolve(tmp_path, settings_of(path="memory://far"))
    assert contents(source) == {"a.jsonl": b'{"text": "ahoy"}\n'}
    system.rm("/far", recursive=True)
    assert contents(resolve(tmp_path, settings_of(path="memory://far"))) == contents(source)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "https://example.org/a", "revision": ""}, "has no revision"),
        ({"path": "memory://far", "revision": ""}, "has no revision"),
        ({"kind": "huggingface", "path": "acme/notes", "revision": ""}, "is not a commit"),
        ({"kind": "huggingface", "path": "acme/notes", "revision": "main"}, "is not a commit"),
        ({"path": "s3://bucket/a"}, "pip install s3fs"),
        ({"path": "nosuch://a"}, "Protocol not known"),
        ({"path": "./in", "split": "train"}, "split means nothing for kind 'jsonl'"),
    ],
)
def test_what_cannot_be_read_or_pinned_is_refused(tmp_path, fields, message):
    with pytest.raises(UsageError, match=message):
        resolve(tmp_path, settings_of(**fields))


def parquet(*texts, **columns):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts), **columns}), sink)
    return sink.getvalue()


DATASET = {
    "README.md": b"---\nlicense: mit\nconfigs:\n- config_name: prose\n  default: true\n"
    b"  data_files:\n  - split: train\n    path: prose/train-*.parquet\n  - split: test\n"
    b"    path: [prose/test.parquet]\n- config_name: lines\n  data_files: lines/**\n---\n# Notes\n",
    "prose/train-0.parquet": parquet("one", "two"),
    "prose/train-1.parquet": parquet("three"),
    "prose/test.parquet": parquet("held back"),
    "lines/deep/a.jsonl": b'{"text": "four"}\n',
    "dataset_infos.json": b"{}",
}
WANTED = [
    ({}, {"prose/train-0.parquet", "prose/train-1.parquet"}),
    ({"subset": "prose", "split": "test"}, {"prose/test.parquet"}),
    ({"subset": "lines"}, {"lines/deep/a.jsonl"}),
]


def hub_settings(**fields):
    return settings_of(kind="huggingface", path="acme/notes", revision=COMMIT, **fields)


@pytest.mark.parametrize(("fields", "names"), WANTED)
def test_a_dataset_of_the_hub(tmp_path, monkeypatch, fields, names):
    with serve(dict(DATASET)) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        source = resolve(tmp_path, hub_settings(**fields))
    assert contents(source) == {name: DATASET[name] for name in names}
    assert source.revision == COMMIT
    with Engine() as engine:
        _, manifest, _ = normalize_source(engine, source, 0, tmp_path / "corpus/documents")
    assert manifest["counts"]["kept"] == (2 + 1 if len(names) == 2 else 1)


@pytest.mark.parametrize(("fields", "names"), WANTED)
def test_a_copy_of_a_dataset_in_a_folder(tmp_path, fields, names):
    for name, content in DATASET.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    source = resolve(
        tmp_path, settings_of(kind="huggingface", path="./copy", revision="", **fields)
    )
    assert {file.path for file in source.files} == names
    assert source.revision == source.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subset": "verse"}, "no configuration 'verse'\n.*prose, lines"),
        ({"split": "dev"}, "no split 'dev'\n.*test, train"),
        ({"revision": "f" * 40}, "cannot list hf://datasets/acme/notes@f"),
    ],
)
def test_what_a_dataset_lacks_is_named(tmp_path, monkeypatch, fields, message):
    with serve(dict(DATASET)) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        with pytest.raises(UsageError, match=message):
            resolve(tmp_path, settings_of(**{**hub_settings().sources[0].model_dump(), **fields}))


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["a.parquet", "b.parquet"], "", {"a.parquet", "b.parquet"}),
        (
            ["data/train-00000.parquet", "data/validation-0.parquet"],
            "",
            {"data/train-00000.parquet"},
        ),
        (["train/a.jsonl", "dev/b.jsonl"], "validation", {"dev/b.jsonl"}),
        (["a.parquet", "b.parquet", "c.json"], "", {"a.parquet", "b.parquet"}),
    ],
)
def test_files_without_a_card_go_by_their_names(names, split, expected):
    files = [sources.InputFile(name, name, 1) for name in names]
    chosen = sources.choose_files(files, {}, key="far", subset="", split=split)
    assert {file.path for file in chosen} == expected


def test_licences_that_differ_by_document(tmp_path):
    rows = [
        {"text": "one", "license": "mit"},
        {"text": "two", "license": "CC-BY-NC-4.0"},
        {"text": "three", "license": ["apache-2.0", "CC-BY-SA-4.0"]},
        {"text": "four"},
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"path": "in", "license_field": "license", "revision": ""}
    source = resolve(tmp_path, settings_of(**fields, license_spdx="NOASSERTION"))
    with Engine() as engine:
        folder, manifest, _ = normalize_source(engine, source, 0, tmp_path / "corpus/documents")
    assert manifest["counts"]["dropped"] == {"license_refused": 2}
    found = pq.read_table(folder / "part-00000-of-00001.parquet").to_pylist()
    assert {row["text"]: row["license"] for row in found} == {
        "one": "mit",
        "three": "CC-BY-SA-4.0 AND apache-2.0",
    }
    assert source.license_column == "license"
