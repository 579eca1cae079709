"""What a large fleet's coordinator computes in a process of its own."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from echo2.base.errors import ConfigError
from echo2.coordinator.planning.pool_plan import FLEET_MIN, PlanProcess, make_plan, quiet_solver
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig
from tests.unit.cost_model.fleets import learner, worker


def fails() -> None:
    raise ConfigError("expected one")


def dies_in_a_child(parent: int) -> str:
    if os.getpid() != parent:
        os._exit(9)
    return "here"


def run(process: PlanProcess, work, *args, fleet: int = FLEET_MIN):
    return asyncio.run(process.run(fleet, work, *args))


@pytest.fixture
def process() -> Iterator[PlanProcess]:
    made = PlanProcess()
    yield made
    made.close()


def test_large_fleets_work_is_done_in_one_other_process_and_small_ones_here(process: PlanProcess) -> None:
    child = run(process, os.getpid)
    assert child != os.getpid() and run(process, os.getpid) == child
    assert run(process, os.getpid, fleet=FLEET_MIN - 1) == os.getpid()
    assert run(process, os.nice, 0) > os.nice(0), "leases go first"
    with pytest.raises(ConfigError, match="expected one"):
        run(process, fails)
    snapshot = FleetSnapshot(0.0, learner(), tuple(worker(f"w{index}", 1.0) for index in range(5)))
    first = make_plan(snapshot, PlanConfig(4), None)
    assert run(process, make_plan, snapshot, PlanConfig(4), None) == first, "the same plan there as here"


def test_work_of_a_process_that_dies_is_done_here(process: PlanProcess, caplog: pytest.LogCaptureFixture) -> None:
    async def without_descriptors() -> int:
        free = os.dup(0)
        os.close(free)  # the lowest one that is free
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            return await process.run(FLEET_MIN, os.getpid)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(without_descriptors()) == os.getpid()
        assert run(process, dies_in_a_child, os.getpid()) == "here"
    assert sum("ended or could not be started" in line for line in caplog.messages) == 1
    assert run(process, os.getpid) != os.getpid()


@pytest.mark.parametrize("after_s", [0.0, 0.05])
async def test_closing_ends_work_under_way_and_a_process_that_is_being_started(after_s: float) -> None:
    process, begun = PlanProcess(), time.monotonic()
    task = asyncio.create_task(process.run(FLEET_MIN, time.sleep, 60.0))
    await asyncio.sleep(after_s)
    process.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 10
    while _spawned():
        pass


def _spawned() -> list[psutil.Process]:
    """Processes of this one that live and were spawned by multiprocessing."""
    spawned = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, reaped or not
            spawned += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return spawned


def test_the_process_ends_with_one_that_is_killed() -> None:
    script = (
        "import asyncio, os\nfrom echo2.coordinator.planning.pool_plan import PlanProcess\n"
        "async def main():\n    process = PlanProcess()\n    print(await process.run(100, os.getpid), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        child.wait(10)


def test_what_is_written_below_python_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    entered, left = threading.Event(), threading.Event()

    def solve() -> None:
        with quiet_solver():
            entered.set()
            left.wait(10)
            os.write(1, b"solver\n")

    thread = threading.Thread(target=solve)
    with quiet_solver():
        thread.start()
        assert not entered.wait(0.1), "one after the other, or the second would restore what the first has set"
        os.write(1, b"solver\n")
    left.set()
    thread.join(10)
    os.write(1, b"answer\n")
    assert capfd.readouterr() == ("answer\n", "solver\nsolver\n")
