from __future__ import annotations

from pathlib import Path

import pytest

from echo2.cli.demo.model import ModelRecipe, make_model
from tests.e2e.cluster import small_run


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make_model(folder, ModelRecipe(warmup_steps=80))
    return folder


@pytest.fixture
def run_config(base_model: Path, tmp_path: Path) -> str:
    """A small run on free ports; tests add their own options at the end."""
    return small_run(tmp_path, base_model)
