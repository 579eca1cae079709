from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT, environment_of, made_models, small_run
from tests.patience import WAIT_S


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for a checkout."""
    folder = made_models() / "of-80-steps"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes that test, one makes it and the others wait
        if not folder.exists():
            command = [sys.executable, "-m", "echo2.cli.demo.model", str(folder), "--recipe", '{"warmup_steps": 80}']
            environment = environment_of(tmp_path_factory.mktemp("home"))
            subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=WAIT_S)
    return folder


@pytest.fixture
def run_config(base_model: Path, tmp_path: Path) -> str:
    """A small run on free ports; tests add their own options at the end."""
    return small_run(tmp_path, base_model)
