from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT, environment_of, small_run
from tests.patience import WAIT_S


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    command = ["-m", "echo2.cli.demo.model", str(folder / "model"), "--recipe", '{"warmup_steps": 80}']
    subprocess.run([sys.executable, *command], env=environment_of(folder), cwd=ROOT, check=True, timeout=WAIT_S)
    return folder / "model"


@pytest.fixture
def run_config(base_model: Path, tmp_path: Path) -> str:
    """A small run on free ports; tests add their own options at the end."""
    return small_run(tmp_path, base_model)
