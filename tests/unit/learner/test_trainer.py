import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.base.errors import ConfigError
from echo2.base.ids import Step, Version
from echo2.base.rollout import LOSS_COLUMNS, AdamStep, ClientLoss, Example, FinishReason
from echo2.config.run import OptimizerState, RunConfig
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.rollouts.prompts import check_teacher
from echo2.learner.startup import new_team
from echo2.learner.training import model as model_module, trainer as trainer_module
from echo2.learner.training.loading import load_whole
from echo2.learner.training.loss import group_advantages
from echo2.learner.training.model import PolicyModel, check_dtypes, selective_contexts
from echo2.learner.training.optimiser import refuse_optimizer
from echo2.learner.training.packing import PackedInputs, client_losses
from echo2.learner.training.ranks import Ranks
from echo2.learner.training.scoring import VersionScorer
from echo2.learner.training.trainer import BETAS, Trainer
from echo2.weights.precision import round_parameters
from tests.contract.families import save_tiny
from tests.unit.learner.made import config_of, group_of, new_trainer, random_groups, rollout_of
from tests.unit.learner.tiny import make_tiny_model

PLAIN = {"weights_dtype": "float32", "grad_clip": 1e9}


def test_an_emulated_step_takes_its_time_and_trains_the_same(model_path: Path) -> None:
    batch = Batch(Step(0), random_groups(1))
    quick, slow = (new_trainer(model_path, emulated_step=least).step(batch) for least in (0.0, 0.4))
    assert sum(slow.phases_s.values()) >= 0.4
    assert slow.phases_s["emulated"] > 0.0 and "emulated" not in quick.phases_s
    assert slow.metrics == quick.metrics


def applied(trainer: Trainer) -> list[torch.Tensor]:
    """The gradient of the first step, read back from AdamW's first moment."""
    return [trainer.optimiser.state[master]["exp_avg"] / (1 - BETAS[0]) for master in trainer.model.masters]


def gradient_of(trainer: Trainer, batch: Batch) -> list[torch.Tensor]:
    result = trainer.step(batch)
    assert result.grad_norm and sum(result.left_out) == 0, "nothing to compare"
    return applied(trainer)


@pytest.mark.parametrize(
    "how",
    ["micro-batches", "by units", "by units, several rows", "logits in pieces", "checkpointing", "selective checkpointing"],
)  # fmt: skip
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
            modules = new_trainer(model_path, **PLAIN, **more).model.hf_model.modules()
            assert any(module.training for module in modules), "layers are computed again"
    torch.testing.assert_close(
        whole, gradient_of(new_trainer(model_path, **PLAIN, **more), batch), rtol=1e-5, atol=1e-6
    )


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
    all_gradients = (exact, rounded, whole, many)
    exact_N, rounded_N, whole_N, many_N = (torch.cat([g.flatten() for g in each]) for each in all_gradients)
    assert float(torch.nn.functional.cosine_similarity(exact_N, rounded_N, 0)) > 0.999
    assert float(rounded_N.norm() / exact_N.norm()) == pytest.approx(1.0, abs=0.02)
    assert float((whole_N - many_N).norm() / whole_N.norm()) < 0.02


@pytest.mark.parametrize("rank", [0, 4])
def test_kl_penalty_compares_with_the_base_model(model_path: Path, rank: int) -> None:
    trainer = new_trainer(model_path, kl_coefficient=0.1, lora_rank=rank)
    batch = Batch(Step(0), random_groups(7, logprob=-4.0))
    if rank == 0:
        assert trainer.reference is not None
        held = zip(trainer.reference.masters, trainer.reference.parameters, strict=True)
        assert all(master.data_ptr() == p.data_ptr() for master, p in held), "it is not trained"
    first = trainer.step(batch)
    assert abs(first.metrics["kl/reference"]) < 1e-6
    assert trainer.step(batch).metrics["kl/reference"] > 0


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5}),
        ("phimoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "input_jitter_noise": 0.5}),
    ],
)
def test_layers_that_are_recomputed_leave_nothing_to_chance(
    tmp_path: Path, model_type: str, fields: dict[str, object]
) -> None:
    save_tiny(model_type, fields, tmp_path)
    batch = Batch(Step(0), random_groups(1))
    plain, *recomputed = (new_trainer(tmp_path, gradient_checkpointing=how) for how in (False, True, "selective"))
    expected = plain.step(batch)
    for trainer in recomputed:
        assert trainer.step(batch).metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("does", [False, True])
def test_layers_are_computed_again_but_in_a_turn_of_scores_also_after_one_that_failed(
    model_path: Path, does: bool
) -> None:
    """They would drop the cache there; and after it, memory for all activations is not planned."""
    model = new_trainer(model_path, gradient_checkpointing=does).model
    scorer = VersionScorer(model.hf_model, 2, model)
    scorer.keep(Version(0), model.snapshot())
    with pytest.raises(OSError), scorer.turn():
        assert not any(module.training for module in model.hf_model.modules())
        raise OSError
    assert any(module.training for module in model.hf_model.modules()) == does


@pytest.mark.parametrize("checkpointing", [False, "selective"])
def test_an_adapter_trains_alike_over_codes(model_path: Path, tmp_path: Path, checkpointing: object) -> None:
    whole = load_whole(str(model_path), torch.float32)
    round_parameters(whole, "nf4")
    whole.save_pretrained(tmp_path)
    coded, held = (
        new_trainer(path, weights_dtype=dtype, lora_rank=4, gradient_checkpointing=checkpointing)
        for path, dtype in ((model_path, "nf4"), (tmp_path, "bfloat16"))
    )
    frozen = [name for name, p in coded.model.hf_model.named_parameters() if p.ndim == 2 and not p.requires_grad]
    assert not any("proj" in name for name in frozen)
    for step in range(2):
        batch = Batch(Step(step), random_groups(step, logprob=-4.0))
        assert coded.step(batch).metrics == held.step(batch).metrics
    assert all(torch.equal(a, b) for a, b in zip(coded.model.masters, held.model.masters, strict=True))


def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny("ctrl", {"n_embd": 128, "n_layer": 1, "n_head": 4, "dff": 64}, tmp_path)
    with pytest.raises(ConfigError, match=r"^learner.gradient_checkpointing: expected false for .*: CTRL"):
        new_trainer(tmp_path, gradient_checkpointing=True)
    for settings in ({"beta1": 1.0}, {"lr": -1e-3}, {"epsilon": -1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ConfigError, match="adam_params: expected betas from 0"):
            replace(ADAM, **settings)
    mixed = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    with pytest.raises(ConfigError, match="one dtype, got torch.bfloat16 in a and torch.float32 in b"):
        check_dtypes(mixed, "model", 2)
    check_dtypes(mixed, "model")  # a router that transformers keeps in float32
    with pytest.raises(ConfigError, match="torch.float16 in b"):
        check_dtypes(mixed | {"b": torch.zeros(2, dtype=torch.float16)}, "model")
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


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_step_is_adamw_s_with_the_clipped_gradient_at_the_schedule_s_rate(model_path: Path, schedule: str) -> None:
    """Written once more by their formulas, from the optimiser's own moments: 5 supervised steps, then a run of 6 and one more, each
    with 2 of warm-up and moments of its own."""
    lr, decay, (beta1, beta2) = 1e-2, 0.1, BETAS
    trainer = new_trainer(
        model_path, "float32", lr=lr, weight_decay=decay, warmup_steps=2, steps=11, schedule=schedule,
        supervised_steps=5,
    )  # fmt: skip
    masters = trainer.model.masters
    for begin, end, until in ((0, 5, 5), (5, 11, 12)):
        means, squares = ([torch.zeros_like(master) for master in masters] for _ in range(2))
        for step in range(begin, until):
            before, number = [master.clone() for master in masters], step - begin
            trainer.grad_clip = (0.05, 1e3)[step % 2]
            result = trainer.step(Batch(Step(step), random_groups(step)))
            done = (number - 2) / (end - begin - 2)
            falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
            rate = lr * ((0.5, 1.0)[number] if number < 2 else falls[schedule])
            assert result.lr == pytest.approx(rate)
            norm_sq = 0.0
            for k, (old, master) in enumerate(zip(before, masters, strict=True)):
                mean = trainer.optimiser.state[master]["exp_avg"].clone()
                gradient = (mean - beta1 * means[k]) / (1 - beta1)
                means[k], squares[k] = mean, beta2 * squares[k] + (1 - beta2) * gradient**2
                unbiased = mean / (1 - beta1 ** (number + 1)), squares[k] / (1 - beta2 ** (number + 1))
                expected = old * (1 - rate * decay) - rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
                assert torch.allclose(master, expected, atol=2e-5)
                norm_sq += float(gradient.double().square().sum())
            assert 0.05 < result.grad_norm < 1e3
            assert math.sqrt(norm_sq) == pytest.approx(min(trainer.grad_clip, result.grad_norm), rel=1e-3)


def test_vcpo_weighs_its_baseline_by_ratios_and_gradients_its_rate_by_effective_rollouts(model_path: Path) -> None:
    """Against a client's step with the advantages of the formulas; a token that is not believed counts in neither."""
    options = {**PLAIN, "token_budget": 60}
    groups = forged(own_logprobs(model_path, random_groups(14)), 1, 3.5)
    # Each rollout's numbers are off by another amount: 0 to 0.15 nats a token.
    lower = [[[x - 0.05 * k for x in r.logprobs] for k, r in enumerate(g.rollouts)] for g in groups]
    groups = tuple(
        replace(g, rollouts=tuple(replace(r, raw_logprobs=tuple(x)) for r, x in zip(g.rollouts, numbers, strict=True)))
        for g, numbers in zip(groups, lower, strict=True)
    )
    trainer = new_trainer(model_path, advantage="vcpo", **options)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    weights, ratios, advantages = [], [], []
    for rollout, logprobs in zip(rollouts, trainer.logprobs(groups), strict=True):
        off = logprobs - torch.tensor(rollout.raw_logprobs)
        counted = (off.abs() <= 3.0) & (off.abs().mean() <= 1.0)
        ratios.append(float(off[counted].sum().exp()))
        weights.append(ratios[-1] ** 2 * float((1 - logprobs[counted].exp()).square().sum()))
    for number, group in enumerate(groups):
        of_group = weights[4 * number : 4 * number + 4]
        baseline = np.average(group.rewards, weights=of_group)
        advantages += [(reward - baseline) / (np.std(group.rewards, ddof=1) + 1e-4) for reward in group.rewards]
    result = trainer.step(Batch(Step(0), groups))
    effective = sum(ratios) ** 2 / len(ratios) / sum(ratio**2 for ratio in ratios)
    assert result.lr == pytest.approx(1e-3 * math.sqrt(effective), rel=1e-4) and effective < 0.99
    own = applied(trainer)
    client = new_trainer(model_path, **options)
    examples = examples_of(groups, advantages)
    for example, rollout, left_out in zip(examples, rollouts, result.left_out, strict=True):
        example.columns["advantages"][-len(rollout.token_ids) :][:left_out] = 0.0
        example.columns["logprobs"][-len(rollout.token_ids) :, 0] = rollout.raw_logprobs
    client.forward_backward(examples, ClientLoss("ppo", 0.8, 1.28))
    assert sum(result.left_out) == 1
    torch.testing.assert_close(own, gradient_that_was_applied(client), rtol=1e-5, atol=1e-6)


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
    options = {**PLAIN, "correction": "decoupled"}
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
    trainer = new_trainer(model_path, updates_per_batch=2, correction="decoupled", **{**PLAIN})
    for group in trainer.optimiser.param_groups:
        group["lr"] = 0.05
    trainer.learner = trainer.learner.model_copy(update={"lr": 0.05})
    result = trainer.step(Batch(Step(0), half + half))
    assert result.metrics is not None
    assert 0.0 < result.metrics["clip_fraction"] <= 0.5, "the first update clips nothing"


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


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo"])
def test_what_was_cut_off_counts_in_the_baseline_and_is_not_trained_on(model_path: Path, loss: str) -> None:
    """As a client's step in which it has no advantage, divided by the others' tokens, or by as many as they may have."""
    cut = tuple(
        replace(g, rollouts=(replace(g.rollouts[0], finish_reason=FinishReason.LENGTH), *g.rollouts[1:]))
        for g in random_groups(10, count=2)
    )
    trainer = new_trainer(model_path, train_on_truncated=False, loss=loss, **PLAIN)
    result = trainer.step(Batch(Step(0), cut))
    lengths = [len(rollout.token_ids) for group in cut for rollout in group.rollouts]
    assert result.sampled_tokens == sum(lengths) - lengths[0] - lengths[4]
    share = sum(lengths) / (6 * 16 if loss == "dr_grpo" else result.sampled_tokens)
    alone = torch.zeros(4, dtype=int)
    values = [v for g in cut for v in group_advantages(torch.tensor(g.rewards), alone, "grpo").values_R]
    client = new_trainer(model_path, **PLAIN)
    examples = examples_of(cut, [float(v) * share * (k % 4 > 0) for k, v in enumerate(values)])
    client.forward_backward(examples, ClientLoss("ppo", 0.8, 1.28))
    torch.testing.assert_close(applied(trainer), gradient_that_was_applied(client), rtol=1e-5, atol=1e-6)


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


# ---- steps that a client drives


ADAM = AdamStep(1e-3, 0.9, 0.99, 1e-8, grad_clip=1e9)


def examples_of(groups: tuple[TrainGroup, ...], given: Sequence[float] = ()) -> list[Example]:
    """The rollouts as a client sends them: with the advantages of the loop's own loss or those given, divided by all tokens."""
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32)
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group.rewards])
    advantages = iter(given or group_advantages(rewards, numbers, "grpo", None).values_R.tolist())
    total = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    examples = []
    for group in groups:
        prompt = group.spec.prompt_token_ids
        for rollout in group.rollouts:
            whole = np.array([*prompt, *rollout.token_ids], dtype=np.int64)
            advantage, logprobs = (np.zeros((len(whole) - 1, 1), np.float32) for _ in range(2))
            advantage[len(prompt) - 1 :] = next(advantages) / total
            logprobs[len(prompt) - 1 :, 0] = rollout.logprobs
            examples.append(Example(whole[:-1], whole[1:, None], {"advantages": advantage, "logprobs": logprobs}))
    return examples


def gradient_that_was_applied(trainer: Trainer) -> list[torch.Tensor]:
    assert trainer.optim_step(ADAM)[1]
    return applied(trainer)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_a_client_s_gradient_is_the_loop_s_own(model_path: Path, calls: int, weights_dtype: str) -> None:
    groups = random_groups(3)
    options = {**PLAIN, "weights_dtype": weights_dtype, "token_budget": 60, "clip": (0.1, 0.15), "temperature": 0.8}
    own = gradient_of(new_trainer(model_path, **options), Batch(Step(0), groups))
    trainer, examples = new_trainer(model_path, **options), examples_of(groups)
    for begin in range(calls):
        trainer.forward_backward(examples[begin::calls], ClientLoss("ppo", 0.9, 1.15))
    applied = gradient_that_was_applied(trainer)
    assert any(gradient.abs().max() > 1e-4 for gradient in applied)
    torch.testing.assert_close(own, applied, rtol=1e-5, atol=1e-6)


def test_a_forward_pass_scores_any_targets_and_leaves_no_gradient(model_path: Path) -> None:
    trainer = new_trainer(model_path, **PLAIN)
    ids, targets = np.array([5, 9, 11, 7]), np.array([[3, 4], [5, 6], [40, 41], [9, 10]])
    example = Example(ids, targets, {"weights": np.ones((4, 2), np.float32)})
    with torch.no_grad():
        alone = torch.log_softmax(trainer.model.hf_model(input_ids=torch.tensor(ids)[None]).logits[0], -1)
    alone = alone.gather(-1, torch.tensor(targets))
    found, loss = trainer.forward_backward([example, example], ClientLoss("cross_entropy"), is_trained=False)
    for logprobs in found:
        assert torch.allclose(logprobs, alone, atol=1e-5)
    assert loss == pytest.approx(-2 * float(alone.sum()), rel=1e-4)
    assert trainer.optim_step(ADAM) == (0.0, True), "nothing was added up"


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_forgotten(model_path: Path) -> None:
    trainer = new_trainer(model_path, **PLAIN)
    example = examples_of(random_groups(1))[0]
    before = [master.clone() for master in trainer.model.masters]
    infinite = {"weights": np.full(example.targets_NK.shape, np.inf, np.float32)}
    trainer.forward_backward([replace(example, columns=infinite)], ClientLoss("cross_entropy"))
    assert trainer.optim_step(ADAM)[1] is False
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.masters, strict=True))
    trainer.forward_backward([example], ClientLoss("importance_sampling"))
    assert trainer.optim_step(ADAM)[1] is True


@pytest.mark.parametrize("name", LOSS_COLUMNS)
def test_the_losses_are_those_of_tinker_s_api(name: str) -> None:
    """Written once more, by the formulas of its pages, for tokens within and beyond the clip."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], requires_grad=True)
    sampled, weights = torch.tensor([-1.05, -1.0, -1.5, -3.0, -2.0]), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0, -1.0])
    columns = {"weights": weights, "logprobs": sampled, "advantages": advantages}
    found = client_losses(ClientLoss(name), logprobs, columns)
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    expected = {
        "cross_entropy": -logprobs * weights,
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": -clipped.detach() * logprobs * advantages,
        "dro": -(logprobs * advantages - 0.5 * 0.05 * (logprobs - sampled) ** 2),
    }[name]
    assert torch.allclose(found, expected, atol=1e-6)
    gradients = [torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0] for loss in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-6)


# ---- on-policy distillation: a teacher's log-probabilities of the student's tokens are its advantages


PROMPTS = torch.arange(3, 35)
TOKENS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student; and a teacher of another size that has learned to say one thing, by supervised steps."""
    torch.set_num_threads(1)
    student = make_tiny_model(tmp_path_factory.mktemp("student"))
    teacher = make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7, hidden=48)
    trainer = new_trainer(teacher, "float32", lr=3e-3, supervised_steps=12)
    ids = torch.cat([PROMPTS[:, None], torch.tensor([[10, 11, 10, 11]]).expand(len(PROMPTS), TOKENS)], 1)
    for step in range(12):
        trainer.step(batch_of(ids.tolist(), [[0.0] * TOKENS] * len(PROMPTS), step))
    trainer.model.save(trainer.model.snapshot(), teacher)
    return student, teacher


def taught(student: Path, teacher: Path, lr: float) -> Trainer:
    return new_trainer(student, "float32", lr=lr, teacher=str(teacher), grad_clip=1e9)


def sampled(trainer: Trainer, step: int) -> Batch:
    """The student's own tokens after each prompt; all rewards are equal."""
    ids = PROMPTS[:, None]
    generator, logprobs = torch.Generator().manual_seed(step), []
    for _ in range(TOKENS):
        with torch.no_grad():
            row_BV = trainer.model.hf_model(ids).logits[:, -1].log_softmax(-1)
        drawn_B1 = torch.multinomial(row_BV.exp(), 1, generator=generator)
        logprobs.append(row_BV.gather(-1, drawn_B1))
        ids = torch.cat([ids, drawn_B1], 1)
    return batch_of(ids.tolist(), torch.cat(logprobs, 1).tolist(), step)


def batch_of(rows: list[list[int]], logprobs: list[list[float]], step: int) -> Batch:
    """A group of one rollout for each row: a prompt of one token, and what was sampled."""
    made = zip(rows, logprobs, strict=True)
    rollouts = [rollout_of(row[1:], name=f"g{number}", logprobs=told) for number, (row, told) in enumerate(made)]
    groups = [group_of(row[:1], [rollout], [0.5]) for row, rollout in zip(rows, rollouts, strict=True)]
    return Batch(Step(step), tuple(groups))


def distance(trainer: Trainer) -> float:
    """KL of the student from the teacher after each prompt, nats."""
    assert trainer.reference is not None
    with torch.no_grad():
        models = (trainer.model, trainer.reference)
        own, other = (model.hf_model(PROMPTS[:, None]).logits[:, -1].log_softmax(-1) for model in models)
    return float((own.exp() * (own - other)).sum(-1).mean())


def test_each_tokens_advantage_is_minus_its_reverse_kl(models: tuple[Path, Path]) -> None:
    trainer = taught(*models, lr=1e-3)
    batch = sampled(trainer, 0)
    ids = torch.tensor([[*group.spec.prompt_token_ids, *group.rollouts[0].token_ids] for group in batch.groups])

    def logprobs(model: PolicyModel) -> torch.Tensor:
        return model.hf_model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    assert trainer.reference is not None
    with torch.no_grad():
        teacher = logprobs(trainer.reference)
    own = logprobs(trainer.model)
    (-(teacher - own.detach()) * own).mean().backward()
    norm = torch.stack([p.grad.norm() for p in trainer.model.hf_model.parameters() if p.grad is not None]).norm()
    trainer.model.hf_model.zero_grad()
    result = trainer.step(batch)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4) and result.metrics is not None
    assert result.metrics["kl/reference"] > 0.1


def test_the_student_comes_nearer_to_the_teacher_whatever_the_rewards(models: tuple[Path, Path]) -> None:
    trainer = taught(*models, lr=1e-2)
    before = distance(trainer)
    for step in range(15):
        trainer.step(sampled(trainer, step))
    assert distance(trainer) < 0.25 * before


def test_a_teacher_with_another_tokenizer_or_fewer_embeddings_is_refused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    student, teacher = models
    config = RunConfig.model_validate({"model": {"path": str(student)}, "learner": {"teacher": str(teacher)}})
    check_teacher(config)
    other = make_tiny_model(tmp_path / "other")
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    learner = config.learner.model_copy(update={"teacher": str(other)})
    with pytest.raises(ConfigError, match=r"learner.teacher .*: expected a model with the tokenizer .* got 2 of"):
        check_teacher(config.model_copy(update={"learner": learner}))
    larger = make_tiny_model(tmp_path / "padded", vocabulary=128)
    with pytest.raises(ConfigError, match="expected at least the model's 128 embeddings"):
        taught(larger, teacher, lr=1e-3)
    assert new_trainer(larger, "float32").reference is None
