"""Checkpoints: bitwise round trip, damage, deletion rules, disk errors, refusals."""

import errno
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from portolan.errors import ResumeRefused, StorageError, UsageError
from portolan.train import arrays as array_files
from portolan.train import staging
from portolan.train.checkpoint import CheckpointInvalid, CheckpointStore, content_digest

METADATA = {"completed": 10, "group_table_digest": "abc", "data_cursor": {"step": 10}, "x": 0.1}


def make_state(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return {
        "embed": random.standard_normal((8, 4)).astype(np.float32),
        "blocks/w": jnp.asarray(random.standard_normal((2, 4, 4)), jnp.bfloat16),
        "opt/count": np.int32(seed),
        "router_state/beta": np.zeros((2, 4), np.float32),
    }


def open_store(folder: Path, **options) -> tuple[CheckpointStore, list[tuple[str, str]]]:
    events: list[tuple[str, str]] = []
    return CheckpointStore(folder, on_event=lambda *event: events.append(event), **options), events


def save_steps(folder: Path, *steps: int, kind: str = "permanent") -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in steps:
        store.save(make_state(step), step, kind=kind, metadata=METADATA | {"completed": step})
    return store


def attempt_folder(folder: Path, step: int, kind: str = "permanent", attempt: int = 1) -> Path:
    return folder / f"checkpoints/{kind}/step-{step}/attempt-{attempt}"


BITS = {np.dtype(np.float32): np.uint32, np.dtype(ml_dtypes.bfloat16): np.uint16}


@st.composite
def leaves(draw):
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = draw(st.sampled_from([*BITS, np.dtype(np.int32), np.dtype(np.bool_)]))
    bits = draw(hnp.arrays(BITS.get(dtype, dtype), shape))
    return bits.view(dtype) if dtype in BITS else bits


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from(["a", "b/c", "b/0", "opt/m"]), leaves(), min_size=1))
def test_restored_leaves_are_bitwise_equal(tmp_path, state):
    store = CheckpointStore(tmp_path)
    step = store.watermarks().get("marked", 0) + 1
    store.save(state, step, kind="temporary", metadata={"step": step})
    restored, metadata = store.restore(state)
    assert metadata == {"step": step}
    assert list(restored) == sorted(state)
    for path, leaf in state.items():
        assert (restored[path].dtype, restored[path].shape) == (leaf.dtype, leaf.shape)
        assert restored[path].tobytes() == leaf.tobytes()


def test_content_digest_is_the_defined_one_and_ignores_attempt_time_and_order(tmp_path):
    state = {"b": np.array([[1, -2]], np.int32), "a/x": np.float32(1.5)}
    expected = hashlib.sha256(
        b'{"dtype":"float32","path":"a/x","shape":[]}'
        + bytes.fromhex("0000c03f")
        + b'{"dtype":"int32","path":"b","shape":[1,2]}'
        + bytes.fromhex("01000000feffffff")
    ).hexdigest()
    assert content_digest(state) == expected
    first = CheckpointStore(tmp_path / "one").save(state, 7, attempt=1, metadata={"a": 1})
    shuffled = {path: state[path] for path in sorted(state, reverse=True)}
    shuffled["b"] = np.asfortranarray(shuffled["b"].astype(">i4"))
    other = CheckpointStore(tmp_path / "two").save(shuffled, 9, attempt=4, kind="temporary")
    assert first.content_digest == other.content_digest == expected
    assert first.manifest_sha256 != other.manifest_sha256
    assert (other.folder.name, other.completeness) == ("attempt-4", "bytes_verified")


def test_manifest_describes_every_file_and_orbax_reads_the_arrays(tmp_path):
    import orbax.checkpoint

    saved = save_steps(tmp_path, 10).latest()
    manifest = json.loads((saved.folder / "manifest.json").read_text())
    listed = {file["path"]: file for file in manifest["files"]}
    on_disk = {
        p.relative_to(saved.folder).as_posix() for p in saved.folder.rglob("*") if p.is_file()
    }
    assert on_disk == {*listed, "manifest.json"}
    assert {file["leaf"] for file in listed.values()} == {"", *make_state()}
    assert manifest["step"] == {"completed": 10, "row": 9, "tracker": "unknown"}
    assert manifest["parent"] == {"step": 0, "content_digest": "fresh"}
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore((saved.folder / "arrays").absolute())
    assert np.array_equal(tree["embed"], make_state(10)["embed"])


def test_resume_goes_on_from_the_newest_over_both_roots(tmp_path):
    store, events = open_store(tmp_path)
    assert store.restore() is None and store.latest() is None
    store.save(make_state(1), 10, metadata={"completed": 10})
    store.save(make_state(2), 30, kind="temporary", metadata={"completed": 30})
    store.save(make_state(3), 20, metadata={"completed": 20})
    again, _ = open_store(tmp_path)
    state, metadata = again.restore()
    assert metadata == {"completed": 30} and content_digest(state) == content_digest(make_state(2))
    assert [kind for kind, _ in events] == ["save"] * 3
    saved = again.save(make_state(4), 40, metadata={"completed": 40})
    assert json.loads((saved.folder / "manifest.json").read_text())["parent"]["step"] == 30
    assert again.watermarks() == {
        "submitted": 40, "committed": 40, "marked": 40, "verified": 40, "restored": 30,
    }  # fmt: skip
    assert again.restore(step=20)[1] == {"completed": 20}
    with pytest.raises(ResumeRefused, match="no checkpoint of step 25"):
        again.restore(step=25)


def test_saving_the_same_again_writes_nothing_and_another_state_supersedes(tmp_path):
    store = save_steps(tmp_path, 10)
    first = store.latest()
    again = store.save(make_state(10), 10, metadata=METADATA)
    assert (again.folder, again.manifest_sha256) == (first.folder, first.manifest_sha256)
    other = store.save(make_state(11), 10, metadata=METADATA)
    assert other.folder.name == "attempt-2"
    assert sorted(p.name for p in other.folder.parent.iterdir()) == [
        "COMMIT", "COMMIT.1", "attempt-1", "attempt-2",
    ]  # fmt: skip
    assert content_digest(store.restore()[0]) == content_digest(make_state(11))


def damage_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.chmod(0o644)
    if how == "missing":
        path.unlink()
    else:
        damaged = {
            "empty": b"",
            "half": content[: len(content) // 2],
            "wrong": b'{"attempt": "one"}',
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        }
        path.write_bytes(damaged[how])


@pytest.mark.parametrize("how", ["empty", "half", "wrong", "missing", "flipped"])
@pytest.mark.parametrize("name", ["../COMMIT", "manifest.json", "arrays/embed/0.0"])
def test_damage_is_quarantined_named_and_an_older_checkpoint_restored(name, how, tmp_path):
    save_steps(tmp_path, 10, 20)
    folder = attempt_folder(tmp_path, 20)
    damage_file(folder / name, how)
    store, events = open_store(tmp_path)
    state, _ = store.restore()
    assert content_digest(state) == content_digest(make_state(10))
    kind, text = events[0]
    assert kind == "incident" and "permanent/step-20" in text and "left in place" in text
    if name.startswith("arrays"):
        assert "file arrays/embed/0.0 of leaf embed" in text
    # The writer reaches the same step again: a new attempt and the next free marker.
    saved = store.save(make_state(20), 20, metadata=METADATA)
    assert saved.folder.name == "attempt-2"
    state, _ = CheckpointStore(tmp_path).restore()
    assert content_digest(state) == content_digest(make_state(20))


def test_sampled_verification_is_reported_as_such(tmp_path):
    save_steps(tmp_path, 10)
    store, events = open_store(tmp_path)
    store.restore(verify="sampled")
    assert events == [
        ("restore", "restored permanent/step-10/attempt-1, bytes verified: sampled 1 of 9 files")
    ]


def test_verify_names_the_file_and_the_leaf(tmp_path):
    store = save_steps(tmp_path, 10)
    saved = store.latest()
    assert store.verify(saved).completeness == "bytes_verified"
    damage_file(saved.folder / "arrays/blocks.w/0.0.0", "flipped")
    with pytest.raises(CheckpointInvalid) as caught:
        store.verify(saved)
    assert (caught.value.file, caught.value.leaf) == ("arrays/blocks.w/0.0.0", "blocks/w")


def test_nothing_valid_is_refused_with_exit_code_3(tmp_path):
    save_steps(tmp_path, 10, 20)
    for step in (10, 20):
        damage_file(attempt_folder(tmp_path, step) / "arrays/embed/0.0", "flipped")
    store = CheckpointStore(tmp_path)
    with pytest.raises(ResumeRefused, match="none of 2 checkpoints") as caught:
        store.restore()
    assert caught.value.exit_code == 3
    assert store.restore(allow_fresh=True) is None


def test_empty_roots_with_a_lineage_are_refused(tmp_path):
    save_steps(tmp_path, 10)
    shutil.rmtree(tmp_path / "checkpoints/permanent")
    with pytest.raises(ResumeRefused, match="step 10 was saved once"):
        CheckpointStore(tmp_path).restore()
    shutil.rmtree(tmp_path / "checkpoints")
    assert CheckpointStore(tmp_path).restore() is None
    with pytest.raises(ResumeRefused, match="step 10 was saved once"):
        CheckpointStore(tmp_path).restore(lineage_step=10)
    assert CheckpointStore(tmp_path).restore(lineage_step=10, allow_fresh=True) is None


def test_unreadable_is_not_absent(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.match("*/step-20/attempt-1/manifest.json"):
            raise PermissionError(errno.EACCES, "refused", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*step-20"):
        CheckpointStore(tmp_path).restore()


def test_copy_without_marker_is_unknown_and_never_pruned(tmp_path):
    store = save_steps(tmp_path, 10, kind="temporary")
    copy = tmp_path / "checkpoints/temporary/step-15"
    shutil.copytree(tmp_path / "checkpoints/temporary/step-10", copy)
    (copy / "COMMIT").unlink()
    again, events = open_store(tmp_path)
    assert again.restore()[1]["completed"] == 10
    unknown = "temporary/step-15 is unknown, left in place: it has no COMMIT"
    assert events[0] == ("incident", unknown)
    for step in (20, 30, 40):
        store.save(make_state(step), step, kind="temporary", metadata={})
    assert copy.is_dir()
    assert [saved.step for saved in store.list_saved()] == [40, 30]


def test_only_unmarked_copies_are_refused(tmp_path):
    save_steps(tmp_path / "a", 10)
    shutil.copytree(attempt_folder(tmp_path / "a", 10), attempt_folder(tmp_path / "b", 10))
    with pytest.raises(ResumeRefused, match="none of 1 checkpoints"):
        CheckpointStore(tmp_path / "b").restore()


def test_another_model_or_group_table_is_refused_not_skipped(tmp_path):
    store = save_steps(tmp_path, 10, 20)
    schema = {path: (np.shape(leaf), leaf.dtype) for path, leaf in make_state().items()}
    assert store.restore(schema, expected_metadata={"group_table_digest": "abc"}) is not None
    changed = dict(schema) | {"embed": ((9, 4), "float32"), "extra": ((), "int32")}
    del changed["opt/count"]
    with pytest.raises(ResumeRefused) as caught:
        store.restore(changed)
    for text in (
        "permanent/step-20/attempt-1 was written by another recipe",
        "embed is float32[8, 4] there and float32[9, 4] here",
        "extra is not in the checkpoint",
        "opt/count is in the checkpoint only",
    ):
        assert text in caught.value.message
    with pytest.raises(ResumeRefused, match="group_table_digest is 'abc' there and 'abd' here"):
        store.restore(expected_metadata={"group_table_digest": "abd"})


@pytest.mark.parametrize("kind", ["permanent", "temporary"])
def test_full_disk_at_any_write_leaves_nothing_trusted(kind, tmp_path, monkeypatch):
    store, events = open_store(tmp_path)
    store.save(make_state(1), 10, kind=kind, metadata={})
    functions = [
        (array_files, "write_arrays"),
        (staging, "write_synced"),
        (staging, "link_or_copy"),
        (staging, "sync_paths"),
    ]
    calls = [0]
    limit = [0]

    def failing(original):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == limit[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **options)

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    failures = 0
    for limit[0] in range(1, 100):
        calls[0] = 0
        try:
            store.save(make_state(2), 20, kind=kind, attempt=1 + limit[0], metadata={})
            break
        except StorageError as error:
            failures += 1
            assert error.exit_code == 6 and "No space left" in error.message
            assert events[-1][0] == "incident" and "whole-job" in events[-1][1]
            assert CheckpointStore(tmp_path).latest().step == 10
            assert [p.name for p in (tmp_path / "checkpoints/staging").iterdir()] == ["lock"]
            left = list((tmp_path / f"checkpoints/{kind}").glob("step-20/*"))
            assert kind == "permanent" or not left
    assert failures > 10
    assert CheckpointStore(tmp_path).latest().step == 20


def test_save_that_cannot_fit_is_refused_before_it_begins(tmp_path):
    free = [10**9]
    store, events = open_store(tmp_path, free_bytes=lambda: free[0])
    phases = []
    store.save(make_state(1), 10, metadata={})
    store._phase = phases.append
    needed = sum(np.asarray(leaf).nbytes + 8192 for leaf in make_state().values())
    free[0] = 2 * needed - 1
    store.save(make_state(2), 20, metadata={})
    assert [kind for kind, _ in events] == ["save", "quota", "save"]
    assert events[1][1].startswith("H18")
    phases.clear()
    free[0] = needed - 1
    with pytest.raises(StorageError, match=f"needs {needed} bytes, {needed - 1} are free"):
        store.save(make_state(3), 30, metadata={})
    assert phases == ["P1"]
    assert [kind for kind, _ in events[3:]] == ["quota", "incident"]
    assert [saved.step for saved in store.list_saved()] == [20, 10]


def test_denied_delete_does_not_fail_a_save(tmp_path, monkeypatch):
    store, events = open_store(tmp_path)

    def denying(original):
        def call(path, *arguments, **options):
            if Path(path).name.startswith(".watermarks"):
                return original(path, *arguments, **options)
            raise PermissionError(errno.EACCES, "deletion denied")

        return call

    for step in (10, 20):
        store.save(make_state(step), step, kind="temporary", metadata={})
    for name in ("rename", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, denying(getattr(os, name)))
    store.save(make_state(30), 30, kind="temporary", metadata={})
    store.save(make_state(40), 40, kind="permanent", metadata={})
    assert [saved.step for saved in store.list_saved()] == [40, 30, 20, 10]
    assert "pruning after step 30 failed, the save holds" in events[-3][1]
    monkeypatch.undo()
    assert store.prune() == [10]


def test_protected_root_sees_only_creations(tmp_path):
    """20 saves and prunes; every delete and rename of the interpreter is recorded."""
    removed, recording = [], [True]

    def record(event: str, arguments: tuple) -> None:
        if recording and event in ("os.remove", "os.rename", "os.rmdir", "shutil.rmtree"):
            removed.extend(str(argument) for argument in arguments[:2])

    sys.addaudithook(record)
    store = CheckpointStore(tmp_path)
    seen: dict[Path, tuple] = {}
    for number in range(1, 21):
        kind = "permanent" if number % 4 == 0 else "temporary"
        store.save(make_state(number), number, kind=kind, metadata={})
        files = [p for p in (tmp_path / "checkpoints/permanent").rglob("*") if p.is_file()]
        for path in files:
            status = path.stat()
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            assert seen.setdefault(path, identity) == identity
        assert set(files) == set(seen)
    recording.clear()
    assert removed
    assert not [path for path in removed if "checkpoints/permanent" in path]
    assert [saved.step for saved in store.list_saved()] == [20, 19, 18, 16, 12, 8, 4]


def test_pinned_and_foreign_temporary_steps_are_not_pruned(tmp_path):
    store, events = open_store(tmp_path, keep_temporary=1)
    store.pinned.add(10)
    store.save(make_state(1), 10, kind="temporary", metadata={})
    store.save(make_state(2), 20, kind="temporary", metadata={})
    (tmp_path / "checkpoints/temporary/step-20/notes.txt").write_text("mine")
    store.save(make_state(3), 30, kind="temporary", metadata={})
    store.save(make_state(4), 40, kind="temporary", metadata={})
    assert [saved.step for saved in store.list_saved()] == [40, 30, 20, 10]
    assert ("incident", "temporary/step-20 is not pruned, it holds notes.txt") in events


def test_stale_staging_is_removed_at_open(tmp_path):
    save_steps(tmp_path, 10).close()
    stale = tmp_path / "checkpoints/staging/dead/arrays"
    stale.mkdir(parents=True)
    (stale / "x").write_text("half")
    CheckpointStore(tmp_path)
    assert not stale.parent.exists()


def test_copies_where_hard_links_are_impossible(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    save_steps(tmp_path, 10)
    assert content_digest(CheckpointStore(tmp_path).restore()[0]) == content_digest(make_state(10))


def test_event_callback_that_raises_costs_nothing(tmp_path, caplog):
    def broken(kind: str, text: str) -> None:
        raise RuntimeError("journal is read-only")

    store = CheckpointStore(tmp_path, on_event=broken)
    assert store.save(make_state(), 10, metadata={}).completeness == "bytes_verified"
    assert "checkpoint event lost: save" in caplog.text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "no leaves"),
        ({"a.b": np.ones(2)}, "state leaf 'a.b'"),
        ({"../x": np.ones(2)}, "state leaf '../x'"),
        ({"a": np.array(["text"])}, "state leaf a: type <U4 is not numeric"),
        ({"a": np.array([None])}, "state leaf a: type object is not numeric"),
    ],
)
def test_state_that_cannot_be_stored_is_named(state, message, tmp_path):
    with pytest.raises(UsageError) as caught:
        CheckpointStore(tmp_path).save(state, 1, metadata={})
    assert message in caught.value.message


def test_metadata_and_kind_are_checked_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        store.save(make_state(), 1, metadata={"loss": float("nan")})
    with pytest.raises(UsageError, match="checkpoint kind 'weekly'"):
        store.save(make_state(), 1, kind="weekly", metadata={})
    with pytest.raises(UsageError, match="keep_temporary is 0"):
        CheckpointStore(tmp_path, keep_temporary=0)
    assert not (tmp_path / "checkpoints").exists()
