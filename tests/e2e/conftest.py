from __future__ import annotations

from pathlib import Path

import pytest

from echo2.cli.demo.model import ModelRecipe, make_model
from echo2.cli.demo.ports import choose_ports


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make_model(folder, ModelRecipe(warmup_steps=80))
    return folder


@pytest.fixture
def run_config(base_model: Path, tmp_path: Path) -> str:
    """A small run on free ports; tests add their own options at the end."""
    enrol, services, page, learner = choose_ports((0, 0, 0, 0))
    return f"""
preset = "local"
[run]
name = "trial"
folder = "{tmp_path}/runs"
[model]
path = "{base_model}"
[task]
name = "sort_digits"
args = {{ digit_count = 5 }}
eval_prompts = 32
eval_every_steps = 10
[sampling]
max_new_tokens = 7
[coordinator]
enrol_port = {enrol}
port = {services}
dashboard_port = {page}
[learner]
port = {learner}
steps = 30
prompts_per_step = 12
rollouts_per_prompt = 8
lr = 1e-3
correction = "behaviour"
checkpoint_every_steps = 5
"""
