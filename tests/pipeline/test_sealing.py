"""A finished project is sealed, bundled, checked by a stranger, and changed by one byte."""

import json
import posixpath
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from tests.pipeline.conftest import Finished
from tests.pipeline.tools import Cli

from portolan.record.journal import Journal


@pytest.fixture(scope="module")
def copy(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of this module, sealed once."""
    return Path(shutil.copytree(finished.root, tmp_path_factory.mktemp("seal") / "project"))


@pytest.fixture
def sealed(copy: Path, cli: Cli) -> Path:
    """The project after `portolan seal`."""
    if not any(record.type == "seal" for record in Journal.open(copy / "record").records()):
        done = cli("-C", copy, "seal")
        assert (done.code, done.err) == (0, ""), done
        assert "restored the final checkpoint of target-" in done.out
        assert done.out.count(": succeeded, ") == 5
    return copy


def newest(root: Path, record_type: str) -> dict:
    records = list(Journal.open(root / "record").records())
    return next(record.body for record in reversed(records) if record.type == record_type)


def blob(root: Path, reference: str):
    return json.loads(Journal.open(root / "record").read_blob(reference))


def test_a_seal_states_everything_that_is_due(sealed):
    body = newest(sealed, "seal")
    runs = {run["name"].split("-s")[0]: run for run in body["runs"]}
    target = runs["target-d96"]
    assert target["role"] == "production" and target["orders"][0]["first_step"] == 0
    assert target["orders"][-1]["last_step"] == target["completed"] - 1
    manifest = blob(sealed, body["data_manifest"])
    for shard in manifest["shards"]:
        assert (sealed / shard["path"]).stat().st_size == shard["bytes"]
        assert shard["licence"] == "CC0-1.0" and shard["tokens"] > 0
    items = {item["item"]: item["value"] for item in blob(sealed, body["final_items"])}
    assert items["steps trained"] == target["completed"]
    assert items["tokens trained"] == target["completed"] * 16 * 64
    (state,) = items["release digest and training checkpoint digest"]["final state"].values()
    assert state == f"{target['name']} step-{target['completed']}"
    assert items["energy"] == "not_stated"
    assert 0 < float(items["effective time"]["share"]) <= 1
    rows = {row["name"]: row for row in blob(sealed, body["licences"])}
    assert rows["source prose"]["concluded"] == "CC0-1.0"
    assert {row["subject"] for row in rows.values()} >= {
        "code", "corpus", "evaluation", "tokenizer", "weights", "measurements",
    }  # fmt: skip
    verdicts = {finding["verdict"] for finding in blob(sealed, body["reconciliation"])}
    assert verdicts and "conflict" not in verdicts


def test_bundle_verify_and_one_changed_byte(sealed, cli, tmp_path):
    bundle = tmp_path / "bundle.zip"
    assert cli("-C", sealed, "bundle", bundle).code == 0
    done = cli("verify", bundle)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ok(") and "\nsealed: lines 0 to " in done.out
    assert "chained" in done.out and "--limits" in done.out
    with zipfile.ZipFile(bundle) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("finished.json"))
    content = bytearray(bundle.read_bytes())
    content[entry.header_offset + 30 + len(entry.filename) + 20] ^= 1
    bundle.write_bytes(bytes(content))
    done = cli("verify", bundle)
    assert (done.code, f"{entry.filename}: changed" in done.out) == (1, True)
    content[-30] ^= 1
    bundle.write_bytes(bytes(content))
    done = cli("verify", bundle)
    assert done.code == 1 and "refused" in done.err
    assert cli("verify", tmp_path / "none.zip").code == 2


def test_every_link_of_a_page_in_the_bundle_leads_to_a_page_in_it(sealed, cli, tmp_path):
    bundle = tmp_path / "bundle.zip"
    done = cli("-C", sealed, "bundle", bundle)
    with zipfile.ZipFile(bundle) as archive:
        held = {entry.filename: entry for entry in archive.infolist()}
        pages = {name: archive.read(name).decode() for name in held if name.endswith(".html")}
    assert {"site/index.html", "site/map/index.html", "site/map/domains.html"} <= pages.keys()
    size = sum(held[name].file_size for name in pages)
    assert f"pages in it: {len(pages)}, {size} bytes" in done.out
    for name, page in pages.items():
        for link in re.findall(r'href="([^":#?]+)["#?]', page):
            assert posixpath.normpath(posixpath.join(posixpath.dirname(name), link)) in held, name


def test_reach_and_witness_of_a_project(sealed, cli, tmp_path):
    done = cli("-C", sealed, "reach", "--json")
    report = json.loads(done.out)
    assert report["claims"] > 0 and done.code == 0
    assert report["claims"] == report["claims_fetchable"]
    assert newest(sealed, "check")["rule"] == "reach"
    (tmp_path / "held").mkdir()
    assert cli("-C", sealed, "witness", "folder", tmp_path / "held").code == 0
    (copy,) = (tmp_path / "held").iterdir()
    assert cli("-C", sealed, "verify", "--head", copy).code == 0
    assert cli("-C", sealed, "witness", "oracle", "x").code == 1


def test_licences_of_the_owner(sealed, cli):
    path = sealed / "licences.toml"
    path.write_text('[weights]\ndeclared = "MIT"\nredistribution = "public"\n')
    done = cli("-C", sealed, "seal")
    assert done.code == 1 and "no legal basis is cited" in done.err
    path.write_text("[weigths]\n")
    assert cli("-C", sealed, "seal").code == 2
    path.write_text(
        '[weights]\ndeclared = "MIT"\nconcluded = "MIT"\nredistribution = "public"\n'
        'legal_basis = "the statement of the corpus owner of 2026-01-01"\n'
    )
    assert cli("-C", sealed, "seal").code == 0
    rows = blob(sealed, newest(sealed, "seal")["licences"])
    assert {row["concluded"] for row in rows if row["subject"] == "weights"} == {"MIT"}
    path.unlink()


def test_what_is_not_finished_is_not_sealed(project, cli):
    (segment, *_) = (project / "runs").glob("target-*/metrics/*.parquet")
    content = segment.read_bytes()
    segment.unlink()
    done = cli("-C", project, "seal")
    assert done.code == 1 and "metrics" in done.err and "missing" in done.err
    segment.write_bytes(content)
    journal = Journal.open(project / "record")
    last = [record for record in journal.records() if record.type == "attempt"][-1]
    restarted = dict(last.body) | {"ordinal": last.body["ordinal"] + 1, "start": last.body["end"]}
    restarted.pop("end")
    journal.append("attempt", restarted)
    done = cli("-C", project, "seal")
    assert done.code == 1 and "an attempt has no end" in done.err
    assert not any(record.type == "seal" for record in journal.records())
    assert cli("-C", project, "bundle").code == 2
