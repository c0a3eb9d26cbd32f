import json
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.record.web import serving

from portolan.errors import UsageError
from portolan.record.verify import verify_journal, verify_project
from portolan.record.witness import (
    WitnessError,
    add_witness,
    check_witnesses,
    independent_witnesses,
    statement_of,
)

AUTHORITY = """\
[tsa]
default_tsa = here
[here]
dir = {folder}
serial = $dir/serial
crypto_device = builtin
signer_cert = $dir/tsa.pem
signer_key = $dir/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
accuracy = secs:1
ess_cert_id_chain = no
[stamping]
extendedKeyUsage = critical,timeStamping
keyUsage = critical,digitalSignature
basicConstraints = critical,CA:false
[authority]
basicConstraints = critical,CA:true
keyUsage = critical,keyCertSign
"""


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path) -> Path:
    """A certificate authority and a time-stamping certificate under it."""
    folder.mkdir()
    (folder / "serial").write_text("01\n")
    (folder / "tsa.cnf").write_text(AUTHORITY.format(folder=folder))
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    common = ("-config", "tsa.cnf")
    (folder / "tsa.cnf").write_text(
        (folder / "tsa.cnf").read_text() + "[req]\ndistinguished_name = name\n[name]\n"
    )
    openssl(
        folder, "req", "-x509", *new, *common, "-extensions", "authority", "-days", "3650",
        "-subj", "/CN=Test Root", "-keyout", "ca.key", "-out", "ca.pem",
    )  # fmt: skip
    openssl(
        folder, "req", *new, *common, "-subj", "/CN=Test Clock", "-keyout", "tsa.key",
        "-out", "tsa.csr",
    )  # fmt: skip
    openssl(
        folder, "x509", "-req", "-in", "tsa.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
        "-set_serial", "2", "-days", "3650", "-extfile", "tsa.cnf", "-extensions", "stamping",
        "-out", "tsa.pem",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command as a time-stamping authority")
    return make_authority(tmp_path_factory.mktemp("tsa") / "a")


@pytest.fixture(scope="module")
def stamping(authority):
    """A server that answers time-stamp requests with `openssl ts`."""

    class Stamper(BaseHTTPRequestHandler):
        web = None

        def log_message(self, format, *arguments):
            pass

        def do_POST(self):
            query = self.rfile.read(int(self.headers["Content-Length"]))
            self.web.requests.append(("POST", self.path, dict(self.headers)))
            (authority / "q.tsq").write_bytes(query)
            openssl(
                authority, "ts", "-reply", "-config", "tsa.cnf", "-queryfile", "q.tsq",
                "-out", "r.tsr",
            )  # fmt: skip
            body = (authority / "r.tsr").read_bytes()
            if self.path == "/other":
                body = (authority / "kept.tsr").read_bytes()
            (authority / "kept.tsr").write_bytes(body)
            self.send_response(200 if self.path != "/busy" else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Stamper) as web:
        yield web


@pytest.fixture
def registered(journal, bodies):
    """A journal whose last line is a registration."""
    journal.append("registration", bodies["registration"])
    journal.sign_head()
    return journal


def checked(journal, roots=None):
    hashes = {record.seq: record.line_hash for record in journal.records()}
    return check_witnesses(journal.folder, journal.head.journal, hashes, roots)


def test_a_time_stamp_makes_a_registration_witnessed(registered, bodies, authority, stamping):
    path = add_witness(registered.folder, registered.head, "rfc3161", stamping.url)
    assert path.name == "1-rfc3161.json"
    assert add_witness(registered.folder, registered.head, "rfc3161", "http://nowhere") == path
    registered.append("run", bodies["run"])
    registered.append("attempt", bodies["attempt"])
    root = authority / "ca.pem"
    project = registered.folder.parent
    report = verify_project(project, tsa_roots=root)
    assert report.exit_code == 0 and list(report.grades.values()) == ["witnessed"]
    assert report.witnesses[0].state == "valid" and "Test Clock" in report.witnesses[0].remark
    # Without the root that the reader trusts, the stamp proves nothing.
    for roots in (None, authority / "tsa.pem"):
        report = verify_project(project, tsa_roots=roots)
        assert list(report.grades.values()) == ["chained"] and report.exit_code == 0
        assert report.witnesses[0].state == "unchecked"
    with pytest.raises(UsageError, match="no certificate"):
        verify_project(project, tsa_roots=registered.path)


def test_openssl_agrees_with_the_receipt(registered, authority, stamping, tmp_path):
    """The procedure by hand of docs/record-format.md."""
    add_witness(registered.folder, registered.head, "rfc3161", stamping.url)
    (tmp_path / "statement").write_bytes(statement_of(registered.head))
    receipt = registered.folder / "witness" / "1-rfc3161.tsr"
    openssl(
        tmp_path, "ts", "-verify", "-data", "statement", "-in", str(receipt),
        "-CAfile", str(authority / "ca.pem"),
    )  # fmt: skip


def test_false_time_stamps(registered, authority, stamping):
    folder = registered.folder
    with pytest.raises(WitnessError, match="status 503"):
        add_witness(folder, registered.head, "rfc3161", stamping.url + "/busy")
    with pytest.raises(WitnessError, match=r"nonce|something else"):
        add_witness(folder, registered.head, "rfc3161", stamping.url + "/other")
    with pytest.raises(WitnessError, match="no connection"):
        add_witness(folder, registered.head, "rfc3161", "http://127.0.0.1:9/")
    path = add_witness(folder, registered.head, "rfc3161", stamping.url)
    content = (folder / "witness" / "1-rfc3161.tsr").read_bytes()
    root = authority / "ca.pem"
    for damage in (b"", content[:100], b"x" * 50, content[:-20] + b"y" * 20):
        (folder / "witness" / "1-rfc3161.tsr").write_bytes(damage)
        (found,) = checked(registered, root)
        assert found.state in ("invalid", "unchecked") and not independent_witnesses([found])
    (folder / "witness" / "1-rfc3161.tsr").write_bytes(content)
    receipt = json.loads(path.read_text())
    path.write_text(json.dumps(receipt | {"time": "2020-01-01T00:00:00.000Z"}))
    (found,) = checked(registered, root)
    assert (found.state, "2020-01-01" in found.remark) == ("invalid", True)


def test_without_the_library_a_stamp_stays_unchecked(registered, stamping, authority, monkeypatch):
    add_witness(registered.folder, registered.head, "rfc3161", stamping.url)
    monkeypatch.setitem(sys.modules, "rfc3161_client", None)
    (found,) = checked(registered, authority / "ca.pem")
    assert (found.state, "not installed" in found.remark) == ("unchecked", True)
    shutil.rmtree(registered.folder / "witness")
    with pytest.raises(WitnessError, match="not installed"):
        add_witness(registered.folder, registered.head, "rfc3161", stamping.url)


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    for arguments in (
        ("init", "-q"),
        ("config", "user.name", "Test"),
        ("config", "user.email", "test@example.org"),
        ("commit", "-q", "--allow-empty", "-m", "first"),
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_git_tag_holds_the_head_and_claims_no_time(registered, repository):
    add_witness(registered.folder, registered.head, "git", str(repository))
    (found,) = checked(registered)
    assert (found.state, found.independent) == ("valid", False)
    tag = f"portolan/{registered.head.journal[:16]}/1"
    said = subprocess.run(
        ["git", "rev-parse", tag], cwd=repository, check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() in found.remark
    assert list(verify_project(registered.folder.parent).grades.values()) == ["chained"]
    raw = registered.folder / "witness" / "1-git.tag"
    raw.write_bytes(raw.read_bytes().replace(b'"seq":1', b'"seq":2'))
    assert checked(registered)[0].state == "invalid"
    shutil.rmtree(registered.folder / "witness")
    with pytest.raises(WitnessError, match="git"):
        add_witness(registered.folder, registered.head, "git", str(repository.parent))


def test_a_second_folder_reveals_a_rewritten_journal(registered, tmp_path, bodies):
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(WitnessError, match="not a folder"):
        add_witness(registered.folder, registered.head, "folder", str(elsewhere))
    elsewhere.mkdir()
    add_witness(registered.folder, registered.head, "folder", str(elsewhere))
    assert checked(registered)[0].state == "valid"
    (copy,) = elsewhere.iterdir()
    assert copy.read_bytes() == statement_of(registered.head)
    copy.write_bytes(b"{}")
    shutil.rmtree(registered.folder / "witness")
    with pytest.raises(WitnessError, match="rewritten"):
        add_witness(registered.folder, registered.head, "folder", str(elsewhere))


def test_receipts_reveal_a_cut_journal_and_forged_ones_are_named(registered, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = add_witness(registered.folder, registered.head, "folder", str(tmp_path / "elsewhere"))
    lines = registered.path.read_bytes().splitlines(keepends=True)
    for head in (registered.folder / "heads").iterdir():
        head.unlink()
    registered.path.write_bytes(lines[0])
    assert str(verify_journal(registered.folder)) == "truncated(1, 1)"
    registered.path.write_bytes(b"".join(lines))
    receipt = json.loads(path.read_text())
    forged = [
        receipt | {"head": "0" * 64},
        receipt | {"seq": True},
        receipt | {"kind": "../../x"},
        receipt | {"more": 1},
        [],
    ]
    for value in forged:
        path.write_text(json.dumps(value))
        report = verify_project(registered.folder.parent)
        assert report.exit_code == 1, value
        assert [p.place for p in report.problems] == ["record/witness/1-folder.json"]
    path.write_text("[" * 100_000)
    assert verify_project(registered.folder.parent).exit_code == 1
