from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.cli.demo import model
from tests.e2e.cluster import ROOT, environment_of, small_run
from tests.patience import WAIT_S

RECIPE = '{"warmup_steps": 80}'


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for a checkout: build/models keeps it under what determines it."""
    digest = hashlib.sha256(Path(model.__file__).read_bytes() + RECIPE.encode()).hexdigest()[:12]
    folder = ROOT / "build" / "models" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes that test, one makes it and the others wait
        if not folder.exists():
            command = [sys.executable, "-m", "echo2.cli.demo.model", str(folder), "--recipe", RECIPE]
            environment = environment_of(tmp_path_factory.mktemp("home"))
            subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=WAIT_S)
    return folder


@pytest.fixture
def run_config(base_model: Path, tmp_path: Path) -> str:
    """A small run on free ports; tests add their own options at the end."""
    return small_run(tmp_path, base_model)
