from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.errors import ConfigError, TrainingError
from echo2.base.ids import Step
from echo2.base.rollout import FinishReason
from echo2.config.run import OptimizerState
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.startup import new_team
from echo2.learner.training import model as model_module
from echo2.learner.training import trainer as trainer_module
from echo2.learner.training.loading import load_whole
from echo2.learner.training.loss import LossConfig
from echo2.learner.training.model import PolicyModel, check_dtypes, selective_contexts
from echo2.learner.training.optimiser import refuse_optimizer
from echo2.learner.training.packing import PackedInputs
from echo2.learner.training.ranks import Ranks
from echo2.learner.training.trainer import BETAS, Trainer
from echo2.weights.precision import round_parameters
from tests.unit.learner.made import config_of, new_trainer, random_groups

CPU = torch.device("cpu")
PLAIN = {"weights_dtype": "float32", "grad_clip": 1e9}
DECOUPLED = LossConfig(correction="decoupled")


def test_an_emulated_step_takes_its_time_and_trains_the_same(model_path: Path) -> None:
    batch = Batch(Step(0), random_groups(1))
    quick, slow = (new_trainer(model_path, emulated_step=least).step(batch) for least in (0.0, 0.4))
    assert sum(slow.phases_s.values()) >= 0.4
    assert slow.phases_s["emulated"] > 0.0 and "emulated" not in quick.phases_s
    assert slow.metrics == quick.metrics


def gradient_of(trainer: Trainer, batch: Batch) -> list[torch.Tensor]:
    """The gradient that one step applied, read back from AdamW's first moment after its first step."""
    result = trainer.step(batch)
    assert result.grad_norm and sum(result.left_out) == 0, "nothing to compare"
    return [trainer.optimiser.state[master]["exp_avg"] / (1 - BETAS[0]) for master in trainer.model.masters]


@pytest.mark.parametrize(
    "how",
    [
        "micro-batches",
        "by units",
        "by units, several rows",
        "logits in pieces",
        "checkpointing",
        "selective checkpointing",
    ],
)
def test_gradients_do_not_depend_on_the_layout(model_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    batch = Batch(Step(0), random_groups(3))
    whole = gradient_of(new_trainer(model_path, **PLAIN), batch)
    more: dict[str, object] = {}
    match how:
        case "micro-batches":
            more = {"token_budget": 30, "row_tokens": 1}
        case "by units" | "by units, several rows":
            monkeypatch.setattr(trainer_module, "PART_FLOPS", -1e30)
            more = {"token_budget": 60} if "rows" in how else {}
        case "logits in pieces":
            monkeypatch.setattr("echo2.learner.training.model.LOGIT_BYTES_MIN", 4 * 100 * 7)
        case _:
            more = {"gradient_checkpointing": "selective" if how.startswith("selective") else True}
    for one, other in zip(whole, gradient_of(new_trainer(model_path, **PLAIN, **more), batch), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_parameters_are_rounded_masters(model_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool) -> None:
    """On a GPU parameters and gradients are bf16 tensors, as a CPU has to be made to do."""
    monkeypatch.setattr(model_module, "_computes_in_bf16", lambda *_: is_on_gpu)
    first, second = new_trainer(model_path), new_trainer(model_path)
    for number in range(3):
        for trainer in (first, second):
            result = trainer.step(Batch(Step(number), random_groups(number)))
            assert result.step == number + 1 and not result.is_skipped and sum(result.left_out) == 0
    published, moved = first.model.snapshot(), 0
    for name, parameter, master, other in zip(
        first.model.names, first.model.parameters, first.model.masters, second.model.masters, strict=True
    ):
        rounded = master.to(torch.bfloat16)
        assert parameter.dtype == (torch.bfloat16 if is_on_gpu else torch.float32) and parameter.grad is None
        assert torch.equal(parameter.float(), rounded.float()) and torch.equal(published[name], rounded)
        assert master.dtype == torch.float32 and torch.equal(master, other)
        moved += int((master != parameter.float()).sum())
    assert moved > 0, "masters hold more than bf16 does"


def test_bf16_gradients_add_up_in_float32(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added in bf16, each of many small ones would lose what is below half a step of the sum."""
    few, much = Batch(Step(0), random_groups(3)), Batch(Step(0), random_groups(4, count=24))
    exact = gradient_of(new_trainer(model_path, grad_clip=1e9), few)
    monkeypatch.setattr(model_module, "_computes_in_bf16", lambda *_: True)
    rounded = gradient_of(new_trainer(model_path, grad_clip=1e9), few)
    whole = gradient_of(new_trainer(model_path, grad_clip=1e9), much)
    trainer, sums = new_trainer(model_path, grad_clip=1e9, token_budget=30, row_tokens=1), list[torch.dtype | None]()
    backward = torch.autograd.backward

    def watched(loss: torch.Tensor) -> None:
        assert all(parameter.grad is None for parameter in trainer.model.parameters), "handed over before the next one"
        sums.append(getattr(trainer.model._summed[0], "dtype", None))
        backward(loss)

    monkeypatch.setattr(torch.autograd, "backward", watched)
    many = gradient_of(trainer, much)
    assert len(sums) > 20 and set(sums[1:]) == {torch.float32}
    exact_N, rounded_N, whole_N, many_N = (
        torch.cat([g.flatten() for g in grads]) for grads in (exact, rounded, whole, many)
    )
    assert float(torch.nn.functional.cosine_similarity(exact_N, rounded_N, 0)) > 0.999
    assert float(rounded_N.norm() / exact_N.norm()) == pytest.approx(1.0, abs=0.02)
    assert float((whole_N - many_N).norm() / whole_N.norm()) < 0.02


def test_a_step_that_is_not_finite_changes_nothing_and_stops_after_the_limit(model_path: Path) -> None:
    trainer = new_trainer(model_path, nonfinite_steps_max=2)
    batch = Batch(Step(0), random_groups(6))
    with torch.no_grad():
        trainer.model.parameters[0].fill_(float("nan"))
    before = [master.clone() for master in trainer.model.masters]
    for _ in range(2):
        assert trainer.step(batch).is_skipped
    with pytest.raises(TrainingError, match="in a row"):
        trainer.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.masters, strict=True))


@pytest.mark.parametrize("rank", [0, 4])
def test_kl_penalty_compares_with_the_base_model(model_path: Path, rank: int) -> None:
    trainer = new_trainer(model_path, loss=LossConfig(kl_coefficient=0.1), lora_rank=rank)
    batch = Batch(Step(0), random_groups(7, logprob=-4.0))
    first = trainer.step(batch)
    assert abs(first.metrics["kl/reference"]) < 1e-6
    assert trainer.step(batch).metrics["kl/reference"] > 0


@pytest.mark.parametrize("checkpointing", [False, "selective"])
def test_an_adapter_trains_alike_over_codes(model_path: Path, tmp_path: Path, checkpointing: object) -> None:
    whole = load_whole(str(model_path), torch.float32)
    round_parameters(whole, "nf4")
    whole.save_pretrained(tmp_path)
    coded, held = (
        new_trainer(path, weights_dtype=dtype, lora_rank=4, gradient_checkpointing=checkpointing)
        for path, dtype in ((model_path, "nf4"), (tmp_path, "bfloat16"))
    )
    assert not any(
        p.ndim == 2 and not p.requires_grad and "proj" in n for n, p in coded.model.hf_model.named_parameters()
    )
    for step in range(2):
        batch = Batch(Step(step), random_groups(step, logprob=-4.0))
        assert coded.step(batch).metrics == held.step(batch).metrics
    assert all(torch.equal(a, b) for a, b in zip(coded.model.masters, held.model.masters, strict=True))


def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        PolicyModel(str(tmp_path), "float32", CPU, 1.0)
    mixed = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    with pytest.raises(ConfigError, match="one dtype, got torch.bfloat16 in a and torch.float32 in b"):
        check_dtypes(mixed, "model")
    with pytest.raises(ConfigError, match="floating-point tensors to train, got torch.int8 in q"):
        check_dtypes({"q": torch.zeros(2, dtype=torch.int8)}, "model")


def forged(groups: tuple[TrainGroup, ...], count: int, nats: float) -> tuple[TrainGroup, ...]:
    """The first `count` tokens of the first rollout have numbers that are `nats` too low."""
    first, *others = groups
    rollout = first.rollouts[0]
    numbers = tuple(x - nats if place < count else x for place, x in enumerate(rollout.raw_logprobs))
    changed = replace(rollout, logprobs=numbers, raw_logprobs=numbers)
    return (replace(first, rollouts=(changed, *first.rollouts[1:])), *others)


@pytest.mark.parametrize("nats", [2.0, 5.0, 18.0])
def test_one_forged_report_moves_a_step_no_more_than_a_few_honest_ones(model_path: Path, nats: float) -> None:
    """Whatever its numbers say: without the bound the gradient of a ratio of e^18 is all that is left of the step."""

    def norm_of(groups: tuple[TrainGroup, ...]) -> tuple[float, tuple[int, ...]]:
        result = new_trainer(model_path, grad_clip=1e9).step(Batch(Step(0), groups))
        return result.grad_norm, result.left_out

    groups = own_logprobs(model_path, random_groups(11))
    # The lowest reward first: a negative advantage, for which nothing clips a large ratio.
    groups = (replace(groups[0], rewards=tuple(sorted(groups[0].rewards))), *groups[1:])
    honest, nothing = norm_of(groups)
    tokens = len(groups[0].rollouts[0].token_ids)
    bad, left_out = norm_of(forged(groups, tokens, nats))
    assert sum(nothing) == 0 and left_out[0] == tokens and sum(left_out) == tokens
    assert bad < 2 * honest


# ---- several updates of one batch, and completions that were cut off


def own_logprobs(path: Path, groups: tuple[TrainGroup, ...]) -> tuple[TrainGroup, ...]:
    """The groups as the policy itself would have sampled them."""
    exact = iter(new_trainer(path, **PLAIN).logprobs(groups))
    made = []
    for group in groups:
        rollouts = [replace(r, logprobs=tuple(next(exact).tolist())) for r in group.rollouts]
        made.append(replace(group, rollouts=tuple(replace(r, raw_logprobs=r.logprobs) for r in rollouts)))
    return tuple(made)


def test_each_update_trains_on_its_share_as_a_batch_of_its_own_would(model_path: Path) -> None:
    groups = own_logprobs(model_path, random_groups(7, count=4))
    options = {**PLAIN, "loss": DECOUPLED}
    parts = new_trainer(model_path, updates_per_batch=2, **options)
    result = parts.step(Batch(Step(0), groups))
    apart = new_trainer(model_path, **options)
    first, second = (apart.step(Batch(Step(0), half)) for half in (groups[:2], groups[2:]))
    assert result.step == parts.step_count == 1
    assert result.sampled_tokens == first.sampled_tokens + second.sampled_tokens
    assert result.metrics is not None and first.metrics is not None and second.metrics is not None
    # The ratio of the second update starts from the policy before the batch, so ratio times weight is the same either way.
    assert result.metrics["loss"] == pytest.approx((first.metrics["loss"] + second.metrics["loss"]) / 2, rel=1e-4)
    moved = [float((a - b).abs().max()) for a, b in zip(parts.model.masters, apart.model.masters, strict=True)]
    assert 0 < max(moved) < 1e-2


def test_the_ratio_of_later_updates_starts_from_the_policy_before_the_batch(model_path: Path) -> None:
    """A copy of the first half as second half: tokens that the first update moved beyond the clip get no gradient again."""
    half = own_logprobs(model_path, random_groups(8, count=2))
    trainer = new_trainer(model_path, updates_per_batch=2, loss=DECOUPLED, **{**PLAIN})
    for group in trainer.optimiser.param_groups:
        group["lr"] = 0.05
    trainer.learner = trainer.learner.model_copy(update={"lr": 0.05})
    result = trainer.step(Batch(Step(0), half + half))
    assert result.metrics is not None
    assert 0.0 < result.metrics["clip_fraction"] <= 0.5, (
        "the first update clips nothing, the second what the first moved"
    )


def test_vcpo_and_several_updates_share_one_pass(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer(model_path, updates_per_batch=9, advantage="vcpo")
    passes: list[bool] = []
    forward = trainer.model.policy.forward

    def counted(inputs: PackedInputs, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        passes.append(torch.is_grad_enabled())
        return forward(inputs, with_entropy)

    monkeypatch.setattr(trainer.model.policy, "forward", counted)
    trainer.step(Batch(Step(0), random_groups(12, count=2)))
    assert passes == [False, False, True, True]
    assert {int(state["step"]) for state in trainer.optimiser.state.values()} == {2}


def test_what_was_cut_off_counts_in_the_baseline_and_is_not_trained_on(model_path: Path) -> None:
    whole = random_groups(10, count=2)
    cut = tuple(
        replace(g, rollouts=(replace(g.rollouts[0], finish_reason=FinishReason.LENGTH), *g.rollouts[1:])) for g in whole
    )
    trainer = new_trainer(model_path, train_on_truncated=False, **PLAIN)
    result = trainer.step(Batch(Step(0), cut))
    expected = sum(len(r.token_ids) for g in cut for r in g.rollouts[1:])
    assert result.sampled_tokens == expected
    # The same advantages without the rollout in the loss: a gradient unlike that of groups which lack it.
    lacking = tuple(replace(g, rollouts=g.rollouts[1:], rewards=g.rewards[1:]) for g in whole)
    found = gradient_of(new_trainer(model_path, train_on_truncated=False, **PLAIN), Batch(Step(0), cut))
    other = gradient_of(new_trainer(model_path, **PLAIN), Batch(Step(0), lacking))
    everything = gradient_of(new_trainer(model_path, **PLAIN), Batch(Step(0), cut))
    assert any(not torch.allclose(a, b, atol=1e-6) for a, b in zip(found, other, strict=True))
    assert any(not torch.allclose(a, b, atol=1e-6) for a, b in zip(found, everything, strict=True))


def test_a_batch_that_was_cut_off_throughout_changes_nothing(model_path: Path) -> None:
    groups = tuple(
        replace(g, rollouts=tuple(replace(r, finish_reason=FinishReason.LENGTH) for r in g.rollouts))
        for g in random_groups(11, count=2)
    )
    trainer = new_trainer(model_path, train_on_truncated=False, **PLAIN)
    before = [master.detach().clone() for master in trainer.model.masters]
    result = trainer.step(Batch(Step(0), groups))
    assert result.metrics is not None and result.metrics["ratio/max"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.masters, strict=True))


# ---- what a GPU's memory decides, entered on a CPU


def test_a_layer_keeps_half_of_its_products() -> None:
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    products = 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def layer(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    counts = []
    for context_fn in (None, selective_contexts):
        how = {} if context_fn is None else {"context_fn": context_fn}
        with Counting():
            products = 0
            x = torch.ones(2, 8, requires_grad=True)
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, **how).sum().backward()
        counts.append(products)
    assert counts[0] - counts[1] == 2, "two of four products are not computed again"


@pytest.mark.parametrize(
    ("state", "dtype", "ranks", "named"),
    [
        ("8bit", "bfloat16", 2, "expected float32 or host on 2 ranks, got 8bit"),
        ("host", "float32", 1, "expected weights in bfloat16 for host, got float32"),
    ],
)
def test_a_state_that_cannot_be_had_is_refused(state: OptimizerState, dtype: str, ranks: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        refuse_optimizer(state, dtype, ranks)
    refuse_optimizer("float32", dtype, ranks)
    config = config_of("no/model/here", "float32", optimizer_state="host")
    with pytest.raises(ConfigError, match="for host"):
        new_team(LearnerOptions(Path("nowhere"), config), Ranks())
