"""Programs that are run contained: their files, input and output, one after another without a trace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from echo2.base.errors import TaskError
from echo2.contain.limits import Ending, Limits
from echo2.contain.runtime.box import containment_problem, view_here
from echo2.contain.runtime.programs import Program, ProgramPool
from echo2.contain.runtime.sandbox import Launch, Sandbox
from echo2.contain.view import SCRATCH

pytestmark = pytest.mark.skipif(bool(containment_problem()), reason="nothing can be contained on this machine")
WAIT_S = 120.0


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


def test_twenty_programs_a_second_on_one_process(pool: ProgramPool) -> None:
    pool.submit(Program("")).result(WAIT_S)
    began = time.monotonic()
    for number in range(40):
        assert pool.submit(Program(f"print({number})")).result(WAIT_S).output == f"{number}\n"
    assert 40 / (time.monotonic() - began) >= 20


def test_a_process_that_is_killed_is_replaced_and_blames_nobody() -> None:
    sandbox = Sandbox(Launch("echo2.contain.runtime.program_inside", "", Limits(), view_here(folder=SCRATCH)))
    body = {"code": "print(1)", "stdin": "", "files": {}}
    try:
        assert sandbox.ask(body).printed == b"1\n"
        with ThreadPoolExecutor(1) as executor:
            sleeping = executor.submit(sandbox.ask, {**body, "code": "import time; time.sleep(60)"})
            assert sandbox.pid is not None
            os.killpg(sandbox.pid, signal.SIGKILL)
            assert sleeping.result(WAIT_S).ending is Ending.FAULT
        assert sandbox.ask(body).printed == b"1\n"
    finally:
        sandbox.kill()


def test_a_process_that_cannot_start_is_a_fault_not_an_answer() -> None:
    sandbox = Sandbox(Launch("echo2.no_such_module", "", Limits(start_s=20.0), None))
    answer = sandbox.ask({})
    assert answer.ending is Ending.FAULT and answer.note
    assert sandbox.pid is None
