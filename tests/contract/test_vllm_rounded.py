"""vLLM that rounds linear layers to fp8 itself, fed by bf16 changes: what is live is what a fresh load would leave, bit for bit.

The kernels for fp8 products differ by device; what is rounded, when, and from what does not.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.cost_model.sizing import Quantisation
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.engine import SwapMode
from tests.contract.engine_rig import (
    Collected,
    Rig,
    Staged,
    bits_of,
    fp8_rows,
    raw_logprobs,
    refused,
    rounded_to_fp8,
    tiny_config,
)

pytestmark = pytest.mark.vllm
KINDS = [
    pytest.param(("qwen3", 1), id="qwen3"),
    pytest.param(("qwen2", 1), id="qwen2-biases"),
    pytest.param(("llama", 1), id="llama-untied"),
    pytest.param(("qwen3", 2), id="qwen3-2-ranks"),
]
OFF_MAX = 2.0
"""Of what torch's own bf16 with the same rounding is off by, root mean square: these models amplify all rounding."""


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    from echo2.worker.engines.vllm.vllm_engine import VllmEngine

    model_type, ranks = request.param
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the functions below go to vLLM's processes
    gpus = range(ranks) if ranks > 1 else ()
    made = Rig(
        "vllm-fp8",
        tiny_config(model_type, **({"hidden_size": 128} if model_type == "qwen2" else {})),
        lambda config: VllmEngine(config, slot_count=8, gpus=gpus, quantisation=Quantisation.FP8),
        rounded_to_fp8,
    )
    yield made
    made.close()
    patch.undo()


def live_digests(worker: Any) -> dict[str, str]:
    """Runs in vLLM's process: of the bits of every parameter."""
    found = {}
    for name, parameter in worker.model_runner.model.named_parameters():
        raw = parameter.data.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        found[f"{name} {parameter.dtype} {tuple(parameter.shape)}"] = hashlib.sha256(raw).hexdigest()
    return found


def load_afresh(worker: Any, path: str) -> None:
    """Runs in vLLM's process: its own way from a checkpoint to rounded layers, into the same parameters."""
    worker.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()))


async def on_each(rig: Rig, function: Any, *arguments: object) -> list[Any]:
    return list(await rig.engine._llm.collective_rpc(function, args=arguments))  # type: ignore[attr-defined]


def codes_of(digests: dict[str, str]) -> list[str]:
    return [name for name in digests if "float8_e4m3fn" in name]


async def test_changes_leave_what_a_fresh_load_by_vllm_leaves(rig: Rig, tmp_path: Path) -> None:
    before = await on_each(rig, live_digests)
    assert all(len(codes_of(each)) == 12 for each in before), "four rounded matrices in each of three layers"
    for version in (1, 2):
        await rig.engine.swap(rig.delta(version), SwapMode.RECOMPUTE_KV)
        tensors = rig.published(version)
        assert await rig.engine.fingerprint(5) == fingerprint(tensors, 5)
        changed = await on_each(rig, live_digests)
        for old, new in zip(before, changed, strict=True):
            assert all(old[name] != new[name] for name in codes_of(old))
        path = tmp_path / f"{version}.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        await on_each(rig, load_afresh, str(path))
        assert await on_each(rig, live_digests) == changed
        assert await rig.engine.fingerprint(5) == fingerprint(tensors, 5)
        before = changed


async def test_a_change_of_one_tensor_moves_its_layer_alone(rig: Rig) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    before = await on_each(rig, live_digests)
    tensors = rig.published(0)
    changed = tensors[name].clone()
    changed[3, 7] = 9.0
    place = torch.tensor([3 * changed.shape[1] + 7]).numpy()
    update = TensorUpdate(name, "bfloat16", tuple(changed.shape), place, bits_of(changed)[place])
    await rig.engine.swap(Staged(Version(1), Version(0), [update]), SwapMode.RECOMPUTE_KV)
    assert await rig.engine.fingerprint(5) == fingerprint(tensors | {name: changed}, 5)
    moved = {
        key.partition(" ")[0]
        for old, new in zip(before, await on_each(rig, live_digests), strict=True)
        for key in old
        if old[key] != new[key]
    }
    qkv = "model.layers.1.self_attn.qkv_proj"
    assert moved == {f"{qkv}.weight", f"{qkv}.weight_scale"}


async def test_an_update_that_fails_leaves_codes_and_scales(rig: Rig) -> None:
    before = await on_each(rig, live_digests)
    whole = fingerprint(rig.published(0), 5)
    wrong = [TensorUpdate("model.norm.weight", "float32", (64,), None, bits_of(torch.ones(64)))]
    await refused(rig.engine.swap(Staged(Version(1), Version(0), wrong), SwapMode.RECOMPUTE_KV), EngineError)

    async def refuse(label: str) -> None:
        raise RuntimeError(f"expected no label, got {label}")

    llm = rig.engine._llm  # type: ignore[attr-defined]
    label, llm.update_weight_version = llm.update_weight_version, refuse
    try:  # what fails after all was rounded anew is taken back too
        await refused(rig.engine.swap(rig.delta(1), SwapMode.RECOMPUTE_KV), RuntimeError)
    finally:
        llm.update_weight_version = label
    assert rig.engine.version == 0 and await rig.engine.fingerprint(5) == whole
    assert await on_each(rig, live_digests) == before


async def test_a_fingerprint_counts_only_while_codes_follow_from_the_masters(rig: Rig) -> None:
    whole = fingerprint(rig.published(0), 5)
    await on_each(rig, spoil)
    assert await rig.engine.fingerprint(5) != whole
    await rig.engine.swap(rig.keyframe(0), SwapMode.RECOMPUTE_KV)
    assert await rig.engine.fingerprint(5) == whole


def spoil(worker: Any) -> None:
    """Runs in vLLM's process: one code is another."""
    live = worker.model_runner.model.get_parameter("model.layers.2.mlp.down_proj.weight").data
    live[0, 0] = 1.0 if float(live[0, 0]) != 1.0 else 2.0


async def test_tokens_are_those_of_the_rounded_model_through_changes_in_flight(rig: Rig) -> None:
    """As far from the exact numbers of rounded weights as torch in bf16 is, where what they are multiplied with is rounded too."""
    computed = [as_computed(copy.deepcopy(model)) for model in rig.models]
    sampling = SamplingParams(max_new_tokens=160, seed=5)
    requests = [rig.request((1, 2, 3 + n), sampling) for n in range(4)]
    sequences = [rig.submit(request) for request in requests]
    for version in (1, 2):
        await rig.wait(lambda at=40 * version: all(len(each.token_ids) >= at for each in sequences))  # type: ignore[misc]
        await rig.engine.swap(rig.delta(version), SwapMode.RECOMPUTE_KV)
    await rig.finish(*sequences)
    assert {version for each in sequences for version in each.versions} == {0, 1, 2}
    for request, each in zip(requests, sequences, strict=True):
        assert len(each.token_ids) == 160 and each.finish_reason is FinishReason.LENGTH
        prompt = request.prompt_token_ids
        exact = told(each, [partial(rig.raw_logprobs, version, prompt) for version in range(3)])
        by_torch = told(each, [partial(raw_logprobs, model, prompt) for model in computed])
        off, allowed = rms(torch.tensor(each.raw_logprobs) - exact), OFF_MAX * rms(by_torch - exact)
        assert off < allowed, f"{off:.3f} nats of {allowed:.3f}"


def as_computed(model: torch.nn.Module) -> torch.nn.Module:
    """The rounded model in bf16, with what rounded matrices multiply rounded by a scale a token, as vLLM's kernels do."""

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        codes, scales = fp8_rows(inputs[0].flatten(0, -2))
        return (codes.float() * scales).to(inputs[0].dtype).view_as(inputs[0])

    model = rounded_to_fp8(model).bfloat16()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)
    return model


def told(sequence: Collected, by_version: Sequence[Callable[[list[int]], torch.Tensor]]) -> torch.Tensor:
    """Raw log-probabilities of a sequence's tokens, each under the version that it claims."""
    judged = {version: by_version[version](sequence.token_ids) for version in set(sequence.versions)}
    claims = enumerate(zip(sequence.versions, sequence.token_ids, strict=True))
    return torch.tensor([float(judged[version][at, token]) for at, (version, token) in claims])


def rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())
