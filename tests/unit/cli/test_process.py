from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from echo2.base.errors import BadToken, EchoError, PortBusy
from echo2.cli.process import report_error, run_daemon
from tests.patience import WAIT_S


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def run(self) -> None:
        raise self.error

    def stop(self) -> None:
        raise AssertionError("nobody asked for it")


class Waiting:
    """Runs until it is stopped; sends itself a signal as soon as it runs."""

    def __init__(self) -> None:
        self.was_asked = False
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(self.stopped.wait(), WAIT_S)

    def stop(self) -> None:
        self.was_asked = True
        self.stopped.set()


@pytest.mark.parametrize("error", [PortBusy("expected port 1, got\nnothing"), BadToken("no")])
def test_an_error_is_one_line_and_its_exit_code(error: EchoError, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_daemon(lambda: Failing(error)) == error.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {type(error).__name__}: ")


def test_no_space_left_is_a_disk_full_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_daemon(lambda: Failing(OSError(28, "No space left on device", "/runs/x")))
    assert code == 6
    assert "DiskFull" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "words"), [("worker", ["join", "x"]), ("learner", ["join", "x"]), ("coordinator", [])]
)
def test_ctrl_c_before_there_is_a_daemon_ends_it_without_a_word(program: str, words: list[str]) -> None:
    script = (
        f"import os, signal; from echo2.cli import {program} as own\n"
        f"own.parse = lambda *_: os.kill(os.getpid(), signal.SIGINT); own.main({words})"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_the_first_signal_asks_for_a_clean_stop() -> None:
    made: list[Waiting] = []

    def make() -> Waiting:
        made.append(Waiting())
        return made[0]

    assert run_daemon(make) == 0
    assert made[0].was_asked


def test_exit_codes_of_error_kinds_differ_from_success() -> None:
    assert report_error(EchoError("x")) == 1


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    shown = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m echo2.cli.main config show | head -1"],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (shown.stdout, shown.stderr) == ("[run]\n", "")


@pytest.mark.parametrize(
    ("program", "words", "code"),
    [
        ("coordinator", ["--folder", "/proc/nope"], 8),
        ("worker", ["join", "LINK", "--folder", "/proc/nope"], 6),
        ("learner", ["join", "LINK", "--folder", "/proc/nope", "--model.path", "x"], 6),
        ("main", ["export", "/proc/nope", "/tmp/x"], 8),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(program: str, words: list[str], code: int) -> None:
    link = "echo2://127.0.0.1:1/12D3KooWPonMYafxrz8bgmhv4GFZcVwJh5A5svfk3x2QL1j1uNuF?token=abc"
    command = [sys.executable, "-m", f"echo2.cli.{program}", *(link if word == "LINK" else word for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == code and len(errors) == 1 and "/proc/nope" in errors[0], done.stderr
    assert "Traceback" not in done.stderr
