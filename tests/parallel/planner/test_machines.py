"""Machines, step times, goodput: data sheets, bounds, and a simulation of failures."""

import random

import pytest
from tests.parallel.planner.recipes import plan_of

from portolan.errors import UsageError
from portolan.parallel.planner.goodput import Failures, failures_of_job
from portolan.parallel.planner.machines import MACHINES, Machine, find_machine
from portolan.parallel.planner.mesh import MeshSizes


def test_axes_that_leave_the_domain_are_slow():
    rack, node, pod = MACHINES["gb200-nvl72"], MACHINES["h100-node"], MACHINES["tpu-v5p"]
    public = MeshSizes(11, 1, 1, 64, 1)
    assert rack.slow_axes(public) == ("replica",)
    assert set(node.slow_axes(public)) == {"replica", "expert"}
    assert pod.slow_axes(public) == ()
    assert node.slow_axes(MeshSizes(2, 1, 1, 4, 2)) == ("replica",)
    # Groups of 3 do not lie side by side in nodes of 8.
    assert set(node.slow_axes(MeshSizes(4, 1, 1, 3, 1))) == {"replica", "expert"}
    assert rack.bandwidth(("replica", "expert"), public) == rack.slow_bytes_per_second
    assert rack.bandwidth(("expert",), public) == rack.fast_bytes_per_second
    named = rack.model_copy(update={"axis_bytes_per_second": {"replica": 1e11}})
    assert named.bandwidth(("replica",), public) == 1e11


def test_bounds_of_the_public_run():
    one = plan_of("marin-535b").on(find_machine("gb200-nvl72"), "device")
    step = one.step
    assert step.bound == max(step.compute, step.memory, step.fast_links, step.slow_links)
    assert step.compute * 2.5e15 == pytest.approx(one.flops.total)
    # The run measured 14.67 s; a bound lies below, and not by an order of magnitude.
    assert 14.67 / 4 < step.bound < step.serial < 14.67
    assert one.seconds_at(0.2675) == pytest.approx(14.67, abs=0.01)
    assert one.mfu(14.67) == pytest.approx(0.2676, abs=1e-4)
    assert one.run_seconds(14.67) * one.goodput == pytest.approx(390_251 * 14.67)


def test_links_limit_a_rack_of_nodes():
    one = plan_of("rack").on(find_machine("h100-node"))
    assert one.step.limit == "slow links"
    moved = sum(flow.num_bytes for flow in one.flows)
    assert one.step.slow_links == pytest.approx(moved / 5e10)


def test_more_than_nine_tenths_of_the_memory_is_refused():
    plan = plan_of("marin-535b")
    machine = find_machine("gb200-nvl72")
    assert plan.on(machine, "device").fits
    with pytest.raises(UsageError, match=r"are 1\d\d % of the 184.00 GiB of gb200-nvl72"):
        plan.on(machine, "resident").refuse_misfit()


def test_a_cpu_has_no_utilisation():
    one = plan_of("pocket").on(find_machine("cpu-2-core"))
    assert one.mfu(1.0) is None
    assert one.step.bound > 0


def test_this_cpu_is_measured():
    machine = find_machine("this-cpu")
    assert machine.memory_bytes > 2**30
    assert machine.peak_flops_per_second > 1e8
    assert machine.memory_bytes_per_second > 1e8


def test_a_machine_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nplatform = "cuda"\npeak_flops_per_second = 1e15\npeak_source = "test"\n'
        "memory_bytes = 100_000_000_000\nmemory_bytes_per_second = 3e12\ndomain_devices = 8\n"
        "fast_bytes_per_second = 4e11\nslow_bytes_per_second = 5e10\n"
        "[axis_bytes_per_second]\nreplica = 2.5e10\n"
    )
    machine = find_machine(str(path))
    assert machine == Machine.model_validate(machine.model_dump())
    assert machine.bandwidth(("replica",), MeshSizes(2, 1, 1, 8, 1)) == 2.5e10
    path.write_text(path.read_text().replace("replica =", "rack ="))
    with pytest.raises(UsageError, match="names 'rack'"):
        find_machine(str(path))
    path.write_text("name = 1\n")
    with pytest.raises(UsageError, match=r"(?s)name: .*string.*memory_bytes: Field required"):
        find_machine(str(path))
    path.write_text("name =")
    with pytest.raises(UsageError, match="cannot read machine"):
        find_machine(str(path))
    with pytest.raises(UsageError, match="'abacus' is unknown"):
        find_machine("abacus")


def wall_time(failures, interval, work, rng):
    """Seconds until `work` is done: an event simulation of checkpoints, failures and restarts."""
    now = done = 0.0
    failure = rng.expovariate(1 / failures.mean_seconds)
    while done < work:
        end = now + interval + failures.checkpoint_seconds
        if failure >= end:
            now, done = end, done + interval
            continue
        while True:
            now = failure
            failure = now + rng.expovariate(1 / failures.mean_seconds)
            if failure >= now + failures.restart_seconds:
                now += failures.restart_seconds
                break
    return now


@pytest.mark.parametrize("interval", [300.0, 1000.0, 4000.0])
def test_goodput_is_what_a_simulation_of_failures_finds(interval):
    failures = Failures(mean_seconds=5000, restart_seconds=600, checkpoint_seconds=60)
    rng = random.Random(1)
    work = 3000 * interval
    assert failures.goodput(interval) == pytest.approx(
        work / wall_time(failures, interval, work, rng), rel=0.02
    )


def test_best_interval():
    failures = failures_of_job(704, 50_000, 1800, 6.0)
    assert failures.mean_seconds == pytest.approx(50_000 * 3600 / 704)
    best = failures.best_interval_seconds
    grid = [best * (0.5 + 0.01 * step) for step in range(150)]
    assert max(map(failures.goodput, grid)) == pytest.approx(failures.goodput(best), rel=1e-6)
    assert best == pytest.approx((2 * 6 * failures.mean_seconds) ** 0.5, rel=0.01)
    slow = Failures(100, 10, 300)
    assert slow.best_interval_seconds == 100
    assert Failures(1, 1, 1).goodput(10_000) == 0
