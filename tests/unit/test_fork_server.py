"""A fork is a process like one that was started: killed as it begins, waited for, ended with whom it was made for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.fork_server import ForkedProcess
from tests.patience import WAIT_S

SCRIPT = """
import atexit, os, signal, sys
atexit.register(print, "at exit")
print(__name__, os.getcwd(), os.environ.get("OWN"), os.getpgid(0) == os.getpid(), flush=True)
signal.pause() if sys.argv[1] == "wait" else sys.exit(int(sys.argv[1]))
"""


def test_a_fork_has_its_own_folder_environment_log_and_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def forked(word: str) -> ForkedProcess:
        with (tmp_path / f"{word}.log").open("ab") as log:
            return ForkedProcess([str(tmp_path / "script.py"), word], {"OWN": "1"}, tmp_path, log.fileno())

    assert forked("3").wait(WAIT_S) == 3
    assert (tmp_path / "3.log").read_text().splitlines() == [f"__main__ {tmp_path} 1 True", "at exit"]
    killed, left = forked("wait"), forked("wait")
    os.killpg(killed.pid, signal.SIGKILL)
    other = psutil.Process(left.pid)
    assert killed.wait(WAIT_S) == -signal.SIGKILL == killed.poll()
    left.close()
    other.wait(WAIT_S)
