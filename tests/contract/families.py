"""Families of models: a tiny random one of each, as a learner trains it and an embedded worker generates with it.

    python -m tests.contract.families            # writes the table of docs/models.md but for its last column
    python -c 'from tests.contract.families import main; main()' --vllm     # in vLLM's environment: that column, by its CPU build

(`-m` would have vLLM's processes import this module first, and with it llvmlite, which vLLM 0.32 stumbles over.)

The configurations are those of the installed transformers, so a release that changes a family changes the table.
"""

import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import EchoError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.base.staged import TensorUpdate
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import model_size
from echo2.learner.rollouts.groups import TrainGroup
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.scoring import refuse_wrong_rows
from echo2.learner.training.trainer import Trainer
from echo2.weights.elements import bits_of, published_tensors
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.engine import Engine, GenerateRequest, SwapMode
from echo2.worker.engines.vllm.vllm_engine import VllmEngine
from echo2.worker.engines.vllm.weight_map import Patch, record_map
from tests.contract.engine_rig import Staged, generated

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
WINDOW, PROMPT, NEW, ROLLOUTS = 24, 40, 24, 3
RATIO_OFF_MAX = 1e-5
"""Rounding of float32: products are summed in another order in a row of several sequences."""

COMMON: dict[str, object] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
WINDOWED = {"sliding_window": WINDOW}
MIXED = WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPED: dict[str, object] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = GROUPED | {  # the latent sizes of DeepSeek-V3, the only ones that vLLM's kernel for CPUs computes
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 64,
    "num_key_value_heads": 4, "topk_method": "noaux_tc",
}  # fmt: skip
LINEAR: dict[str, object] = {
    "hidden_size": 64, "head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip

GEMMA4: dict[str, object] = {
    "global_head_dim": 64, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "Llama": ("llama", {}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Mistral": ("mistral", WINDOWED),
    "Ministral": ("ministral3", WINDOWED),
    "Phi-3, Phi-4": ("phi3", WINDOWED),
    "Starcoder2": ("starcoder2", WINDOWED),
    "Gemma 2": ("gemma2", WINDOWED | {"query_pre_attn_scalar": 16}),
    "Gemma 3": ("gemma3_text", WINDOWED | {"query_pre_attn_scalar": 16}),
    "Gemma 4": ("gemma4_text", MIXED | GEMMA4),
    "Granite": ("granite", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", WINDOWED),
    "SmolLM3": ("smollm3", {}),
    "Command R7B, Aya": ("cohere2", WINDOWED),
    "GLM-4": ("glm4", {}),
    "Seed-OSS": ("seed_oss", {}),
    "EXAONE 4": ("exaone4", WINDOWED),
    "Hunyuan": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e3, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Nemotron": ("nemotron", {}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "Mixtral": ("mixtral", EXPERTS | WINDOWED),
    "OLMoE": ("olmoe", EXPERTS),
    "gpt-oss": ("gpt_oss", EXPERTS | MIXED),
    "DeepSeek-V3, Kimi-K2": ("deepseek_v3", LATENT),
    "GLM-4.5, GLM-4.6": ("glm4_moe", GROUPED),
    "GLM-4.7-Flash": ("glm4_moe_lite", LATENT),
    "MiniMax-M2": ("minimax_m2", EXPERTS | {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 16}),
    "Granite-MoE": ("granitemoe", EXPERTS),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", EXPERTS | {"moe_num_experts": 6, "moe_k": 2}),
    "Llama 4": ("llama4_text", EXPERTS | {"intermediate_size_mlp": 64, "attention_chunk_size": WINDOW}),
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Qwen3-Next": ("qwen3_next", EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_dim": 128, "block_dim": 128}),
    "Falcon-H1": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 32}),
    "Mamba": ("mamba", {"state_size": 8}),
}


@dataclass(frozen=True)
class Outcome:
    """`rows`: how the learner lays out a batch. `ratio_off`: how far the ratio of its policy to the worker's is from 1 at most, at
    lag 0, or why it is refused. `is_counted`: whether the planner's count of parameters is the model's. `misplaced`: tensors of the
    model's files that a loader of files, as vLLM's are, does not get as they are in the files."""

    rows: str
    ratio_off: float | str
    is_counted: bool
    misplaced: tuple[str, ...]


def save_tiny(model_type: str, more: dict[str, object], folder: Path) -> torch.nn.Module:
    """A random model of the family. Every tensor that it publishes differs from what its class begins with."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(COMMON | more)), dtype=torch.float32)
    with torch.no_grad():
        for tensor in published_tensors(model).values():
            tensor.add_(0.08 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


async def completed(
    make: Callable[..., Engine], config: dict[str, Any], published: dict[str, torch.Tensor], prompt: tuple[int, ...]
) -> list[Rollout]:
    """Completions of one prompt by a worker that has what the learner published."""
    engine = make(config, slot_count=ROLLOUTS, context_tokens=len(prompt) + NEW + 1)
    sampling = [SamplingParams(max_new_tokens=NEW - 2 * number, seed=number) for number in range(ROLLOUTS)]
    updates = [
        TensorUpdate(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), None, bits_of(tensor))
        for name, tensor in published.items()
    ]
    try:
        await engine.start()
        await engine.swap(Staged(Version(0), None, updates), SwapMode.RECOMPUTE_KV)
        requests = [GenerateRequest(str(n), prompt, (), each, "prompt") for n, each in enumerate(sampling)]
        found = list((await generated(engine, requests)).values())
    finally:
        await engine.stop()
    tokens = [tuple(token for chunk in chunks for token in chunk.token_ids) for chunks in found]
    raw = [tuple(logprob for chunk in chunks for logprob in chunk.raw_logprobs) for chunks in found]
    spans = [(VersionSpan(Version(0), len(ids)),) for ids in tokens]
    return [
        Rollout(GroupId("g"), n, ids, raw[n], raw[n], spans[n], FinishReason.LENGTH) for n, ids in enumerate(tokens)
    ]


class Loader(torch.nn.Module):
    """Reads a model's files by the names in them, as vLLM's loaders do, and knows no other name."""

    def __init__(self, files: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.live = torch.nn.ParameterList(torch.zeros_like(tensor) for tensor in files.values())
        self.places = dict(zip(files, self.live, strict=True))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.places[name].data.copy_(tensor)


def misplaced_of(model: torch.nn.Module, folder: Path) -> tuple[str, ...]:
    """The tensors of the folder's files that what is published does not restore through the map of a loader of files."""
    files, published = load_file(folder / "model.safetensors"), published_tensors(model)
    loader = Loader(files)
    shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
    weights = record_map(loader.load_weights, shapes, loader, config=folder)
    bits = ((name, torch.from_numpy(bits_of(tensor)).view(torch.int32)) for name, tensor in published.items())
    weights.apply([Patch(name, "float32", None, found.reshape(-1)) for name, found in bits])
    return tuple(name for name, tensor in files.items() if not torch.equal(loader.places[name], tensor))


def outcome_of(model_type: str, more: dict[str, object], make: Callable[..., Engine] = EmbeddedEngine) -> Outcome:
    prompt = tuple((7 * place + 3) % 96 for place in range(PROMPT))
    with tempfile.TemporaryDirectory() as name:
        model = save_tiny(model_type, more, Path(name))
        learner = PolicyModel(name, "float32", torch.device("cpu"), 1.0)
        config = json.loads(learner.config_json())
        misplaced = misplaced_of(model, Path(name))
        is_counted = model_size(config).parameters == sum(p.numel() for p in model.parameters())
        rows = "packed" if learner.policy.is_packed else "single"
        try:
            refuse_wrong_rows(learner.policy, PROMPT + NEW, f"model_type {model_type}")
            rollouts = asyncio.run(completed(make, config, learner.snapshot(), prompt))
        except EchoError as error:
            return Outcome(rows, str(error), is_counted, misplaced)
        spec = GroupSpec(GroupId("g"), prompt, ROLLOUTS, SamplingParams(max_new_tokens=NEW), 0)
        group = TrainGroup(spec, 0, tuple(rollouts), (0.0,) * ROLLOUTS)
        found = Trainer(
            learner, RunConfig.model_validate({"learner": {"loss": "dapo", "token_budget": 16_384}})
        ).logprobs([group])
    worker = torch.cat([torch.tensor(rollout.raw_logprobs) for rollout in rollouts])
    ratio_off = float(((torch.cat(found) - worker).exp() - 1).abs().max())
    return Outcome(rows, ratio_off, is_counted, misplaced)


def table(before: dict[str, list[str]], *, is_vllm: bool) -> str:
    """The rows of all families. `before`: cells by family, of which those that this environment cannot fill stay."""
    lines = ["| family | `model_type` | learner's rows | embedded worker | vLLM |", "|---|---|---|---|---|"]
    for family, (model_type, more) in FAMILIES.items():
        found = outcome_of(model_type, more, VllmEngine if is_vllm else EmbeddedEngine)
        assert found.is_counted, f"{family}: the planner counts another number of parameters"
        assert not found.misplaced, f"{family}: {found.misplaced} are not as in the model's files"
        assert isinstance(found.ratio_off, str) or found.ratio_off <= RATIO_OFF_MAX, f"{family}: {found.ratio_off}"
        said = str(found.ratio_off)
        refusals = {"did not start": "does not start", "": "refused"}
        ratio = next(text for mark, text in refusals.items() if mark in said)
        ratio = "1e-5" if isinstance(found.ratio_off, float) else ratio
        *_, embedded, vllm = before.get(family, ["untried", "untried"])
        cells = [embedded, ratio] if is_vllm else [ratio, vllm]
        print(family, *cells, said, flush=True)
        lines.append(f"| {family} | `{model_type}` | {found.rows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    logging.getLogger("echo2").setLevel(logging.ERROR)
    begin, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, end = rest.partition(END)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in old.splitlines()]
    found = table({row[0]: row for row in rows}, is_vllm="--vllm" in sys.argv)
    PAGE.write_text(f"{begin}{BEGIN}{found}{END}{end}")


if __name__ == "__main__":
    main()
