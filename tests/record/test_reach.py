import hashlib

import pytest
from tests.record.web import BODY, SHA256, serving

from portolan.record.anonymous import AnonymousClient
from portolan.record.journal import Journal
from portolan.record.reach import Limits, Reacher, url_expiry
from portolan.record.reach_locators import (
    Citation,
    LocatorError,
    cited_locators,
    request_url,
    without_signature,
)
from portolan.record.reach_report import claim_locators, latest_reach, record_reach, summarize_reach

ALLOWED_HEADERS = {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection", "Range"}


@pytest.fixture(scope="module")
def web():
    with serving() as started:
        yield started


@pytest.fixture
def reacher(tmp_path):
    waits: list[float] = []
    client = AnonymousClient(request_seconds=0.8, idle_seconds=0.4, allow_private=True)
    made = Reacher(tmp_path, client, Limits(max_bytes=10_000), sleep=waits.append)
    made.waits = waits
    return made


def ask(reacher, web, path, **fields):
    return reacher.reach(Citation(web.url + path, ["claim:x"], **fields))


CASES = [
    ("/data.csv", "public", "first seen"),
    ("/no-head.csv", "public", "first seen"),
    ("/to/302/data.csv", "public", "first seen"),
    ("/to/303/to/307/data.csv", "public", "first seen"),
    ("/to/301/data.csv", "moved", "moved to"),
    ("/to/308/to/302/data.csv", "moved", "moved to"),
    ("/to/301/status/404", "gone", "status 404"),
    ("/status/401", "auth", "status 401"),
    ("/status/403", "auth", "status 403"),
    ("/gated.bin", "gated", "status 403"),
    ("/status/404", "gone", "status 404"),
    ("/status/410", "gone", "status 410"),
    ("/status/405", "unknown", "status 405"),
    ("/status/416", "unknown", "status 416"),
    ("/status/429", "unknown", "status 429"),
    ("/status/500", "unknown", "status 500"),
    ("/status/503", "unknown", "status 503"),
    ("/busy-once", "public", "first seen"),
    ("/slow", "unknown", "it timed out"),
    ("/drip", "unknown", "it timed out"),
    ("/cut", "unknown", "cut off"),
    ("/terms.csv", "gated", "a page"),
    ("/login.csv", "auth", "a page"),
    ("/error.csv", "unknown", "a page"),
    ("/packed", "unknown", "packed"),
    ("/to/302/to/302/../../to/302/a", "public", "first seen"),
    ("/elsewhere", "unknown", "not http"),
    ("/with-login", "unknown", "login"),
    ("/endless", "unknown", "more than 10"),
    ("/malformed", "unknown", "malformed"),
    ("/no-port", "unknown", "cannot be asked"),
]


@pytest.mark.parametrize(("path", "reachability", "reason"), CASES)
def test_classes(web, reacher, path, reachability, reason):
    finding = ask(reacher, web, path)
    assert (finding.reachability, reason in finding.reason) == (reachability, True), finding
    if reachability in ("public", "moved"):
        assert finding.sha256 == SHA256 and finding.num_bytes == len(BODY) and finding.complete


def test_unknown_is_asked_three_times_and_a_plain_refusal_once(web, reacher):
    assert ask(reacher, web, "/status/502").tries == 3
    assert web.asked("/status/502") == 3
    assert ask(reacher, web, "/status/401").tries == 1


def test_retry_after_is_obeyed_within_its_bound(web, reacher):
    ask(reacher, web, "/status/429")
    assert [wait for wait in reacher.waits if wait > 5] == [7.0, 7.0]
    reacher.waits.clear()
    reacher.limits = Limits(max_retry_after_seconds=2.0, pause_seconds=0.0)
    ask(reacher, web, "/status/429")
    assert max(reacher.waits) == 2.0


def test_expected_digest(web, reacher):
    assert ask(reacher, web, "/data.csv", sha256=SHA256).reason == "equal digest"
    assert ask(reacher, web, "/data.csv", sha256="0" * 64).reachability == "changed"
    assert ask(reacher, web, "/to/302/data.csv", sha256="0" * 64).reachability == "changed"
    withheld = ask(reacher, web, "/status/403", withheld_since="2026-08-24")
    assert withheld.reachability == "withheld_by_policy" and "2026-08-24" in withheld.reason


def test_redirects_are_stored_and_loops_end(web, reacher):
    finding = ask(reacher, web, "/to/301/to/302/data.csv")
    assert finding.status == 301
    assert finding.hops == [(301, f"{web.url}/to/302/data.csv"), (302, f"{web.url}/data.csv")]
    loop = f"{web.url}/to/302/to/302/x"
    reacher.client = _Looping(reacher.client, loop)
    finding = reacher.reach(Citation(loop, []))
    assert (finding.reachability, finding.reason) == ("unknown", "it redirects in a circle")
    assert finding.tries == 1


class _Looping:
    """Answers every request with a redirect to one address."""

    def __init__(self, client, target):
        self.client, self.target = client, target

    def request(self, method, url, headers=None):
        root = self.target.partition("/to/")[0]
        path = self.target.removeprefix(root)
        return self.client.request(method, f"{root}/to/302{path}", headers=headers)


def test_a_large_body_is_read_up_to_the_limit_and_that_is_said(web, reacher):
    reacher.limits = Limits(max_bytes=500, pause_seconds=0.0)
    finding = ask(reacher, web, "/data.csv")
    assert (finding.reachability, finding.complete, finding.num_bytes) == ("public", False, 500)
    assert finding.sha256 == hashlib.sha256(BODY[:500]).hexdigest()
    assert "limit" in finding.reason
    assert ask(reacher, web, "/data.csv", sha256=SHA256).reachability == "unknown"
    # HEAD states a terabyte: a range is asked for, refused once (416), then the whole body read.
    finding = ask(reacher, web, "/large.csv")
    assert (finding.reachability, finding.num_bytes) == ("public", 500)
    ranges = [headers.get("Range") for _, path, headers in web.requests if path == "/large.csv"]
    assert ranges == [None, "bytes=0-499", None]


def test_no_credential_ever_leaves(web, reacher, monkeypatch, tmp_path):
    """Not from netrc, the environment, proxies, cookies that a server sets, or the locator."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9")
    for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret")
    before = len(web.requests)
    for path in ("/cookie", "/cookie2", "/status/401", "/data.csv"):
        ask(reacher, web, path)
    assert len(web.requests) > before + 4
    for _, _, headers in web.requests:
        assert set(headers) <= ALLOWED_HEADERS
        assert headers["User-Agent"].startswith("portolan-reach/")
        assert "secret" not in str(headers)
    host = web.url.partition("://")[2]
    for locator in (f"http://me:pw@{host}/data.csv", f"{web.url}/data.csv?X-Amz-Signature=ab"):
        count = len(web.requests)
        finding = reacher.reach(Citation(locator, []))
        assert (finding.reachability, len(web.requests)) == ("auth", count)
        assert "pw" not in finding.reason


def test_private_addresses_are_refused_unless_allowed(web, tmp_path):
    count = len(web.requests)
    finding = Reacher(tmp_path).reach(Citation(web.url + "/data.csv", []))
    assert finding.reachability == "unknown" and "private address" in finding.reason
    assert len(web.requests) == count


def test_rate_and_total_time_are_bounded(web, tmp_path):
    waits = []
    limits = Limits(pause_seconds=0.2, total_seconds=3600)
    client = AnonymousClient(allow_private=True)
    reacher = Reacher(tmp_path, client, limits, sleep=waits.append)
    list(reacher.reach_all([Citation(web.url + "/data.csv", [])] * 3))
    assert len(waits) == 5 and all(0 < wait <= 0.2 for wait in waits)
    late = Reacher(tmp_path, client, Limits(total_seconds=0))
    finding = late.reach(Citation(web.url + "/data.csv", []))
    assert finding.reachability == "unknown" and "time" in finding.reason


@pytest.mark.parametrize(
    ("locator", "url"),
    [
        ("https://a.org/x y.csv#part", "https://a.org/x%20y.csv"),
        ("github.com/o/r", "https://github.com/o/r"),
        ("s3://bucket/a/b c.csv", "https://bucket.s3.amazonaws.com/a/b%20c.csv"),
        ("s3://my.bucket/a", "https://s3.amazonaws.com/my.bucket/a"),
        ("gs://bucket/a/b", "https://storage.googleapis.com/bucket/a/b"),
        ("hf://org/model/w.bin", "https://huggingface.co/org/model/resolve/main/w.bin"),
        (
            "hf://datasets/org/set@refs%2Fx/a.csv",
            "https://huggingface.co/datasets/org/set/resolve/refs%252Fx/a.csv",
        ),
        ("hf://org/model", "https://huggingface.co/org/model"),
        (
            "https://b\u00fccher.example/\u00fc?q=\u00fc",
            "https://xn--bcher-kva.example/%C3%BC?q=%C3%BC",
        ),
    ],
)
def test_locators_become_anonymous_addresses(locator, url):
    assert request_url(locator) == url


@pytest.mark.parametrize(
    "locator",
    [
        "marin #8435",
        "ftp://a.org/x",
        "https:///x",
        "s3://b\nad/x",
        "hf://org",
        "x" * 9,
        "https://[bad/x",
        "https://a.org:99999/x",
        "https://a.org:0/",
        "https://a\x00b.org/",
    ],
)
def test_other_texts_are_no_locators(locator, tmp_path):
    with pytest.raises(LocatorError):
        request_url(locator)
    assert Reacher(tmp_path).reach(Citation(locator, [])).reachability == "unknown"


def test_signed_addresses_are_stored_without_their_signature():
    signed = "https://b.org/x?X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-Signature=abc&v=1"
    assert "abc" not in without_signature(signed) and "v=1" in without_signature(signed)
    assert url_expiry(signed) == "2026-01-01T00:01:00.000Z"
    assert url_expiry("https://b.org/x?Expires=1767225600") == "2026-01-01T00:00:00.000Z"
    assert url_expiry("https://b.org/x?Expires=soon") == "unknown"
    assert url_expiry("https://b.org/x") == "not_stated"


def test_files_stay_inside_the_project(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.csv").write_bytes(BODY)
    (tmp_path / "outside.csv").write_bytes(BODY)
    (project / "link.csv").symlink_to(tmp_path / "outside.csv")
    reacher = Reacher(project)
    classes = {
        locator: reacher.reach(Citation(locator, [], sha256=SHA256)).reachability
        for locator in ("file:a.csv", "file:none.csv", "file:../outside.csv", "file:link.csv")
    }
    assert list(classes.values()) == ["public", "gone", "unknown", "unknown"]
    assert reacher.reach(Citation("file:a.csv", [], sha256="0" * 64)).reachability == "changed"
    outside = reacher.reach(Citation(f"file://{tmp_path}/outside.csv", []))
    assert outside.reachability == "unknown" and "outside" in outside.reason


def claim(number, locator, **fields):
    return {
        "statement": f"statement {number}",
        "subject": "the run",
        "predicate": f"property {number}",
        "made_by": "the owners",
        "date": "2026-08-24",
        "locator": locator,
        "layer": "claimed",
        **fields,
    }


def test_findings_enter_the_journal_and_are_found_again(journal: Journal, web, reacher):
    good, gone = web.url + "/data.csv", web.url + "/status/404"
    kept = web.url + "/status/403"
    journal.append("claim", claim(1, good, snapshot_digest=SHA256))
    journal.append("claim", claim(2, good))
    old = journal.append("claim", claim(3, web.url + "/never-asked"))
    journal.append("claim", claim(3, gone), supersedes=[old])
    journal.append("claim", claim(4, "not_stated"))
    journal.append("claim", claim(5, kept, subject=web.url + "/status", predicate="withheld"))
    citations = cited_locators(journal.records())
    assert [c.locator for c in citations] == [good, gone, kept]
    assert citations[0].sha256 == SHA256 and len(citations[0].cited_by) == 2
    findings = list(reacher.reach_all(citations))
    report = summarize_reach(claim_locators(journal.records()), findings)
    assert (report.num_claims, report.num_fetchable, report.exit_code) == (5, 2, 9)
    assert report.counts == {"gone": 1, "public": 1, "withheld_by_policy": 1}
    assert "2 of 5 claims (40 %)" in report.to_text()
    record_reach(journal, report, "ab" * 32)
    expected = {good: "public", gone: "gone", kept: "withheld_by_policy"}
    assert latest_reach(journal.folder, journal.records()) == expected
    (evidence,) = (r.body for r in journal.records() if r.type == "evidence")
    assert evidence["snapshot_digest"] == SHA256 and evidence["access"] == "anonymous"
    assert len(evidence["refs"]) == 2
