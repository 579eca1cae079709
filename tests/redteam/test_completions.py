"""Hostile completions against the real reward path, and hostile programs against the runner of programs: none reads a
file or key outside, connects, signals, leaves a trace for the next, or outlives its limits.
"""

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from echo2.base.errors import ResourceError
from echo2.contain.box import bubblewrap, view_here
from echo2.contain.messages import SCRATCH, Answer, Ending, Limits
from echo2.contain.pool import Program, ProgramPool
from echo2.contain.sandbox import Launch, Sandbox
from echo2.tasks.built_in import EXECUTING_DATA_SETS
from echo2.tasks.registry import make_task
from echo2.tasks.rewards import Containment, RewardFailure, RewardPool, Scored
from echo2.tasks.task import TaskSpec
from tests.patience import WAIT_S
from tests.redteam.hostile_programs import (
    BOMBS,
    programs_that_leave_much,
    programs_that_signal,
    programs_that_want_something,
)

try:
    bubblewrap()
except ResourceError as error:  # then rewards are refused, which tests/unit/tasks/test_rewards.py shows
    pytest.skip(f"nothing can be contained on this machine: {error}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SECRET = "SECRET-of-the-learner"
LIMITS = Limits(cpu_s=1, wall_s=4.0)


@dataclass(frozen=True)
class Outside:
    """What a completion may want: a key, a listening port, this process, a place to leave a mark."""

    key: Path
    mark: Path
    listener: socket.socket

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def filled(self, text: str) -> str:
        for name, value in (("secret", self.key), ("port", self.port), ("pid", os.getpid()), ("mark", self.mark)):
            text = text.replace("{" + name + "!r}", repr(str(value))).replace("{" + name + "}", str(value))
        return text.replace("{{", "{").replace("}}", "}")

    def is_untouched(self) -> bool:
        self.listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            return False
        return not self.mark.exists() and self.key.read_text() == SECRET


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    key = tmp_path / "runs" / "r" / "learner" / "identity.key"
    key.parent.mkdir(parents=True)
    key.write_text(SECRET)
    monkeypatch.setenv("PLANTED", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Outside(key, tmp_path / "mark", listener)


def descendants_of(root: int) -> set[int]:
    return {child.pid for child in psutil.Process(root).children(recursive=True)}


# What each data set's scorer takes for a Python expression; the others of the list execute the problem's own text.
TAKES = (
    "n_queens", "countdown", "simple_integration", "binary_matrix", "puzzle24", "polynomial_multiplication", "spiral_matrix",
    "string_insertion",
)  # fmt: skip


@pytest.mark.parametrize("data_set", [*TAKES[:3], *(pytest.param(name, marks=pytest.mark.soak) for name in TAKES[3:])])
def test_a_completion_that_its_scorer_executes_reaches_nothing(data_set: str, outside: Outside) -> None:
    pytest.importorskip("reasoning_gym")
    assert data_set in EXECUTING_DATA_SETS
    spec = TaskSpec("reasoning_gym", {"dataset": data_set, "size": 10}, 1)
    hidden = Containment(readable=(str(outside.key.parents[3]),), hidden=(str(outside.key.parents[1]),), processes=1)
    actions = (
        f"__import__('os').close(__import__('os').open({str(outside.mark)!r}, 66))",
        f"open({str(outside.mark)!r}, 'w').write(open({str(outside.key)!r}).read())",
        f"__import__('socket').create_connection(('127.0.0.1', {outside.port}))",
        f"__import__('os').kill({os.getpid()}, 15)",
        f"__import__('os').system('touch {outside.mark}')",
    )
    with contextlib.closing(RewardPool(spec, LIMITS, hidden)) as pool:
        for action in actions:
            for text in (action, f"[{action}]", f"<answer>{action}</answer>"):
                scored = pool.submit(0, text, "hostile").result(WAIT_S)
                assert scored.failure is not RewardFailure.FAULT, scored.message
                assert scored.reward is None or scored.reward.value < 1.0, text
                assert SECRET not in scored.message
        assert outside.is_untouched()
        answer = make_task(spec).sample(1).answer
        good = pool.submit(1, answer, "honest").result(WAIT_S)
        assert good.reward is not None, f"{good.failure} {good.message}"


def test_the_same_completions_do_harm_where_rewards_are_trusted(outside: Outside) -> None:
    """The attack is real: without containment it writes the mark. So the test above shows what contains it."""
    pytest.importorskip("reasoning_gym")
    spec = TaskSpec("reasoning_gym", {"dataset": "n_queens", "size": 10})
    with contextlib.closing(RewardPool(spec, LIMITS, Containment(True, processes=1))) as pool:
        text = f"open({str(outside.mark)!r}, 'w').write(open({str(outside.key)!r}).read())"
        pool.submit(0, text).result(WAIT_S)
        assert outside.mark.read_text() == SECRET


def contained_cpu_s() -> float:
    """Processor time of what this process contains, and of what it contained; without the daemons of other tests, whose server one
    of the tests' processes has started."""
    over = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = over.ru_utime + over.ru_stime
    waiting = psutil.Process().children()
    while waiting:
        child = waiting.pop()
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tests.fork_server" not in child.cmdline():
                seconds += sum(child.cpu_times()[:4])  # of its own and of its children that have ended
                waiting += child.children()
    return seconds


BOMB_CPU_S = 2.5
"""Its limit of a second, another until a process that ignores the signal is killed (contain/inside), what a fork and the pool's
second process cost; without the limit it computes until its 8 s are over."""
MATHS_BOMBS = (
    "9**9**9**9", "factorial(10**9)", "(x+y+z)**99999", "2**(2**(2**30))", "prime(10**12)", "sin(" * 5000 + "1" + ")" * 5000,
    "*".join(["(1+x)"] * 5000), "10**10**10",
)  # fmt: skip


@pytest.mark.parametrize("data_set", ["countdown", "simple_integration"])
def test_a_maths_bomb_costs_its_sender_and_the_others_wait_little(data_set: str) -> None:
    pytest.importorskip("reasoning_gym")
    spec = TaskSpec("reasoning_gym", {"dataset": data_set, "size": 10}, 1)
    with contextlib.closing(RewardPool(spec, Limits(cpu_s=1, wall_s=8.0), Containment(processes=2))) as pool:
        pool.submit(0, "0", "worker that is honest").result(WAIT_S)  # started
        before_s = contained_cpu_s()
        bad: list[Future[Scored]] = [pool.submit(0, text, "hostile worker") for text in MATHS_BOMBS]
        good = [pool.submit(1, make_task(spec).sample(1).answer, "worker that is honest") for _ in range(8)]
        assert all(future.result(WAIT_S).reward is not None for future in good)
        bombs_before = sum(future.done() for future in bad)
        results = [future.result(WAIT_S) for future in bad]
        assert bombs_before <= len(bad) // 2, "honest rewards do not wait for the bombs"
        assert contained_cpu_s() - before_s < BOMB_CPU_S * len(bad), "each has its own limit"
        for text, scored in zip(MATHS_BOMBS, results, strict=True):
            assert scored.failure is not RewardFailure.FAULT
            assert scored.reward is None or scored.reward.value < 1.0, text[:50]
        held = [scored for scored in results if scored.failure is RewardFailure.EXHAUSTED]
        assert held and all(s.reward is not None and s.reward.value == 0.0 for s in held)


def body_of(code: str) -> dict[str, object]:
    return {"code": code, "stdin": "", "files": {}}


WITHOUT_RIGHTS = """#!/bin/sh
# bubblewrap where a policy takes the rights from what it starts, such as the AppArmor profile of some distributions
n=$#
while [ $n -gt 0 ]; do
  argument=$1; shift; n=$((n - 1))
  if [ "$argument" = --cap-add ]; then shift; n=$((n - 1)); else set -- "$@" "$argument"; fi
done
exec BWRAP "$@"
"""


@pytest.fixture(params=["own namespaces", "shared namespaces"])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    if request.param == "own namespaces":
        if not bubblewrap().has_nested:
            pytest.skip("this machine lets nothing inside bubblewrap make namespaces")
    else:
        weaker = tmp_path / "bwrap"
        weaker.write_text(WITHOUT_RIGHTS.replace("BWRAP", bubblewrap().path))
        weaker.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    bubblewrap.cache_clear()
    assert bubblewrap().has_nested == (request.param == "own namespaces")
    limits = Limits(cpu_s=2, wall_s=6.0, scratch_bytes=8 << 20)
    made = Sandbox(Launch("echo2.contain.program_inside", "", limits, view_here(folder=SCRATCH)))
    yield made
    made.kill()
    bubblewrap.cache_clear()


def _ran(pool: ProgramPool, outside: Outside, codes: Iterator[str]) -> list[tuple[str, Answer]]:
    submitted = [(code, pool.submit(Program(outside.filled(code)))) for code in codes]
    return [(code, future.result(WAIT_S)) for code, future in submitted]


def test_hostile_programs_get_nothing_and_leave_nothing(outside: Outside) -> None:
    codes = list(programs_that_want_something())
    assert len(codes) >= 160
    with contextlib.closing(ProgramPool(Limits(cpu_s=2, wall_s=6.0))) as pool:
        got = [
            (code, ran)
            for code, ran in _ran(pool, outside, iter(codes))
            if "GOT" in ran.output
            or SECRET in ran.output + ran.note
            or ran.ending in (Ending.FAULT, Ending.CONTAINMENT_ENDED)
        ]
        assert not got, got
        _, again = _ran(pool, outside, iter(["print('still here')"]))[0]
        assert again.output == "still here\n"
    assert outside.is_untouched()


def test_bombs_end_within_their_limits_and_the_next_program_runs(outside: Outside) -> None:
    before = descendants_of(os.getpid())
    assert len(BOMBS) + len(list(programs_that_want_something())) >= 200
    limits = Limits(cpu_s=1, wall_s=2.0, memory_bytes=1 << 30, scratch_bytes=8 << 20)
    with contextlib.closing(ProgramPool(limits)) as pool:
        for code in BOMBS:
            (_, ran), (_, after) = _ran(pool, outside, iter([code, "import os; print(1 + 1, os.listdir())"]))
            assert ran.seconds < 8.0 and len(ran.output) <= 64 << 10, (code, ran.seconds)
            assert ran.ending not in (Ending.FAULT, Ending.CONTAINMENT_ENDED), (code, ran)
            assert after.output == "2 []\n", (code, after)
    assert descendants_of(os.getpid()) <= before, "nothing outlives the pool"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20, "nothing it sent filled this process"


def test_no_program_signals_the_process_that_forks_the_next(sandbox: Sandbox) -> None:
    assert sandbox.ask(body_of("")).ending is Ending.ANSWERED
    first = sandbox.pid
    for code in programs_that_signal():
        answer = sandbox.ask(body_of(code))
        assert answer.ending not in (Ending.FAULT, Ending.CONTAINMENT_ENDED), (code, answer)
        assert sandbox.ask(body_of("print(1 + 1)")).printed == b"2\n", code
        assert sandbox.pid == first, f"a new process was necessary after {code}"


def test_what_a_program_leaves_delays_no_other(sandbox: Sandbox) -> None:
    assert sandbox.ask(body_of("")).ending is Ending.ANSWERED
    first = sandbox.pid
    for code in programs_that_leave_much():
        answer = sandbox.ask(body_of(code))
        assert answer.ending not in (Ending.FAULT, Ending.CONTAINMENT_ENDED), (code, answer)
        began = time.monotonic()
        after = sandbox.ask(body_of("import os; print(1 + 1, os.listdir())"))
        assert after.printed == b"2 []\n", (code, after)
        assert time.monotonic() - began < 2.0, code
        assert sandbox.pid == first or not bubblewrap().has_nested, f"a new process was necessary after {code}"


OWNER = """
import sys, time
from echo2.contain.pool import Program, ProgramPool
pool = ProgramPool(process_count=1)
pool.submit(Program("print(1)")).result()
pool.submit(Program("import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(9)"))
print("running", flush=True)
sys.stdin.read()
"""


def test_what_runs_ends_with_the_process_that_started_it_even_if_that_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with owner.stdin, owner.stdout:
        assert owner.stdout.readline() == "running\n"
        started = [os.pidfd_open(pid) for pid in descendants_of(owner.pid)]
        assert len(started) >= 2, "bubblewrap, and what it contains"
        owner.kill()
        owner.wait(WAIT_S)
        try:
            for descriptor in started:
                assert select.select([descriptor], [], [], 5.0)[0], "it outlives its owner"
        finally:
            for descriptor in started:
                os.close(descriptor)
