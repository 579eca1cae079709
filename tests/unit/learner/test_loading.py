"""Model folders: what is loaded, what is refused by name, and what is written back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import ConfigError
from echo2.learner.own_trainer import DeclaredModel
from echo2.learner.rollouts.prompts import load_tokenizer
from echo2.learner.serve import ServedModel
from echo2.learner.startup import export
from echo2.learner.training import loading
from echo2.learner.training.loading import load_whole, read_ends, size_of, skeleton_of
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.model_files import checked_path
from echo2.worker.engines.adapter import adapter_spec, load_base
from echo2.worker.engines.embedded.live_weights import read_shape
from tests.contract.families import COMMON, EXPERTS, LATENT, save_tiny
from tests.unit.learner.tiny import make_tiny_model

CPU = torch.device("cpu")


def base_of(folder: Path, dtype: torch.dtype) -> Path:
    """A base model with head and embedding tied, in this dtype."""
    make_tiny_model(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


def changed(folder: Path, **fields: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_has_its_base_s_form_and_size(tmp_path: Path, dtype: str, rank: int) -> None:
    base = base_of(tmp_path / "base", getattr(torch, dtype))
    if dtype == "float16":  # what a policy in bf16 can hold as well
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).half().save_pretrained(base)
    precision = "float32" if dtype == "float32" else "bfloat16"
    model = PolicyModel(str(base), precision, CPU, 1.0, lora_rank=rank)
    (tmp_path / "out.previous").mkdir()  # as a kill between two renames leaves it
    export(model, model.snapshot(), load_tokenizer(str(base)), tmp_path / "out")
    assert not (tmp_path / "out.previous").exists()
    of_base, of_export = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    shapes, expected = ({name: (t.shape, t.dtype) for name, t in each.items()} for each in (of_export, of_base))
    assert shapes == expected
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == (base / "model.safetensors").stat().st_size
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "whoever reads one file reads all"
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["dtype"] == dtype and said == json.loads((base / "config.json").read_text())
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (base, tmp_path / "out")]
    assert torch.equal(*logits)


def test_a_config_that_asks_for_more_than_logits_or_for_8_bits_is_trained_and_written(tmp_path: Path) -> None:
    asks = {"return_dict": False, "output_attentions": True, "output_hidden_states": True, "dtype": "float8_e4m3fn"}
    model = PolicyModel(str(changed(make_tiny_model(tmp_path / "base"), **asks)), "bfloat16", CPU, 1.0)
    model.save(model.snapshot(), tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_an_export_keeps_what_lies_beside_the_weights_with_an_adapter_too(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", LATENT, tmp_path / "base")
    for rank in (0, 2):
        model = PolicyModel(str(tmp_path / "base"), "bfloat16", CPU, 1.0, lora_rank=rank)
        model.save(model.snapshot(), tmp_path / str(rank))
        found = load_file(tmp_path / str(rank) / WEIGHTS)
        kept = {name: tensor for name, tensor in load_file(tmp_path / "base" / WEIGHTS).items() if "bias" in name}
        assert kept and all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    served = ServedModel(str(tmp_path / "base"), "bfloat16", records_routing=False)
    dtypes = {name: tensor.dtype for name, tensor in served.read(served.path).items()}
    assert {name for name in dtypes if dtypes[name] is not torch.bfloat16} == served.kept == kept.keys()


def test_an_export_of_a_model_that_sees_keeps_what_prepares_images(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    save_tiny("gemma3", {"text_config": COMMON, "vision_config": vision, "mm_tokens_per_image": 4}, base)
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    model = PolicyModel(str(base), "bfloat16", CPU, 1.0)
    export(model, model.snapshot(), load_tokenizer(str(base)), tmp_path / "out")
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 28}'


def test_a_folder_may_be_named_from_the_home_and_what_it_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tiny_model(tmp_path / "model")
    spec = adapter_spec(json.loads(PolicyModel("~/model", "bfloat16", CPU, 1.0, lora_rank=2).config_json()))
    assert spec is not None and load_base("~/model", spec).layers and load_tokenizer("~/model").eos_token_id == 1
    (tmp_path / "model" / "config.json").rename(tmp_path / "config.json")
    assert load_tokenizer("~/model").eos_token_id == 1, "a folder may hold nothing else"
    (tmp_path / "config.json").rename(tmp_path / "model" / "config.json")
    (tmp_path / "model" / WEIGHTS).write_bytes(b"cut")
    with pytest.raises(ConfigError, match="~/model: cannot be loaded as a causal LM"):
        load_base("~/model", spec)
    for content in ("{}", "[]", '{"version": "1.0"}'):
        (tmp_path / "model" / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match="expected a tokenizer beside the model"):
            load_tokenizer("~/model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    for family in ("qwen3", "gemma3_text", "gpt2", "llama"):
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(ConfigError, match="~/model: expected a tokenizer beside the model"):
            load_tokenizer("~/model")


@pytest.mark.parametrize("listed", ["kept beside one file", "of the wrong files"])
def test_tensors_are_read_from_the_files_that_transformers_reads(tmp_path: Path, listed: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    names, parts = [*tensors], ["a.safetensors", "b.safetensors"]
    if listed == "of the wrong files":
        (folder / WEIGHTS).unlink()
        for part, own in zip(parts, (names[:5], names[5:]), strict=True):
            save_file({name: tensors[name] for name in own}, folder / part, {"format": "pt"})
    where = dict(zip(names, [*parts[::-1], *parts * len(names)], strict=False))
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert checked_path(str(folder), has_weights=True)
    skeleton = skeleton_of(str(folder), torch.float32, CPU)
    assert skeleton is not None
    skeleton.fill(skeleton.hf_model)
    whole = load_whole(str(folder), torch.float32)
    pairs = zip(skeleton.hf_model.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


def test_an_adapter_is_put_on_what_multiplies_alone(tmp_path: Path) -> None:
    """This router's class is a linear layer's, and gives more than its product."""
    save_tiny("phimoe", {"num_local_experts": 6, "num_experts_per_tok": 2}, tmp_path / "base")
    model = PolicyModel(str(tmp_path / "base"), "bfloat16", CPU, 1.0, lora_rank=2)
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in model.names} == {f"{x}_proj" for x in "qkvo"}


@pytest.mark.parametrize(
    ("precision", "value", "dtype"),
    [("bfloat16", 3.0, torch.float16), ("bfloat16", 7e4, torch.bfloat16), ("float32", 1 + 2**-20, torch.float32)],
    ids=["fits", "too large", "too precise"],
)
@pytest.mark.parametrize("make", [lambda *how: PolicyModel(*how, CPU, 1.0), DeclaredModel], ids=["ours", "own trainer"])
def test_a_base_in_float16_stays_so_unless_that_would_change_the_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str, value: float, dtype: torch.dtype,
    make: Callable[[str, str], Any],
) -> None:  # fmt: skip
    base, name = base_of(tmp_path / "base", torch.float16), "model.norm.weight"
    policy = PolicyModel(str(base), precision, CPU, 1.0).snapshot()
    policy[name].fill_(value)
    export(make(str(base), precision), policy, load_tokenizer(str(base)), tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / WEIGHTS).values()} == {dtype}
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == dtype and torch.equal(found.model.norm.weight.float(), policy[name].float())
    assert (f"{name} has grown beyond torch.float16" in caplog.text) == (value > 6e4)


def test_an_untied_head_is_read_as_the_files_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = base_of(tmp_path / "base", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    model = PolicyModel(str(folder), "bfloat16", CPU, 1.0)
    assert "tie_word_embeddings" in caplog.text
    assert torch.equal(model.snapshot()["lm_head.weight"], head)
    assert not read_shape(json.loads(model.config_json())).is_tied, "workers read it the same way"
    assert skeleton_of(str(folder), torch.float32, CPU) is None, "several ranks too"
    assert "lm_head.weight and model.embed_tokens.weight tied" in caplog.text
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tied, folder / "model.safetensors", {"format": "pt"})
    assert load_whole(str(folder), torch.float32).config.tie_word_embeddings
    save_tiny("inkling_text", EXPERTS, tmp_path / "silent")  # whose config has no word for it
    load_whole(str(tmp_path / "silent"), torch.float32)
    assert skeleton_of(str(folder), torch.float32, CPU) is not None


def test_missing_and_unexpected_tensors_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.layers.1.self_attn.q_norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 are missing, first model\.layers\.1\.self_attn\.q_norm\.weight"):
        load_whole(str(folder), torch.float32)
    whole = {**tensors, "model.layers.1.self_attn.q_norm.weight": norm, "model.extra.weight": norm.clone()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    load_whole(str(folder), torch.float32)
    assert "1 tensors that a Qwen3ForCausalLM does not have, first model.extra.weight" in caplog.text


def test_what_ends_a_completion_is_what_any_file_calls_its_end(tmp_path: Path) -> None:
    folder = changed(make_tiny_model(tmp_path / "model"), eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, -1, 9999]}))
    assert PolicyModel(str(folder), "bfloat16", CPU, 1.0).stop_token_ids == read_ends(str(folder)) == (1, 5, 7)


def test_a_context_extended_by_yarn_is_as_long_as_the_factor_says(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": yarn}))
    model = PolicyModel(str(folder), "bfloat16", CPU, 1.0)
    assert model.context_tokens == 1024
    assert read_shape(json.loads(model.config_json())).context_tokens == 1024
    changed(folder, max_position_embeddings=2048)
    assert PolicyModel(str(folder), "bfloat16", CPU, 1.0).context_tokens == 2048, "it says more already"


def test_widths_that_differ_have_a_size_and_what_no_engine_rotates_alike_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers: dict[str, object] = {
        "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0,
        "intermediate_size": [64, 96], "activation_sparsity_pattern": [0.0, 0.0],
    }  # fmt: skip
    assert size_of(AutoConfig.for_model("gemma3n_text", **(COMMON | layers))).mlp_width == 96
    rope: dict[str, object] = {"rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    longrope = rope | {"rope_type": "longrope", "original_max_position_embeddings": 64}
    fields = COMMON | {"rope_parameters": longrope, "original_max_position_embeddings": 64}
    assert size_of(AutoConfig.for_model("phi3", **fields)).context_tokens == 64
    assert "at most 64 tokens of its context of 256" in caplog.text
    growing = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "alpha": 2.0}
    with pytest.raises(ConfigError, match="rope_type: dynamic"):
        size_of(AutoConfig.for_model("llama", **(COMMON | {"rope_parameters": growing})))


def written(name: str, content: bytes | str) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def listing(index: str) -> Callable[[Path], object]:
    return lambda folder: (
        (folder / WEIGHTS).rename(folder / "0.safetensors") and written(f"{WEIGHTS}.index.json", index)(folder)
    )


def cut(count: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:count])


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, name: change(tensors[name])}, folder / WEIGHTS, {"format": "pt"})

    return write


def rope(**fields: object) -> Callable[[Path], object]:
    return lambda folder: changed(folder, rope_parameters=None, rope_theta=1e4, rope_scaling=fields)


WEIGHTS, UP = "model.safetensors", "model.layers.0.mlp.up_proj.weight"
POINTER = "version https://git-lfs.example/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 1204\n"
NO_TORCH: list[tuple[Callable[[Path], object], str]] = [
    (written(WEIGHTS, POINTER), r"model\.safetensors: .* pointer .* `git lfs pull`"),
    (written("tokenizer.json", POINTER), r"tokenizer\.json: .* pointer"),
    (written(WEIGHTS, ""), r"model\.safetensors: expected whole safetensors"),
    (written(WEIGHTS, "<!DOCTYPE html>" * 99), r"model\.safetensors: expected whole safetensors"),
    (cut(60), r"model\.safetensors: expected whole safetensors"),
    (cut(-100), r"model\.safetensors: expected whole safetensors, got something else \(\d+ bytes instead of \d+\)"),
    (lambda folder: (folder / WEIGHTS).unlink(), "expected its weights, found neither"),
    (listing("{}"), r"index\.json: expected a weight_map"),
    (listing('{"weight_map": {"a": "1.safetensors"}}'), "1 files .* 1 are missing, first 1.safetensors"),
    (written("config.json", '{"model_type"'), r"config\.json: expected whole json"),
    (written("config.json", "[]"), "expected a model's config, got list"),
    (written("generation_config.json", "{"), r"generation_config\.json: expected whole json"),
    (written("adapter_config.json", "{}"), "found an adapter"),
    (with_tensor(UP, lambda tensor: tensor.to(torch.int8)), r"expected weights of 16 or 32 bits, got .*up_proj\.weight as I8"),
    (lambda folder: changed(folder, quantization_config={"quant_method": "awq"}), r"got quantised ones \(awq\)"),
]  # fmt: skip
BY_LOADING: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: changed(folder, intermediate_size=24), r"tensors differ, first .*: \(\d+, \d+\) in its files, \("),
    (lambda folder: changed(folder, num_attention_heads=None), "cannot be loaded as a causal LM: .*num_attention_heads"),
    (lambda folder: changed(folder, model_type="llama9"), "cannot be loaded as a causal LM: .*llama9"),
    (lambda folder: changed(folder, model_type="odd", auto_map={"AutoConfig": "odd.Odd"}), "cannot be loaded .* custom code"),
    (with_tensor(UP, lambda tensor: tensor * float("nan")), r"expected finite weights, .*up_proj\.weight holds NaN"),
    (rope(type="yarn", factor="4"), "rope_scaling: expected a number from 1 on as its factor, got '4'"),
    (rope(type="yarn", factor=-1.0), "rope_scaling: expected a number from 1 on as its factor, got -1.0"),
    (rope(type="yarn"), "cannot be loaded as a causal LM: .*factor"),
    (rope(factor=4.0), "rope_scaling: expected a type beside the factor"),
    (lambda folder: save_tiny("gptj", {"rotary_dim": 64}, folder), "its forward pass fails: The size of tensor"),
    (written("generation_config.json", '{"max_new_tokens": -1}'), "generation_config.json|than 0"),
    (written("generation_config.json", '{"eos_token_id": "</s>"}'), "eos_token_id: expected token ids .* got '</s>'"),
    (written("generation_config.json", '{"eos_token_id": true}'), "eos_token_id: expected token ids .* got True"),
    (written("generation_config.json", '{"eos_token_id": [[1], 5]}'), r"eos_token_id: expected token ids .* got \[1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), NO_TORCH, ids=[said for _, said in NO_TORCH])
def test_files_are_checked_before_loading(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    assert checked_path(str(folder), has_weights=True) == str(folder)
    damage(folder)
    with pytest.raises(ConfigError, match=said):
        checked_path(str(folder), has_weights=True)


@pytest.mark.parametrize(("damage", "said"), BY_LOADING, ids=[said for _, said in BY_LOADING])
def test_what_only_loading_shows_is_refused(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    damage(folder)
    with pytest.raises(ConfigError, match=said):
        _ = PolicyModel(str(folder), "float32", CPU, 1.0).stop_token_ids
    if "generation" in said or "eos_token_id" in said:
        with pytest.raises(ConfigError, match=said):
            DeclaredModel(str(folder), "float32")


def test_a_hub_id_is_refused_as_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "checked_path", lambda path, **_: path)  # there are no files to look at
    folder = changed(make_tiny_model(tmp_path / "model"), quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match=r"got quantised ones \(mxfp4\)"):
        PolicyModel(str(folder), "float32", CPU, 1.0)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ConfigError, match="this kind of AutoModel: AutoModelForCausalLM") as refused:
        load_whole(str(folder), torch.float32)
    assert len(str(refused.value)) < 500, "not each of the two hundred that it knows"
