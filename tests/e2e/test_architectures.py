"""Real daemons on an architecture that the embedded engine's fused path does not know: Gemma 3, random and tiny."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.cli.demo.model import _save_tokenizer
from tests.contract.engine_rig import tiny_config
from tests.e2e.cluster import Cluster, small_run

STEPS = 3


@pytest.mark.soak  # tests/contract/test_engine.py has the engine, tests/unit/learner the rest
def test_gemma_3_trains_with_workers_on_the_general_path(tmp_path: Path) -> None:
    """Sliding windows, a scale of its own for queries, tied embeddings: log-probabilities of engine and learner agree, and the
    last version is everywhere bit for bit."""
    folder = tmp_path / "gemma"
    torch.manual_seed(0)
    tokenizer = _save_tokenizer(folder)
    config = AutoConfig.for_model(**tiny_config("gemma3_text", vocab_size=len(tokenizer)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    run = small_run(tmp_path, folder, steps=STEPS, prompts=4, rollouts=4, eval_prompts=0)
    with Cluster(tmp_path, run, workers=1) as cluster:
        cluster.start_all()
        assert cluster.wait("learner") == 0, cluster.log("learner")[-3000:]
        assert "by transformers' own modules" in cluster.log("w0")
        rows = [row for row in cluster.metrics() if "reward/mean" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    fresh = rows[0]
    assert fresh["lag/histogram"][0] > 0 and abs(fresh["ratio/mean"] - 1.0) < 1e-3, fresh
    assert rows[-1]["tokens/over_stale"] == 0
    saved = AutoModelForCausalLM.from_pretrained(cluster.run_folder / "learner" / "model")
    assert type(saved).__name__ == "Gemma3ForCausalLM"
    moved = [not torch.equal(a, b.to(a.dtype)) for a, b in zip(saved.parameters(), model.parameters(), strict=True)]
    assert any(moved), "it was trained"
