import fcntl
from pathlib import Path

import pytest
from rich.console import Console

from echo2.cli.demo.model import ModelRecipe
from echo2.cli.demo.run import _make_base_model
from echo2.config.load import load_config
from tests.e2e.cluster import made_models, small_run


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The demo's, as it makes it, once for a checkout."""
    folder = made_models() / f"sort-digits-{ModelRecipe().digest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes that test, one makes it and the others wait
        _make_base_model(load_config((), "local", {"model.path": str(folder)}), False, Console())
    return folder


@pytest.fixture
def run_config(base_model: Path, tmp_path: Path) -> str:
    """A small run on free ports; tests add their own options at the end."""
    return small_run(tmp_path, base_model)
