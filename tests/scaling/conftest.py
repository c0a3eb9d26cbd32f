"""Published figures of the public ladder and small synthetic ladders."""

import pytest

from portolan.scaling.curves import RungCurve, TargetPlan
from portolan.scaling.ladder import derive

METRIC = "eval_dropless/paloma/macro_loss"

# Planned steps and training FLOPs per step without the head (marin #8435), then, per evaluation,
# zero-based logged step and dropless Paloma macro loss (run histories linked in marin #8435).
PUBLIC_STEPS = {768: 11_420, 1024: 15_276, 1536: 15_128, 2048: 20_072}
PUBLIC_FLOPS_PER_STEP = {
    768: 2320210052775936,
    1024: 11299543559700480,
    1536: 91309218006564864,
    2048: 385702219393007616,
}
# fmt: off
PUBLIC_EVALUATIONS = {
    768: [
        (570, 3.786311388015747), (1141, 3.539341926574707), (1712, 3.4669861793518066),
        (2283, 3.4246766567230225), (2854, 3.3789491653442383), (3425, 3.347630023956299),
        (3996, 3.3215203285217285), (4567, 3.3007681369781494), (5138, 3.265657901763916),
        (5709, 3.246354103088379), (6280, 3.219543218612671), (6851, 3.197269916534424),
        (7422, 3.1782631874084473), (7993, 3.149127960205078), (8564, 3.127243995666504),
        (9135, 3.106234073638916), (9706, 3.0818402767181396), (10277, 3.0587244033813477),
        (10848, 3.038463592529297), (11419, 3.015353202819824),
    ],
    1024: [
        (763, 3.4264705181121826), (1527, 3.264733076095581), (2291, 3.18711519241333),
        (3055, 3.144479513168335), (3819, 3.1228179931640625), (4583, 3.0838675498962402),
        (5347, 3.0643138885498047), (6111, 3.048776149749756), (6875, 3.0225400924682617),
        (7639, 2.993273973464966), (8403, 2.97526478767395), (9167, 2.9497318267822266),
        (9931, 2.9277210235595703), (10695, 2.907698392868042), (11459, 2.8838517665863037),
        (12223, 2.8643991947174072), (12987, 2.8425564765930176), (13751, 2.8220372200012207),
        (14515, 2.7989492416381836), (15275, 2.780874729156494),
    ],
    1536: [
        (755, 3.1583311557769775), (1511, 3.001892566680908), (2267, 2.944444179534912),
        (3023, 2.9032158851623535), (3779, 2.8789801597595215), (4535, 2.8418924808502197),
        (5291, 2.8284969329833984), (6047, 2.800361156463623), (6803, 2.7863872051239014),
        (7559, 2.75604510307312), (8315, 2.7345495223999023), (9071, 2.714014768600464),
        (9827, 2.6984610557556152), (10583, 2.6755783557891846), (11339, 2.6567752361297607),
        (12095, 2.638200283050537), (12851, 2.619727373123169), (13607, 2.599482536315918),
        (14363, 2.579882860183716), (15119, 2.5638508796691895), (15127, 2.5637738704681396),
    ],
    2048: [
        (1003, 2.9312033653259277), (2007, 2.802788257598877), (3011, 2.7470338344573975),
        (4015, 2.710448741912842), (5019, 2.6807942390441895), (6023, 2.6612348556518555),
        (7027, 2.643836498260498), (8031, 2.6150641441345215), (9035, 2.6094987392425537),
        (10039, 2.590702533721924), (11043, 2.5618793964385986), (12047, 2.543623447418213),
        (13051, 2.527618408203125), (14055, 2.5085854530334473), (15059, 2.4904448986053467),
        (16063, 2.474504232406616),
    ],
}
# fmt: on


@pytest.fixture(scope="session")
def public_points():
    """Per width, (fraction of the planned steps, loss) in order of time."""
    return {
        width: tuple((step / PUBLIC_STEPS[width], loss) for step, loss in evaluations)
        for width, evaluations in PUBLIC_EVALUATIONS.items()
    }


@pytest.fixture(scope="session")
def public_rungs(public_points):
    """The four public rungs as curves of one metric."""
    return [
        RungCurve(
            run_id=f"d{width}",
            width=width,
            steps=PUBLIC_STEPS[width],
            flops=PUBLIC_STEPS[width] * PUBLIC_FLOPS_PER_STEP[width],
            points={METRIC: points},
            family="ladder",
            tokens_per_active_param=791,
        )
        for width, points in public_points.items()
    ]


@pytest.fixture(scope="session")
def public_target():
    """The public d6144 run, whose depth was overridden."""
    rung = derive(6144, 791, "ladder", "per_rack", overrides={"num_layers": 48})
    return TargetPlan.from_rung(rung, run_id="d6144")


def synthetic_loss(flops, fraction):
    """A law with asymptote 2 and a curve that every width shares."""
    return 2.0 + 60 * flops**-0.11 * (1 + 0.5 * (1 - fraction))


@pytest.fixture(scope="session")
def micro_ladder():
    """Five micro rungs (the smallest with three seeds), noise 0.01 nats between seeds."""
    rungs = []
    for width, seeds in ((32, (0, 1, 2)), (48, (0,)), (64, (0,))):
        plan = derive(width, 20, "micro", "token_power")
        for seed in seeds:
            losses = {
                n: synthetic_loss(plan.flops_no_head, n / plan.steps) + 0.01 * (seed - 1)
                for n in plan.evaluation_marks
            }
            evaluations = {
                "eval_dropless/heldout/macro_loss": losses,
                "eval_dropless/heldout/micro_loss": {n: x - 0.1 for n, x in losses.items()},
                "eval_dropless/heldout/code/loss": {n: x + 0.2 for n, x in losses.items()},
                "eval_dropless/heldout/macro_bpb": losses,
            }
            rungs.append(
                RungCurve.from_rung(
                    plan, run_id=f"d{width}-s{seed}", seed=seed, evaluations=evaluations
                )
            )
    return rungs


@pytest.fixture(scope="session")
def micro_target():
    """The d96 micro target."""
    return TargetPlan.from_rung(derive(96, 20, "micro", "token_power"), run_id="d96")
