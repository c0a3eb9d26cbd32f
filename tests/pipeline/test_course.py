"""What changes when: fractions and updates on the grid of mixture blocks, past and future."""

import pytest

from portolan.data.order import SequenceOrder
from portolan.errors import UsageError
from portolan.optim.schedule import HorizonEvent, ScheduleError
from portolan.pipeline.course import (
    ContextChange,
    Course,
    HorizonChange,
    MixtureChange,
    batch_of,
    change_from_json,
    change_to_json,
    plan_course,
)
from portolan.pipeline.plan import plan_width
from portolan.recipe import find_recipe, load_recipe
from portolan.shapes import qk_multiplier

STEPS, WIDTH = 390_251, 6144
COOLDOWN = 'mixture.phases=[{name="cooldown", from_fraction=0.8, weights={a=1.0}}]'


def course_of(*overrides: str, width: int = WIDTH, extend: bool = True) -> Course:
    recipe = load_recipe(find_recipe("marin-535b"), overrides)
    return plan_course(recipe, plan_width(recipe, width), extend=extend)


@pytest.fixture(scope="module")
def planned() -> Course:
    return course_of(COOLDOWN)


def starts(course: Course) -> tuple[list[int], list[int]]:
    return [s.start_step for s in course.stages], [p.start_step for p in course.phases]


def test_planned_phase_starts_where_the_public_run_started_its_cooldown(planned):
    assert (planned.num_updates, planned.block_sequences) == (STEPS, 49_152)
    assert starts(planned) == ([0], [0, 312_192])
    assert course_of(COOLDOWN, width=768).phases[1].start_step == 9120
    assert course_of(width=768, extend=False).phases[0].weights == {}


def test_stages_keep_the_tokens_of_an_update_and_follow_the_formula():
    stages = "context.stages=[{sequence_length=16384, from_fraction=0.5}, " + (
        "{sequence_length=65536, from_step=312193, qk_multiplier=1.7}]"
    )
    course = course_of(stages)
    assert [s.batch_sequences for s in course.stages] == [11_264, 2816, 704]
    assert [s.qk_multiplier for s in course.stages] == [1.3, pytest.approx(1.48022, abs=1e-5), 1.7]
    # A fraction goes down to a block, an update goes up; a block is 48 and then 192 updates.
    assert course.stages[1].start_step == 195_125 // 48 * 48
    assert course.stages[2].start_step == 195_120 + -(-(312_193 - 195_120) // 192) * 192
    assert [s.start_step for s in course_of(stages, extend=False).stages] == [0]
    for length, value in ((8192, 1.39011), (65_536, 1.66044), (262_144, 1.84065)):
        assert qk_multiplier(length, 4096) == pytest.approx(value, abs=1e-5)


def test_length_that_does_not_divide_an_update_is_refused():
    with pytest.raises(UsageError, match=r"3000 tokens do not divide the 46137344 tokens"):
        course_of("context.stages=[{sequence_length=3000, from_fraction=0.5}]")
    assert batch_of(4096, 4096) == 1


def test_two_stages_in_one_block_are_refused():
    with pytest.raises(UsageError, match="two stages of the run would begin at update"):
        course_of(
            "context.stages=[{sequence_length=8192, from_fraction=0.5}, "
            "{sequence_length=16384, from_fraction=0.50001}]"
        )


def test_shorter_horizon_moves_what_has_not_begun(planned):
    cut = planned.apply(HorizonChange(150_000, 312_201))
    assert (cut.num_updates, cut.horizons) == (312_201, (HorizonEvent(150_000, 312_201),))
    assert starts(cut) == ([0], [0, 249_744]), "80 % of 312,201, down to a multiple of 48"
    late = planned.apply(HorizonChange(320_000, 350_000))
    assert starts(late) == starts(planned), "the cooldown has begun"
    passed = planned.apply(HorizonChange(300_001, 320_000))
    assert starts(passed) == ([0], [0, 300_048]), "80 % has passed: the next block"
    short = course_of('mixture.phases=[{name="end", from_fraction=0.99}]')
    fixed = short.apply(MixtureChange(200_016, "new", {"a": 1.0}))
    gone = fixed.apply(HorizonChange(150_000, 200_000))
    assert starts(gone) == ([0], [0, 198_000]), "what would begin after the end is left out"


def test_longer_rows_move_what_was_recorded_up_to_the_coarser_grid(planned):
    recorded = planned.apply(MixtureChange(108_000, "third", {"a": 1.0}))
    assert starts(recorded) == ([0], [0, 108_000, 312_192])
    changed = recorded.apply(ContextChange(48, 16_384, 1.48))
    assert changed.stages[1].batch_sequences == 2816
    assert changed.phases[1].start_step == 48 + -(-(108_000 - 48) // 192) * 192
    late = recorded.apply(ContextChange(120_000, 16_384, 1.48))
    assert late.phases[1].start_step == 108_000, "what has begun stays"


def test_changes_apply_in_the_order_of_their_decision(planned):
    first = planned.apply(ContextChange(240_000, 8192, 1.39))
    both = first.apply(ContextChange(120_000, 16_384, 1.48))
    assert [s.sequence_length for s in both.stages] == [4096, 16_384, 8192]
    with pytest.raises(UsageError, match="outside a run of 390251"):
        planned.apply(HorizonChange(STEPS, 500_000))


def test_every_start_is_one_that_the_order_of_the_data_accepts(planned):
    """The loader's arithmetic takes the course as it is."""
    from portolan.data.mixture import Mixture, budget_phases

    course = planned.apply(ContextChange(195_120, 16_384, 1.48))
    course = course.apply(HorizonChange(200_000, 300_000))
    counts = {"a": 24_576, "b": 24_576}
    mixture = Mixture(
        "m", "tok", "sto", {"a": 10**13, "b": 10**13},
        budget_phases(
            [(p.name, p.start_step, counts) for p in course.phases],
            steps=course.num_updates,
            tokens_per_step=course.tokens_per_step,
        ),
        4096,
    )  # fmt: skip
    order = SequenceOrder(mixture, course.geometry, seed=0)
    assert order.first_index(195_121) == 195_120 * 11_264 + 2816
    assert sum(phase.budget_tokens for phase in mixture.phases) == 300_000 * 46_137_344
    assert order.batch_sequences(299_999) == 2816


def test_changes_survive_the_journal():
    for change in (
        ContextChange(48, 1024, 1.3 * 1.1386294361119891),
        MixtureChange(96, "end", {"a": 0.1, "b": 0.9}),
        HorizonChange(7, 99),
    ):
        assert change_from_json(change_to_json(change)) == change


def test_horizon_before_the_warm_up_is_refused(planned):
    from portolan.optim.schedule import Schedule

    cut = planned.apply(HorizonChange(100, 312_201))
    with pytest.raises(ScheduleError, match="inside the warm-up of 3902"):
        Schedule(cut.steps, events=cut.horizons)
