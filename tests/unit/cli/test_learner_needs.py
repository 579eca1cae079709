"""Plan, doctor and the learner itself ask one rule what a learner needs of memory and disk."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from echo2.broadcast.room import store_bytes_for
from echo2.cli.run_shape import learner_line, learner_needs, learner_run
from echo2.config.load import load_config
from echo2.coordinator.runtime.catalogue import built_in_models
from echo2.cost_model.memory import Checkpointing, checkpoint_bytes, learner_memory
from echo2.cost_model.sizing import model_size
from echo2.learner.runtime.auditor import AuditCalls, auditor_of
from echo2.learner.runtime.options import LearnerOptions, TrainerOptions
from echo2.learner.runtime.ranks import Ranks
from echo2.learner.runtime.startup import new_team

EXAMPLE = Path(__file__).parents[3] / "examples" / "configs" / "math-qwen3-8b.toml"


def test_the_disk_that_is_told_holds_what_the_learner_writes(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    options = LearnerOptions(
        tmp_path, "disk", 2, 4, 4, 2, TrainerOptions(str(tmp_path / "model"), token_budget=512, threads=1)
    )
    team, size = new_team(options, Ranks()), model_size(shape)
    assert team.checkpoint_bytes == checkpoint_bytes(size.parameters, 2 * size.parameters)
    config = load_config([], None, {"learner.checkpoints_kept": "2"})
    told = learner_needs(config, size, 0, 1 << 34).memory.disk_bytes
    assert told == 3 * team.checkpoint_bytes + store_bytes_for(team.model.snapshot_bytes)
    auditor = auditor_of(options, random.Random(0), AuditCalls(habits_of=lambda peer: None))  # type: ignore[arg-type, return-value]
    assert auditor.versions_max == 2 * options.staleness_bound + 2


def test_eight_billion_at_a_bound_of_six_take_the_disk_and_host_memory_that_their_run_asks() -> None:
    config, size = load_config([EXAMPLE], None, {}), built_in_models()["qwen3-8b"]
    run = learner_run(config, size)
    assert run.rollout_tokens == 2048 * 7 * 0.35 * 8192
    found = learner_needs(config, size, 8, 85_500_000_000).memory
    assert found.disk_bytes == (3 * 14 * size.parameters) + store_bytes_for(2 * size.parameters)
    known = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8).host_bytes
    eight_versions_more = int(0.02 * 6 * 14 * size.parameters) - int(0.02 * 6 * 6 * size.parameters)
    assert found.host_bytes - known == eight_versions_more + int(100 * run.rollout_tokens)
    assert "of disk for checkpoints and chunks" in learner_line(config, size, 8, 85_500_000_000)
