"""Programs kept between processes, found again and never a reason to fail."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from portolan.train import programs

HIT = "/jax/compilation_cache/cache_hits"
SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def hits(monkeypatch):
    """Events of programs found; JAX knows of no folder, and keeps programs however small."""
    events: list[str] = []

    def listen(event: str, **_) -> None:
        if event == HIT:
            events.append(event)

    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setattr(programs, "MIN_COMPILE_SECONDS", 0)
    monkeypatch.setattr(programs, "_kept", set())
    jax.monitoring.register_event_listener(listen)
    forget()
    yield events
    jax.monitoring.unregister_event_listener(listen)
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


def forget() -> None:
    """Be like a new process."""
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)


def compute(folder: Path) -> bytes:
    """The bytes of a result, its program compiled or found in `folder`."""
    forget()
    programs.keep_programs(folder)
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    out = np.asarray(jax.jit(lambda x: jnp.tanh(x @ x) @ x)(x)).tobytes()
    programs.seal_programs()
    return out


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{programs.ENTRY_SUFFIX}"))


def test_a_program_is_found_again_and_gives_the_same_bytes(hits, tmp_path):
    folder = tmp_path / "deep" / "programs"
    first = compute(folder)
    assert (len(hits), len(entries(folder))) == (0, 1)
    assert compute(folder) == first
    assert len(hits) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "seal", "unsealed"])
def test_a_damaged_program_is_compiled_again_and_replaced(damage, hits, tmp_path):
    first = compute(tmp_path)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    seal = next(tmp_path.glob(f"*{programs.SEAL_SUFFIX}"))
    middle = len(content) // 2
    changed = {
        "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "cut": content[:middle],
        "empty": b"",
    }
    entry.write_bytes(changed.get(damage, content))
    if damage == "seal":
        seal.write_text("0" * 10)
    if damage == "unsealed":
        seal.unlink()
    assert compute(tmp_path) == first
    assert not hits
    assert compute(tmp_path) == first
    assert len(hits) == 1


def test_a_program_cut_short_while_in_use_is_not_sealed(hits, tmp_path):
    compute(tmp_path)
    (entry,) = entries(tmp_path)
    entry.write_bytes(entry.read_bytes()[:-9])
    next(tmp_path.glob(f"*{programs.SEAL_SUFFIX}")).unlink()
    programs.seal_programs()
    assert not list(tmp_path.glob(f"*{programs.SEAL_SUFFIX}"))


def test_a_folder_that_cannot_be_made_is_done_without(hits, tmp_path):
    (tmp_path / "file").write_text("")
    compute(tmp_path / "file" / "programs")
    assert jax.config.jax_compilation_cache_dir is None


def test_the_oldest_programs_go_first(hits, tmp_path, monkeypatch):
    compute(tmp_path)
    (entry,) = entries(tmp_path)
    monkeypatch.setattr(programs, "MAX_KEPT_BYTES", entry.stat().st_size)
    compute(tmp_path)
    assert entries(tmp_path) == [entry]
    monkeypatch.setattr(programs, "MAX_KEPT_BYTES", 1)
    forget()
    programs.keep_programs(tmp_path)
    assert not list(tmp_path.glob("*-*"))


def test_a_folder_that_jax_was_told_of_stays(hits, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "other"))
    programs.keep_programs(tmp_path / "mine")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "other")
    assert not (tmp_path / "mine").exists()
