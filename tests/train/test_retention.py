"""What to keep, when to save, how much room a save needs: arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.train.retention import (
    SaveSchedule,
    kept_steps,
    permanent_interval,
    required_free_bytes,
)

TIB = 2**40


def test_room_on_the_public_quota():
    """Quota 100 TiB, saves of 4,995.4 GiB every 6,000 steps: H18 after the 19th, 20 fit."""
    size = Fraction("4995.4") * 2**30
    quota = 100 * TIB
    free = [quota - number * size for number in range(22)]
    required = required_free_bytes(float(size))
    assert round(float(free[18] / TIB), 3) == 12.19
    assert round(float(free[19] / TIB), 3) == 7.312
    assert round(required / TIB, 3) == 9.757
    assert free[18] >= required > free[19] >= size
    assert free[20] >= 0 > free[21]
    assert required_free_bytes(100, growth_bytes_per_second=2.5, seconds_to_prune=60) == 350


def test_a_run_keeps_about_64_permanent_checkpoints():
    assert [permanent_interval(steps) for steps in (1, 64, 65, 300, 390_251)] == [1, 1, 2, 5, 6098]


steps = st.sets(st.integers(0, 40), max_size=8)


@given(steps, steps, st.integers(1, 3), steps)
def test_kept_set_never_shrinks_below_the_rule(temporary, permanent, keep, pinned):
    kept = kept_steps(temporary, permanent, keep_temporary=keep, pinned=pinned)
    assert kept <= temporary
    assert temporary & pinned <= kept
    newest_two = set(sorted(temporary | permanent)[-2:])
    assert newest_two <= kept | permanent
    assert len(kept) >= min(keep, len(temporary))
    # Pruning twice, or after a kill in the middle, removes nothing more.
    assert kept_steps(kept, permanent, keep_temporary=keep, pinned=pinned) == kept


def test_an_unreadable_newest_still_leaves_a_resume_point():
    assert kept_steps({10, 20, 30}, {5}, keep_temporary=2) == {20, 30}
    assert kept_steps({10, 20, 30}, {40, 50}, keep_temporary=1) == {30}
    assert kept_steps({10, 20, 30}, set(), keep_temporary=1) == {20, 30}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_permanent_by_step_temporary_by_time_final_always():
    clock = Clock()
    schedule = SaveSchedule(100, permanent_every=25, temporary_seconds=900, clock=clock)
    saved = []
    for completed in range(1, 101):
        clock.now += 60
        if kind := schedule.due(completed):
            saved.append((completed, kind))
            schedule.marked(completed, kind)
    assert saved == [
        (15, "temporary"),
        (25, "permanent"),
        (40, "temporary"),
        (50, "permanent"),
        (65, "temporary"),
        (75, "permanent"),
        (90, "temporary"),
        (100, "permanent"),
    ]


def test_failed_save_is_asked_for_again_after_a_minute():
    clock = Clock()
    schedule = SaveSchedule(100, permanent_every=25, start=10, clock=clock)
    assert schedule.due(25) == "permanent"
    schedule.failed()
    assert schedule.due(26) is None
    clock.now = 61.0
    assert schedule.due(27) == "permanent"
    schedule.marked(27, "permanent")
    assert schedule.due(49) is None
    assert schedule.due(50) == "permanent"
    schedule.failed()
    assert schedule.due(100) == "permanent"


def test_resuming_does_not_repeat_the_save_it_came_from():
    schedule = SaveSchedule(100, permanent_every=25, start=50)
    assert schedule.due(50) is None
    assert schedule.due(74) is None
    assert schedule.due(75) == "permanent"


@pytest.mark.parametrize("start", [0, 99])
def test_final_step_is_due_even_right_after_a_temporary_save(start):
    schedule = SaveSchedule(100, permanent_every=1000, start=start)
    schedule.marked(100, "temporary")
    assert schedule.due(100) == "permanent"
