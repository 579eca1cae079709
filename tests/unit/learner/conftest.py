from pathlib import Path

import pytest
import torch

from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, to be read only."""
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))
