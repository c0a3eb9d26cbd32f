"""One changed byte anywhere in what the record names is found, and its place is said."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pipeline.conftest import Finished
from tests.pipeline.tools import Cli, Result

PLACES = {
    "metrics segment": "runs/target-*/metrics/*.parquet",
    "metrics segment of a rung": "runs/rung-d64-*/metrics/*.parquet",
    "array of a checkpoint": "runs/target-*/checkpoints/permanent/step-*/attempt-*/arrays/*/0*",
    "manifest of a checkpoint": "runs/target-*/checkpoints/permanent/step-*/attempt-*/*.json",
    "token shard": "corpus/tokens/*/**/*.arrow",
    "held-out token shard": "corpus/heldout-tokens/*/**/*.arrow",
    "manifest of the documents": "corpus/documents/train_*/manifest.json",
    "tokenizer": "corpus/tokenizer/*.json",
    "corpus summary": "corpus/summary.json",
    "forecast": "forecasts/*.json",
    "score": "runs/target-*/score.json",
    "success mark": "runs/target-*/finished.json",
    "plan of a run": "runs/rung-d48-s1-*/run.json",
}


@pytest.fixture(scope="module")
def copy(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose files every test puts back as they were."""
    return Path(shutil.copytree(finished.root, tmp_path_factory.mktemp("tamper") / "project"))


@pytest.fixture
def verify(copy: Path, cli: Cli):
    def call(*options: object) -> Result:
        return cli("-C", copy, "verify", *options)

    yield call
    assert call().code == 0


@contextlib.contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Inside, the file holds `content`; afterwards it is as before."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def flip(content: bytes, position: int) -> bytes:
    """The content with the lowest bit of one byte changed."""
    changed = bytearray(content)
    changed[position] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_flipped_byte_is_found_and_its_file_is_named(place, where, copy, verify):
    path = max(copy.glob(PLACES[place]), key=lambda found: found.stat().st_size)
    content = path.read_bytes()
    position = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[where]
    with replaced(path, flip(content, position)):
        done = verify()
    assert done.code == 1
    name = path.relative_to(copy).as_posix()
    assert [line for line in done.out.splitlines() if ": changed" in line] == [f"{name}: changed"]


def test_missing_and_shortened_files_are_named(copy, verify):
    (segment, *_) = (copy / "runs").glob("target-*/metrics/*.parquet")
    content, name = segment.read_bytes(), segment.relative_to(copy).as_posix()
    with replaced(segment, content[:-1]):
        done = verify()
    assert done.code == 1
    assert f"{name}: truncated ({len(content) - 1} of {len(content)} bytes)" in done.out
    with replaced(segment, content):
        segment.unlink()
        done = verify()
    assert (done.code, f"{name}: missing" in done.out) == (1, True)


@pytest.mark.parametrize("line", [0, 10, -1])
def test_flipped_byte_in_the_journal_names_the_line(line, copy, verify):
    path = copy / "record" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = line % len(lines)
    lines[number] = flip(lines[number], len(lines[number]) // 2)
    with replaced(path, b"".join(lines)):
        done = verify()
    assert done.code == 1
    assert done.out.startswith(f"broken({number}, ")


def test_dropped_and_reordered_lines_are_found(copy, verify):
    path = copy / "record" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with replaced(path, b"".join(lines[:20] + lines[21:])):
        done = verify()
    assert (done.code, done.out.startswith("broken(20, ")) == (1, True)
    lines[30], lines[31] = lines[31], lines[30]
    with replaced(path, b"".join(lines)):
        done = verify()
    assert (done.code, done.out.startswith("broken(30, ")) == (1, True)


def signed_seqs(copy: Path) -> dict[int, Path]:
    heads = (copy / "record" / "heads").glob("*.dsse.json")
    return {int(path.name.split(".")[0]): path for path in heads}


def test_cut_end_is_found_by_the_signed_heads(copy, verify):
    path = copy / "record" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with replaced(path, b"".join(lines[:-1])):
        done = verify()
    assert (done.code, done.out.startswith("truncated(")) == (1, True)


def test_end_cut_together_with_its_heads_is_found_only_against_a_held_head(copy, verify, tmp_path):
    path = copy / "record" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    seqs = signed_seqs(copy)
    newest, *_, kept = sorted(seqs, reverse=True)[:4]
    held = tmp_path / "held.dsse.json"
    shutil.copy(seqs[newest], held)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(path, b"".join(lines[: kept + 1])))
        for seq, head in seqs.items():
            if seq > kept:
                stack.enter_context(replaced(head, head.read_bytes()))
                head.unlink()
        unnoticed, noticed = verify(), verify("--head", held)
    assert unnoticed.code == 0
    assert noticed.code == 1
    assert noticed.out.startswith(f"truncated({newest}, {kept + 1})")
    assert verify("--head", held).code == 0


def test_changed_head_is_a_bad_signature(copy, verify):
    seqs = signed_seqs(copy)
    head = seqs[max(seqs)]
    content = head.read_bytes()
    with replaced(head, content.replace(b'"sig":"', b'"sig":"AAAA', 1)):
        done = verify()
    assert done.code == 1
    assert done.out.startswith("bad_signature")


def test_unsigned_record_and_torn_tail_have_exit_codes_of_their_own(copy, verify):
    with contextlib.ExitStack() as stack:
        for head in signed_seqs(copy).values():
            stack.enter_context(replaced(head, head.read_bytes()))
            head.unlink()
        done = verify()
    assert (done.code, done.out.startswith("unsigned")) == (4, True)
    path = copy / "record" / "journal.jsonl"
    with replaced(path, path.read_bytes() + b'{"body":{"na'):
        done = verify()
    assert (done.code, done.out.startswith("torn_tail")) == (5, True)
    done = verify("--head", copy / "none.json")
    assert (done.code, "does not exist" in done.err) == (2, True)
