"""A LoRA adapter on vLLM: only the adapter is published, vLLM's own LoRA layers apply it, changes go in place."""

import copy
import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from echo2.base.errors import EngineError, VersionMismatch
from echo2.base.rollout import SamplingParams
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.adapter import AdapterSpec
from echo2.worker.engines.engine import Engine, SwapMode
from tests.contract.engine_rig import Rig, Staged, delta_of, keyframe_of, make_versions, refused, tiny_config
from tests.contract.test_engine import all_grew

pytestmark = pytest.mark.vllm
RANK = 6  # vLLM makes room for 8
SCALE = 0.6  # no power of two, so that what is live is not what was published
LONG = SamplingParams(max_new_tokens=120, seed=5)
Tensors = dict[str, torch.Tensor]


def adapters(base: torch.nn.Module) -> list[Tensors]:
    """Three versions of an adapter under peft's names, exactly bf16; each changes about 5 % of the one before."""
    generator = torch.Generator().manual_seed(11)
    first: Tensors = {}
    for name, tensor in base.named_parameters():
        if ".layers." in name and tensor.ndim == 2:
            at = f"base_model.model.{name.removesuffix('.weight')}"
            first[f"{at}.lora_A.weight"] = torch.randn(RANK, tensor.shape[1], generator=generator) * 0.2
            first[f"{at}.lora_B.weight"] = torch.randn(tensor.shape[0], RANK, generator=generator) * 0.2
    versions = [{name: tensor.bfloat16() for name, tensor in first.items()}]
    for _ in range(2):
        newer = {}
        for name, old in versions[-1].items():
            changed = torch.rand(old.shape, generator=generator) < 0.05
            newer[name] = torch.where(changed, old.float() + 0.2, old.float()).bfloat16()
        versions.append(newer)
    return versions


def merged(base: torch.nn.Module, adapter: Tensors) -> torch.nn.Module:
    """The judge: the base in float64 with the adapter's product added."""
    model = copy.deepcopy(base).double()
    with torch.no_grad():
        for name, a in adapter.items():
            module, mark, _ = name.removeprefix("base_model.model.").rpartition(".lora_A.")
            if mark:
                b = adapter[f"base_model.model.{module}.lora_B.weight"]
                model.get_submodule(module).weight.add_(b.double() @ a.double(), alpha=SCALE)
    return model


class AdapterRig(Rig):
    """The rig of the contract, whose versions are those of an adapter over its base."""

    def __init__(self, config: dict[str, object], folder: Path) -> None:
        from echo2.worker.engines.vllm.vllm_engine import BaseOfAdapter, VllmEngine

        base = make_versions(config)[0]
        base.save_pretrained(folder)
        self.adapters = adapters(base)
        named = {name: tensor.detach().bfloat16() for name, tensor in base.named_parameters()}
        spec = AdapterSpec(RANK, SCALE, "bfloat16", f"{fingerprint(named, 0):016x}")

        def make(said: dict[str, object]) -> Engine:
            return VllmEngine(said, slot_count=8, adapter=BaseOfAdapter(spec, str(folder)))

        super().__init__("vllm", config, make)
        self._judges = [merged(base, adapter) for adapter in self.adapters]

    def keyframe(self, version: int) -> Staged:
        return keyframe_of(self.adapters[version], version)

    def delta(self, version: int) -> Staged:
        return delta_of(self.adapters[version - 1], self.adapters[version], version - 1, version)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    made = AdapterRig(tiny_config(request.param), tmp_path_factory.mktemp("base"))
    yield made
    made.close()


async def test_tokens_are_sampled_from_base_and_adapter_in_every_version(rig: AdapterRig) -> None:
    prompts = [(1, 2, 3), (9,), (4, 4, 5, 7, 1, 2)]
    sequences = [rig.submit(rig.request(prompt, LONG, prefix=str(prompt))) for prompt in prompts]
    for version in (1, 2):
        before = [len(sequence.token_ids) for sequence in sequences]
        await rig.wait(partial(all_grew, sequences, before))
        await rig.engine.swap(rig.delta(version), SwapMode.RECOMPUTE_KV)
    await rig.finish(*sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert set(sequence.versions) == {0, 1, 2}
        assert rig.worst(prompt, sequence) < 1e-5


async def test_the_fingerprint_is_that_of_the_published_adapter(rig: AdapterRig) -> None:
    assert await rig.engine.fingerprint(99) == fingerprint(rig.adapters[0], 99)
    await rig.engine.swap(rig.delta(1), SwapMode.RECOMPUTE_KV)
    assert await rig.engine.fingerprint(99) == fingerprint(rig.adapters[1], 99)
    await rig.engine.swap(rig.keyframe(2), SwapMode.RECOMPUTE_KV)
    assert await rig.engine.fingerprint(7) == fingerprint(rig.adapters[2], 7)


async def test_a_failed_swap_leaves_the_old_adapter_live(rig: AdapterRig) -> None:
    """What is checked before a weight is touched is checked alike without an adapter (test_engine)."""
    good, running = rig.delta(1), rig.submit(rig.request((8, 9), LONG))
    stranger = dataclasses.replace(good.tensors[-1], name="base_model.model.model.layers.7.mlp.up_proj.lora_A.weight")
    staged = dataclasses.replace(good, tensors=[*good.tensors[:-1], stranger])
    await refused(rig.engine.swap(staged, SwapMode.RECOMPUTE_KV), EngineError)
    assert rig.engine.version == 0
    assert await rig.engine.fingerprint(5) == fingerprint(rig.adapters[0], 5)
    await rig.finish(running)
    assert rig.worst((8, 9), running) < 1e-4


async def test_another_base_is_refused_before_vllm_starts(rig: AdapterRig, tmp_path: Path) -> None:
    from echo2.worker.engines.vllm.vllm_engine import BaseOfAdapter, VllmEngine

    make_versions(rig.config)[1].save_pretrained(tmp_path)
    spec = AdapterSpec(RANK, SCALE, "bfloat16", "0123456789abcdef")
    engine = VllmEngine(rig.config, adapter=BaseOfAdapter(spec, str(tmp_path)))
    assert "expected the learner's base model" in await refused(engine.start(), VersionMismatch)
    await engine.stop()
