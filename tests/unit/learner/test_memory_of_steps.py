"""What the sizing rule tells of a learner's memory, against a learner's pieces in a process of their own: it trains two steps,
publishes, writes a checkpoint, and prints bytes as JSON.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from echo2.base.ids import Step, Version
from echo2.cost_model.sizing import Checkpointing, LearnerRun, learner_memory, model_size
from echo2.learner.options import LearnerLimits, LearnerOptions
from echo2.learner.publishing.checkpoint import CheckpointStore, write_shards
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import new_team
from echo2.learner.training.ranks import Ranks
from echo2.weights import DeltaHeader, encode_delta, fingerprint
from tests.e2e.cluster import ROOT, environment_of
from tests.patience import WAIT_S
from tests.unit.learner.made import config_of, group_of, rollout_of

PROMPT, COMPLETION = 32, 60
SHAPE = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip


def batch_of(step: int, budget: int) -> Batch:
    """Two micro-batches, both full but for a few tokens."""
    count, told = (budget - PROMPT) // COMPLETION, [-9.0] * COMPLETION
    groups = []
    for name in (f"g{step}-0", f"g{step}-1"):
        rollouts = [rollout_of(range(i, i + COMPLETION), i, name=name, logprobs=told) for i in range(count)]
        rewards = [float(i % 2) for i in range(count)]
        groups.append(group_of(range(PROMPT), rollouts, rewards, max_new_tokens=COMPLETION))
    return Batch(Step(step), tuple(groups))


def status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10


def load_libraries(folder: Path) -> None:
    """What compiles and loads at its first use, which the rule counts with the process."""
    weights, more = {"a": torch.zeros(4096)}, {"a": torch.ones(4096)}
    for _ in encode_delta(
        weights, more, DeltaHeader(Version(1), Version(0), fingerprint(weights, 1), fingerprint_key=1)
    ):
        pass
    folder.mkdir()
    write_shards(weights, folder, Ranks())
    import peft  # noqa: F401

    layer = torch.nn.Linear(64, 64)
    layer(torch.zeros(64, 64)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()


def main() -> None:
    folder = Path(sys.argv[1])
    load_libraries(folder / "libraries")
    shape = dict(SHAPE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    how: Any = sys.argv[2]
    precision, rank, budget = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    config = config_of(folder / "model", precision, lora_rank=rank, lr=1e-5, optimizer_state=how, token_budget=budget)
    options = LearnerOptions(folder, config)
    before = status("VmRSS")
    team = new_team(options, Ranks())
    Path("/proc/self/clear_refs").write_text("5")
    store = CheckpointStore(folder / "checkpoints", LearnerLimits(free_bytes_min=0))
    versions = [team.snapshot()]
    for step in range(2):
        team.step(batch_of(step, budget))
        published, newer = versions[-1], team.snapshot()
        checkpoint = team.take(store, newer, Version(step + 1), {"journal_from": 0})
        parent = team.coder.fingerprint(Version(step), published, 1)
        for _ in encode_delta(
            published, newer, DeltaHeader(Version(step + 1), Version(step), parent, fingerprint_key=1)
        ):
            pass
        store.save(checkpoint)
        versions = [published, newer]  # a learner encodes beside the next step
    size = model_size(shape)
    run = LearnerRun(adapter_rank=rank, has_nf4_base=precision == "nf4", optimizer_state=how)
    assert run.trained_parameters(size) == team.model.parameter_count
    told = learner_memory(size, budget, Checkpointing.OFF, gpu_count=0, run=run)
    print(json.dumps({"peak": status("VmHWM") - before, "told": told.device_bytes, "parameters": size.parameters}))


@pytest.mark.parametrize(
    ("optimizer_state", "precision", "rank", "budget"),
    [
        pytest.param("float32", "bfloat16", 0, 512, marks=pytest.mark.soak),
        pytest.param("8bit", "bfloat16", 0, 512, marks=pytest.mark.extras),
        pytest.param("float32", "nf4", 16, 2048, marks=pytest.mark.soak),  # a minute
    ],
)
def test_steps_take_memory_told(tmp_path: Path, optimizer_state: str, precision: str, rank: int, budget: int) -> None:
    if optimizer_state == "8bit":
        pytest.importorskip("bitsandbytes")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are the Linux kernel's")
    how = [optimizer_state, precision, str(rank), str(budget)]
    command = [sys.executable, "-m", __name__, str(tmp_path), *how]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment_of(tmp_path), cwd=ROOT, timeout=WAIT_S
    )
    found = json.loads(done.stdout.splitlines()[-1])
    # Some 15 MB of libraries' own are not counted, of 500 MB; a copy of masters and moments would be 12 bytes a parameter, and so
    # would the base in float32 be three times what its codes, or weights kept for the backward pass, are.
    off = found["peak"] - found["told"]
    assert abs(off) < 0.1 * found["told"], f"told {found['told']}, measured {found['peak']}"


if __name__ == "__main__":
    main()
