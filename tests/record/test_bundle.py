import base64
import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.record.sealed import draft, fill, sealed

from portolan.errors import PortolanError, UsageError
from portolan.record.bundle import write_bundle
from portolan.record.bundle_verify import verify_bundle
from portolan.record.journal import Journal
from portolan.record.licences import LicenceRow
from portolan.record.seal import write_seal
from portolan.record.signing import verify_envelope


@pytest.fixture
def bundle(journal, bodies, tmp_path) -> Path:
    project = sealed(journal, bodies)
    write_bundle(project, tmp_path / "bundle.zip", journal)
    return tmp_path / "bundle.zip"


def names(bundle: Path) -> list[str]:
    with zipfile.ZipFile(bundle) as archive:
        return archive.namelist()


def read(bundle: Path, name: str) -> bytes:
    with zipfile.ZipFile(bundle) as archive:
        return archive.read(name)


def test_content_and_determinism(bundle, journal, tmp_path):
    held = names(bundle)
    assert {
        "README.txt",
        "croissant.json",
        "ro-crate-metadata.json",
        "record/journal.jsonl",
        "runs/target/metrics/a.parquet",
        "site/index.html",
        "statement.dsse.json",
    } <= set(held)
    assert "runs/target/checkpoints/w.bin" not in held
    assert sum(name.startswith("provenance/") for name in held) == 2
    assert not any("key" in name or ".portolan" in name for name in held)
    write_bundle(journal.folder.parent, tmp_path / "again.zip", Journal.open(journal.folder))
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()


QUOTING = {"site/map/pairs.html"}


@pytest.mark.parametrize("access", ["public", "metadata_only", None])
def test_all_pages_enter_unless_they_quote_what_may_not_be_passed_on(
    journal, bodies, tmp_path, access
):
    rows = [LicenceRow("source a<b", "corpus", redistribution=access)] if access else []
    write_seal(journal, draft(fill(journal, bodies), licences=rows))
    project = journal.folder.parent
    for name in ("index", "pairs"):
        path = project / "site" / "map" / f"{name}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name}: a document")
    write_bundle(project, tmp_path / "bundle.zip", journal, QUOTING)
    pages = [name for name in names(tmp_path / "bundle.zip") if name.startswith("site/")]
    assert pages == ["site/index.html", "site/map/index.html", "site/map/pairs.html"]
    content = read(tmp_path / "bundle.zip", "site/map/pairs.html").decode()
    assert (content == "pairs: a document") is (access == "public")
    reason = "source a&lt;b is metadata_only" if access else "names no source"
    assert access == "public" or reason in content
    assert verify_bundle(tmp_path / "bundle.zip").exit_code == 0


def test_a_stranger_verifies_it_elsewhere(bundle, journal, tmp_path):
    shutil.rmtree(journal.folder.parent)
    report = verify_bundle(bundle)
    assert (report.exit_code, report.problems, report.num_absent) == (0, (), 1)
    assert report.seal and "not available here" in str(report)
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert verify_bundle(tmp_path / "unpacked").exit_code == 0
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((tmp_path / "unpacked").rglob("*")):
            archive.write(path, path.relative_to(tmp_path / "unpacked"))
    assert verify_bundle(packed).exit_code == 0


def test_every_changed_file_is_named(bundle, tmp_path):
    """One flipped bit in the content of each file, without touching any checksum of the archive."""
    content = bundle.read_bytes()
    source = random.Random(0)
    with zipfile.ZipFile(bundle) as archive:
        entries = archive.infolist()
    for entry in entries:
        start = entry.header_offset + 30 + len(entry.filename)
        place = start + source.randrange(entry.file_size)
        changed = bytearray(content)
        changed[place] ^= 1
        damaged = tmp_path / "damaged.zip"
        damaged.write_bytes(bytes(changed))
        report = verify_bundle(damaged)
        text = str(report)
        assert report.exit_code == 1, entry.filename
        if entry.filename == "record/journal.jsonl":
            assert report.verdict.word in ("broken", "truncated")
        elif "/heads/" in entry.filename:
            assert report.verdict.word == "bad_signature"
        else:
            assert entry.filename in text


def test_added_dropped_and_resigned_files(bundle, tmp_path):
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(folder)
    (folder / "extra.txt").write_text("x")
    report = verify_bundle(folder)
    assert [str(p) for p in report.problems] == [
        "extra.txt: invalid (the statement does not name it)"
    ]
    (folder / "extra.txt").unlink()
    (folder / "README.txt").unlink()
    assert "README.txt: missing" in str(verify_bundle(folder))
    statement = folder / "statement.dsse.json"
    envelope = json.loads(statement.read_bytes())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["subject"] = [s for s in payload["subject"] if s["name"] != "README.txt"]
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    statement.write_text(json.dumps(envelope))
    assert "no valid signature" in str(verify_bundle(folder))
    statement.unlink()
    assert "statement.dsse.json: missing" in str(verify_bundle(folder))


def test_the_statement_is_in_toto_in_dsse(bundle, journal):
    envelope = json.loads(read(bundle, "statement.dsse.json"))
    payload = verify_envelope(envelope, journal.public_key, "application/vnd.in-toto+json")
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    assert digests == {
        name: hashlib.sha256(read(bundle, name)).hexdigest()
        for name in names(bundle)
        if name != "statement.dsse.json"
    }
    assert statement["predicate"]["seal"]["merkle_root"]


def test_provenance_names_inputs_and_products(bundle, journal):
    found = [name for name in names(bundle) if name.startswith("provenance/")]
    last = json.loads(read(bundle, max(found)))
    statement = json.loads(verify_envelope(last, journal.public_key, last["payloadType"]))
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    definition = statement["predicate"]["buildDefinition"]
    assert {item["name"] for item in definition["resolvedDependencies"]} == {
        "code", "configuration", "data", "lock",
    }  # fmt: skip
    assert "s3cret" not in json.dumps(statement)
    assert statement["predicate"]["runDetails"]["metadata"]["finishedOn"]
    subjects = [item["name"] for item in statement["subject"]]
    assert subjects == ["record attempt", "artifact target checkpoint", "artifact target metrics"]


def test_ro_crate_is_read_by_the_reference_library(bundle, tmp_path):
    from rocrate.rocrate import ROCrate

    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(tmp_path / "crate")
    crate = ROCrate(tmp_path / "crate")
    listed = {entity.id for entity in crate.data_entities}
    assert listed == set(names(bundle)) - {"ro-crate-metadata.json"}
    journal = crate.get("record/journal.jsonl")
    content = read(bundle, "record/journal.jsonl")
    assert journal["sha256"] == hashlib.sha256(content).hexdigest()
    assert crate.mainEntity.id == "record/journal.jsonl"


@pytest.mark.filterwarnings("ignore")
def test_croissant_is_read_by_the_reference_library(bundle, tmp_path):
    import mlcroissant

    path = tmp_path / "croissant.json"
    path.write_bytes(read(bundle, "croissant.json"))
    dataset = mlcroissant.Dataset(str(path))
    issues = dataset.metadata.ctx.issues
    assert (issues.errors, issues.warnings) == (set(), set())
    rows = list(dataset.records("shards"))
    assert [row["shards/tokens"] for row in rows] == [50, 50]
    assert [item.sha256 for item in dataset.metadata.distribution] == ["ab" * 32] * 2


def test_sealing_comes_first_and_nothing_may_be_missing(journal, bodies, tmp_path):
    fill(journal, bodies)
    with pytest.raises(UsageError, match="no seal"):
        write_bundle(journal.folder.parent, tmp_path / "x.zip", journal)
    project = sealed(journal, bodies)
    (project / "runs/target/metrics/a.parquet").unlink()
    with pytest.raises(PortolanError, match="is missing"):
        write_bundle(project, tmp_path / "x.zip", journal)
    assert not (tmp_path / "x.zip").exists()


BARE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cryptography", "securesystemslib", "httpcore2",
                                      "rfc3161_client", "rocrate", "mlcroissant", "jax"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name in ("cryptography", "securesystemslib") else find(name, package))
sys.argv = ["portolan", "verify", sys.argv[1]]
from portolan.cli import main
main()
"""


def test_without_signature_libraries_it_is_unsigned(bundle):
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(bundle)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith("unsigned")
