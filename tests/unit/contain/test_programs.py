"""Programs that are run contained: their files, input and output, one after another without a trace."""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from echo2.base.errors import TaskError
from echo2.contain.box import bubblewrap, containment_problem, view_here
from echo2.contain.messages import SCRATCH, Ending, Limits
from echo2.contain.pool import Program, ProgramPool
from echo2.contain.sandbox import Launch, Sandbox
from tests.patience import WAIT_S

pytestmark = pytest.mark.skipif(bool(containment_problem()), reason="nothing can be contained on this machine")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProgramPool]:
    made = ProgramPool(Limits(cpu_s=2, wall_s=5.0))
    yield made
    made.close()


def test_a_program_has_its_files_and_input_and_its_output_comes_back(pool: ProgramPool) -> None:
    files = {"answer.py": "def double(n): return 2 * n"}
    ran = pool.submit(Program("from answer import double\nprint(double(int(input())))", "21\n", files)).result(WAIT_S)
    assert (ran.ending, ran.output, ran.problem) == (Ending.ANSWERED, "42\n", "")


def test_a_failing_program_says_how(pool: ProgramPool) -> None:
    assert "AssertionError: 2 is 2" in pool.submit(Program("assert 1 == 2, '2 is 2'")).result(WAIT_S).problem
    assert pool.submit(Program("raise SystemExit(3)")).result(WAIT_S).problem == "exit 3"
    assert "SyntaxError" in pool.submit(Program("def")).result(WAIT_S).problem


def test_file_names_have_no_folders() -> None:
    for name in ("../x", "/x", "a/b", "", ".."):
        with pytest.raises(TaskError, match="names without folders"):
            Program("", files={name: ""})


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Launch("echo2.contain.program_inside", "", Limits(), view_here(folder=SCRATCH)))
    yield made
    made.kill()


def body_of(code: str) -> dict[str, object]:
    return {"code": code, "stdin": "", "files": {}}


def test_who_runs_when_the_process_ends_is_charged_and_has_the_next_one_started(sandbox: Sandbox) -> None:
    assert sandbox.ask(body_of("print(1)")).printed == b"1\n"
    first = sandbox.pid
    assert first is not None
    killing = threading.Timer(1.0, os.killpg, (first, signal.SIGKILL))
    killing.start()
    answer = sandbox.ask(body_of("import time; time.sleep(60)"))
    killing.join()
    assert answer.ending is Ending.CONTAINMENT_ENDED and "its process ended" in answer.note
    assert sandbox.pid not in (None, first), "started again before the answer, in its own time"
    assert sandbox.ask(body_of("print(1)")).printed == b"1\n"


def test_a_process_that_ends_while_nothing_runs_is_replaced_and_charged_to_nobody(sandbox: Sandbox) -> None:
    assert sandbox.ask(body_of("print(1)")).printed == b"1\n"
    assert sandbox.pid is not None
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
