"""A mixture of experts: trained, published, and replayed by the experts that sampled it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo2.base.errors import ConfigError, MalformedMessage
from echo2.base.ids import GroupId, Step
from echo2.base.rollout import (
    NO_ROUTING,
    ROLLOUT_ROUTING_BYTES_MAX,
    ROUTING_KEY,
    FinishReason,
    GroupSpec,
    Rollout,
    Routing,
    RoutingShape,
    SamplingParams,
    SegmentVerdict,
    Verdict,
    unpacked,
)
from echo2.learner.rollouts.groups import Batch, TrainGroup, empty_rollout, extended
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.learner.training.trainer import Trainer
from echo2.wire.rollout import rollout_to_message, segment_from_message
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.engine import GenerateRequest, SwapMode, TokenChunk
from echo2.worker.rollouts import PartialRollout
from tests.contract.engine_rig import generated, keyframe_of, tiny_config
from tests.contract.families import EXPERTS, save_tiny
from tests.unit.learner.fleet import options_for, prepared_from
from tests.unit.learner.made import new_trainer, rollout_of
from tests.unit.learner.tiny import make_tiny_model

SHAPE = RoutingShape(2, 2, 6)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_undecided(tmp_path_factory.mktemp("moe"))


def save_undecided(path: Path) -> Path:
    """A tiny Qwen3-MoE whose routers find most experts nearly as good: rounding decides, as it does in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make_tiny_model(path)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config("qwen3_moe")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(1e-3)
            elif "experts" in name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


def make_noisy(engine: EmbeddedEngine, size: float) -> None:
    """Each call of a router sees its weights with other noise, as another kernel's rounding gives."""
    generator = torch.Generator().manual_seed(5)
    for module in engine._weights.model.modules():  # type: ignore[attr-defined]
        if type(module).__name__ != "Qwen3MoeTopKRouter":
            continue
        kept: list[Tensor] = []

        def before(router: Any, _: Any, kept: list[Tensor] = kept) -> None:
            kept.append(router.weight.clone())
            router.weight.add_(size * torch.randn(router.weight.shape, generator=generator))

        def after(router: Any, _: Any, __: Any, kept: list[Tensor] = kept) -> None:
            router.weight.copy_(kept.pop())

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def sampled(trainer: Trainer, count: int, noise: float, make: Callable[..., Any] = EmbeddedEngine) -> TrainGroup:
    """One group by an engine, through the worker's and the learner's own records of it. `noise`: in an embedded one's routers."""
    config = json.loads(trainer.model.config_json())
    assert config[ROUTING_KEY] is True
    prompt = tuple(range(3, 40))
    sampling = SamplingParams(max_new_tokens=40, seed=1)

    async def body() -> dict[str, list[TokenChunk]]:
        engine = make(config, slot_count=count)
        await engine.start()
        try:
            await engine.swap(keyframe_of(trainer.model.hf_model, 0), SwapMode.RECOMPUTE_KV)
            if noise:
                make_noisy(engine, noise)
            seeded = [replace(sampling, seed=number) for number in range(count)]
            return await generated(engine, [GenerateRequest(f"r{n}", prompt, (), s, "p") for n, s in enumerate(seeded)])
        finally:
            await engine.stop()

    rollouts = []
    for index, chunks in enumerate(asyncio.run(body()).values()):
        partial, held = PartialRollout(GroupId("g"), index, 0.0), empty_rollout(GroupId("g"), index)
        for chunk in chunks:
            partial.append(chunk)
        while partial.has_news:
            segment = segment_from_message(rollout_to_message(partial.news(13, 0)))
            extension = extended(held, segment)
            assert extension is not None
            held = extension
            verdict = Verdict.ADMITTED if held.is_finished else Verdict.HELD
            partial.judge(SegmentVerdict(GroupId("g"), index, verdict, len(held.token_ids)))
        rollouts.append(held)
    spec = GroupSpec(GroupId("g"), prompt, count, sampling, 0)
    group = TrainGroup(spec, 0, tuple(rollouts), tuple(float(n % 2) for n in range(count)))
    return batch_from_bytes(batch_to_bytes(Batch(Step(0), (group,)))).groups[0]


def off(trainer: Trainer, group: TrainGroup) -> float:
    found = trainer.logprobs([group])
    told = [torch.tensor(rollout.raw_logprobs) for rollout in group.rollouts]
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, told, strict=True))


def without_routing(group: TrainGroup) -> TrainGroup:
    return replace(group, rollouts=tuple(replace(rollout, routing=NO_ROUTING) for rollout in group.rollouts))


def test_replayed_routing_is_kept_and_removes_what_noise_in_the_router_does(model_path: Path, tmp_path: Path) -> None:
    trainer = new_trainer(model_path, replay_routing=True, row_tokens=100)
    group = sampled(trainer, 4, noise=1e-6)
    shape = trainer.model.policy.routing
    assert shape == SHAPE
    assert all(len(r.routing.tokens) == len(r.token_ids) * shape.row_bytes for r in group.rollouts)
    # Of a prompt that all share, one rollout says it.
    assert [len(r.routing.prompt) // shape.row_bytes for r in group.rollouts] == [36, 0, 0, 0]
    assert off(trainer, group) <= 1e-4
    assert off(trainer, without_routing(group)) > 1e-2
    assert off(new_trainer(model_path), group) > 1e-2
    replaying = options_for(tmp_path / "run", model_path, learner={"replay_routing": True})
    assert prepared_from(replaying).groups.row_bytes == SHAPE.row_bytes


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2, "kl_coefficient": 0.1}], ids=["whole", "adapter"])
def test_a_replayed_step_trains_routers_and_layers_computed_again_get_the_same_experts(
    model_path: Path, more: dict[str, Any]
) -> None:
    """The reference of an adapter's penalty is the same model, whose own routers choose."""
    probe = new_trainer(model_path, replay_routing=True)
    group = sampled(probe, 4, noise=1e-6)
    plain = new_trainer(model_path, replay_routing=True, **more)
    trainer = new_trainer(model_path, replay_routing=True, gradient_checkpointing=True, **more)
    results = [each.step(Batch(Step(0), (group,))) for each in (plain, trainer)]
    assert results[0].metrics is not None and results[1].metrics is not None
    assert results[1].metrics["loss"] == pytest.approx(results[0].metrics["loss"], abs=1e-6)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
    gates = {n: t for n, t in trainer.model.masters_by_name().items() if n.endswith("mlp.gate.weight")}
    before = probe.model.masters_by_name()
    idle = sum(tensor.numel() * 4 // 6 for name, tensor in before.items() if ".experts." in name)
    at_work = probe.model.parameter_count - idle  # of 6 experts 2
    if more:
        assert results[0].metrics["kl/reference"] > 1e-5, "without the routes"
        trained = trainer.model.parameter_count
        assert trainer.model.flops_per_position == 4 * (at_work + trained) + 2 * trained
        return
    assert probe.model.flops_per_position == 6 * at_work
    assert len(gates) == 2 and all(not torch.equal(tensor, before[name]) for name, tensor in gates.items())


def test_no_routers_and_ones_that_choose_by_something_else_are_refused_at_the_start_of_learner_and_worker(
    tmp_path: Path,
) -> None:
    """They would be told of experts in vain, and a worker would find none recorded in the midst of its first rollout."""
    with pytest.raises(ConfigError, match="no such router"):
        new_trainer(make_tiny_model(tmp_path / "dense"), replay_routing=True)
    save_tiny("phimoe", EXPERTS, tmp_path)
    with pytest.raises(ConfigError, match=r"by torch.topk, and these do not: set learner.replay_routing"):
        new_trainer(tmp_path, replay_routing=True)
    config = {**json.loads((tmp_path / "config.json").read_text()), ROUTING_KEY: True}
    with pytest.raises(ConfigError, match=r"model_type phimoe: routing can be replayed where routers choose by"):
        asyncio.run(EmbeddedEngine(config, slot_count=1).start())


def test_rows_that_name_other_experts_are_refused_and_not_trained_by(model_path: Path) -> None:
    with pytest.raises(MalformedMessage, match="experts below 6, got 7"):
        unpacked(b"\xff\xff", SHAPE)
    trainer = new_trainer(model_path, replay_routing=True)
    group = sampled(trainer, 2, noise=0.0)
    assert off(trainer, group) <= 1e-4, "without noise its own router chooses what the worker's did"
    lies = [replace(r, routing=Routing(b"", b"\xff" * len(r.routing.tokens))) for r in group.rollouts]
    assert off(trainer, replace(group, rollouts=tuple(lies))) == off(trainer, without_routing(group))


def test_routing_that_is_missing_for_some_tokens_or_grows_too_long_is_dropped() -> None:
    def segment(offset: int, count: int, rows: bytes) -> Rollout:
        made = rollout_of((1,) * count, reason=FinishReason.UNFINISHED)
        return replace(made, routing=Routing(b"", rows), offset=offset)

    held = extended(empty_rollout(GroupId("g"), 0), segment(0, 2, b"aabb"))
    assert held is not None and held.routing.tokens == b"aabb"
    again = extended(held, segment(1, 2, b"bbcc"))  # one token was sent before
    assert again is not None and again.routing.tokens == b"aabbcc"
    assert Routing(b"p", b"aabbcc").up_to(2, 3) == Routing(b"p", b"aabb")  # a stop string ends it
    for odd in (segment(2, 2, b""), segment(2, 2, b"cccddd")):
        other = extended(held, odd)
        assert other is not None and other.routing == NO_ROUTING
    kept = ROLLOUT_ROUTING_BYTES_MAX // 2048
    long = extended(empty_rollout(GroupId("g"), 0), segment(0, kept, bytes(kept * 2048)))
    assert long is not None and long.routing
    longer = extended(long, segment(kept, 1, bytes(2048)))
    assert longer is not None and longer.routing == NO_ROUTING
