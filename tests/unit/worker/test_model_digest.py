from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import VersionMismatch
from echo2.learner.runtime.model import PolicyModel
from echo2.worker.model_digest import check_model, model_digest
from tests.contract.engine_rig import tiny_config


def test_worker_and_learner_give_a_model_the_same_digest(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config("qwen3"))).save_pretrained(tmp_path)
    model = PolicyModel(str(tmp_path), "bfloat16", torch.device("cpu"), 1.0)
    table = [(name, tuple(t.shape), "bfloat16") for name, t in model.masters_by_name().items()]
    assert model_digest(model.config_json(), table) == model.digest()
    check_model(model.digest(), model.config_json(), reversed(table))
    with pytest.raises(VersionMismatch, match="names, shapes or types"):
        check_model(model.digest(), model.config_json(), table[1:])
