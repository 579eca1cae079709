"""Programs that are run contained: their files, input and output, one after another without a trace."""

import json
import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import pytest

from echo2.base.errors import TaskError
from echo2.contain.box import bubblewrap, containment_problem, view_here
from echo2.contain.inside import ending_of
from echo2.contain.messages import SCRATCH, Answer, Ending, Limits
from echo2.contain.pool import Program, ProgramPool, RunnerLost, program_sandboxes
from echo2.contain.sandbox import Launch, Sandbox
from tests.patience import WAIT_S

pytestmark = pytest.mark.skipif(bool(containment_problem()), reason="nothing can be contained on this machine")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProgramPool]:
    made = ProgramPool(Limits(cpu_s=1, wall_s=20.0), process_count=2)
    yield made
    made.close()


def test_a_program_has_its_files_and_input_and_its_output_comes_back(pool: ProgramPool) -> None:
    files = {"answer.py": "def double(n): return 2 * n"}
    ran = pool.submit(Program("from answer import double\nprint(double(int(input())))", "21\n", files)).result(WAIT_S)
    assert (ran.ending, ran.output, ran.note) == (Ending.ANSWERED, "42\n", "")
    for end in ("sys.stdout.close()", "sys.stdout = None", "os.close(1); print(2)"):
        ran = pool.submit(Program(f"import os, sys\nprint(1, flush=True)\n{end}")).result(WAIT_S)
        assert (ran.ending, ran.output, ran.note) == (Ending.ANSWERED, "1\n", ""), end
    for name in ("../x", "/x", "a/b", "", ".."):
        with pytest.raises(TaskError, match="names without folders"):
            Program("", files={name: ""})


@pytest.mark.parametrize(
    "read", ["sys.stdin.buffer.read().decode()", "open(0).read()", "sys.stdin.read()", "input()+'\\n'"]
)
def test_a_program_reads_its_input_in_any_way(pool: ProgramPool, read: str) -> None:
    for text in ("2 3 ä\n", "x" * 200_000 + "\n"):
        ran = pool.submit(Program(f"import sys\nprint(hash({read}) == hash({text!r}))", text)).result(WAIT_S)
        assert (ran.output, ran.note) == ("True\n", "")
    assert pool.submit(Program("import sys\nprint(sys.stdin.read() == '')")).result(WAIT_S).output == "True\n"


def test_a_program_is_the_main_module(pool: ProgramPool) -> None:
    code = """
import pickle, typing, unittest
class Point:
    other: "Point"
class Case(unittest.TestCase):
    def test(self): print(typing.get_type_hints(Point)["other"] is type(pickle.loads(pickle.dumps(Point()))))
unittest.main(argv=["x"], exit=False)
"""
    ran = pool.submit(Program(code)).result(WAIT_S)
    assert ran.note == "" and "True\n" in ran.output and "Ran 1 test" in ran.output


def test_a_failing_program_says_how(pool: ProgramPool) -> None:
    assert "AssertionError: 2 is 2" in pool.submit(Program("assert 1 == 2, '2 is 2'")).result(WAIT_S).note
    assert pool.submit(Program("raise SystemExit(3)")).result(WAIT_S).note == "exit 3"
    assert "SyntaxError" in pool.submit(Program("def")).result(WAIT_S).note


class FarRunner:
    """As of another machine, which is lost once: all that is asked and answered travels as text, and nothing else does."""

    def __init__(self) -> None:
        self._make, self.has_lost = program_sandboxes(), False
        self._sandbox = self._make()

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        return True

    def ask(self, body: Mapping[str, object], times: int = 1) -> Answer:
        if body["stdin"] == "lost" and not self.has_lost:
            self.has_lost = True
            self.kill()
            self._sandbox = self._make()
            raise RunnerLost("its machine is gone")
        answer = self._sandbox.ask(*json.loads(json.dumps([body, times])))
        return Answer(Ending(int(answer.ending)), answer.body, answer.printed, answer.note)

    def kill(self) -> None:
        self._sandbox.kill()


def test_programs_run_in_a_sandbox_elsewhere_by_the_same_three_methods_and_again_where_it_was_lost() -> None:
    runner = FarRunner()
    with closing(ProgramPool(make=lambda: runner)) as pool:
        files = {"answer.py": "def double(n): return 2 * n"}
        ran = pool.submit(Program("from answer import double\nprint(double(4))", files=files)).result(WAIT_S)
        assert (ran.ending, ran.output, ran.note) == (Ending.ANSWERED, "8\n", "")
        assert pool.submit(Program("print(1)", "lost")).result(WAIT_S).output == "1\n" and runner.has_lost
        assert "exit 3" in pool.submit(Program("raise SystemExit(3)")).result(WAIT_S).note


SPIN = "while True: pass"
HANDLES = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"


@pytest.mark.parametrize("code", [SPIN, HANDLES + SPIN, HANDLES.replace("signal.SIG_IGN", "lambda *_: None") + SPIN])
def test_a_program_that_computes_too_long_has_used_up_its_time_also_if_it_handles_the_signal(
    pool: ProgramPool, code: str
) -> None:
    ran = pool.submit(Program(code)).result(WAIT_S)
    assert ran.ending is Ending.CPU_USED_UP and ran.note == "computed longer than 1 s"


def test_the_kernels_signal_tells_it_even_where_stolen_time_makes_it_come_early() -> None:
    def ended(status: int, used_s: float, early: Ending | None = None, *, has_answer: bool = False) -> Ending:
        return ending_of(early, status, has_answer, used_s, cpu_s=2)

    for status, used_s in ((signal.SIGXCPU, 0.7), (signal.SIGKILL, 2.4), (signal.SIGKILL, 1.9)):
        assert ended(status, used_s) is Ending.CPU_USED_UP
    assert ended(signal.SIGKILL, 0.7) is ended(1 << 8, 0.1) is ended(0, 0.1) is Ending.DIED
    assert ended(signal.SIGKILL, 0.7, Ending.TIMED_OUT) is Ending.TIMED_OUT
    assert ended(signal.SIGKILL, 2.0, Ending.OUTPUT_USED_UP) is Ending.OUTPUT_USED_UP
    assert ended(0, 2.0, has_answer=True) is Ending.ANSWERED


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Launch("echo2.contain.program_inside", "", Limits(), view_here(folder=SCRATCH)))
    yield made
    made.kill()


def body_of(code: str) -> dict[str, object]:
    return {"code": code, "stdin": "", "files": {}}


def test_who_runs_when_the_process_ends_is_charged_and_without_a_run_nobody_is(sandbox: Sandbox) -> None:
    assert sandbox.ask(body_of("print(1)")).printed == b"1\n"
    first = sandbox.pid
    assert first is not None
    killing = threading.Timer(1.0, os.killpg, (first, signal.SIGKILL))
    killing.start()
    answer = sandbox.ask(body_of("import time; time.sleep(60)"))
    killing.join()
    assert answer.ending is Ending.CONTAINMENT_ENDED and "its process ended" in answer.note
    assert sandbox.pid is not None and sandbox.pid != first, "started again before the answer, in its own time"
    handle = os.pidfd_open(sandbox.pid)
    os.killpg(sandbox.pid, signal.SIGKILL)
    assert select.select([handle], [], [], WAIT_S)[0]
    os.close(handle)
    assert sandbox.ask(body_of("print(1)")).printed == b"1\n"


def test_each_program_is_alone_with_a_folder_of_bounded_size(sandbox: Sandbox) -> None:
    if not bubblewrap().has_nested:
        pytest.skip("this machine lets nothing inside bubblewrap make namespaces")
    assert sandbox.ask(body_of("import os; print(os.getpid(), os.getppid())")).printed == b"1 0\n"
    many = "import os\ntry:\n  for n in range(1 << 20): os.mkdir(f'd{n}')\nexcept OSError as e: print(n < 4096, e.strerror)"
    assert sandbox.ask(body_of(many)).printed == b"True No space left on device\n"


def test_a_process_that_cannot_start_is_a_fault_not_an_answer() -> None:
    sandbox = Sandbox(Launch("echo2.no_such_module", "", Limits(start_s=20.0), None))
    answer = sandbox.ask({})
    assert answer.ending is Ending.FAULT and answer.note
    assert sandbox.pid is None


HIGH = 1500
"""Above what select takes."""


def test_a_learner_with_more_open_files_than_select_takes_asks_as_before(sandbox: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < HIGH + 64:
        pytest.skip(f"this machine gives a process {hard} descriptors at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 64), hard))
    held = [os.dup(0)]
    try:
        while held[-1] < HIGH:
            held.append(os.dup(0))
        assert sandbox.ask(body_of("print(1)")).printed == b"1\n"
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
