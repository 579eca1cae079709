from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo2.base.errors import ConfigError, TrainingError
from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.options import TrainerOptions
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.training.loss import LossConfig
from echo2.learner.training.model import PolicyModel, check_dtypes
from echo2.learner.training.trainer import Trainer
from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def new_trainer(path: Path, **options: object) -> Trainer:
    given = TrainerOptions(str(path), device="cpu", lr=1e-3, **options)  # type: ignore[arg-type]
    return Trainer(PolicyModel(str(path), given.weights_dtype, torch.device("cpu"), 1.0), given, 10)


def random_groups(seed: int, count: int = 3, temperature: float = 1.0, logprob: float = -4.2) -> tuple[TrainGroup, ...]:
    rng = random.Random(seed)
    groups = []
    for number in range(count):
        group_id = GroupId(f"g{number}")
        prompt = tuple(rng.randrange(3, 60) for _ in range(rng.randrange(3, 12)))
        rollouts = []
        for index in range(4):
            tokens = tuple(rng.randrange(3, 60) for _ in range(rng.randrange(1, 9)))
            logprobs = tuple(logprob + 0.1 * rng.random() for _ in tokens)
            spans = (VersionSpan(Version(0), len(tokens)),)
            rollouts.append(Rollout(group_id, index, tokens, logprobs, logprobs, spans, FinishReason.STOP))
        spec = GroupSpec(group_id, prompt, 4, SamplingParams(temperature=temperature, max_new_tokens=16), 0)
        groups.append(TrainGroup(spec, number, tuple(rollouts), tuple(rng.random() for _ in rollouts)))
    return tuple(groups)


def test_an_emulated_step_takes_its_time_and_trains_the_same(model_path: Path) -> None:
    batch = Batch(Step(0), random_groups(1))
    quick, slow = (new_trainer(model_path, emulated_step_s=least).step(batch) for least in (0.0, 0.4))
    assert sum(slow.phases_s.values()) >= 0.4
    assert slow.phases_s["emulated"] > 0.0 and "emulated" not in quick.phases_s
    assert slow.metrics == quick.metrics


@pytest.mark.parametrize("row_tokens", [1, 24, 400])
@pytest.mark.parametrize("token_budget", [40, 4000])
def test_packed_log_probabilities_are_those_of_each_sequence_alone(
    model_path: Path, row_tokens: int, token_budget: int
) -> None:
    trainer = new_trainer(model_path, row_tokens=row_tokens, token_budget=token_budget)
    groups = random_groups(1)
    ours = trainer.logprobs(groups)
    flat = [(group.spec.prompt_token_ids, rollout) for group in groups for rollout in group.rollouts]
    for found, (prompt, rollout) in zip(ours, flat, strict=True):
        ids = torch.tensor([[*prompt, *rollout.token_ids]])
        with torch.no_grad():
            logits = trainer.model.hf_model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        alone = torch.log_softmax(logits, -1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert torch.allclose(found, alone, atol=1e-5)


def test_temperature_divides_the_logits(model_path: Path) -> None:
    model = PolicyModel(str(model_path), "float32", torch.device("cpu"), 0.5)
    trainer = Trainer(model, TrainerOptions(str(model_path), weights_dtype="float32"), 10)
    groups = random_groups(2, count=1, temperature=0.5)
    found = trainer.logprobs(groups)[0]
    prompt, rollout = groups[0].spec.prompt_token_ids, groups[0].rollouts[0]
    with torch.no_grad():
        logits = model.hf_model(input_ids=torch.tensor([[*prompt, *rollout.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 0.5, -1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
    assert torch.allclose(found, expected, atol=1e-5)


def gradient_of(trainer: Trainer, batch: Batch) -> list[torch.Tensor]:
    """The gradient that one step applied, read back from AdamW's first moment after its first step."""
    result = trainer.step(batch)
    assert result.grad_norm and sum(result.left_out) == 0, "nothing to compare"
    beta1 = trainer.options.beta1
    return [trainer.optimiser.state[master]["exp_avg"] / (1 - beta1) for master in trainer.model.masters]


def test_accumulation_over_micro_batches_is_exact(model_path: Path) -> None:
    batch = Batch(Step(0), random_groups(3))
    whole = gradient_of(new_trainer(model_path, weights_dtype="float32", grad_clip=1e9), batch)
    options = {"weights_dtype": "float32", "grad_clip": 1e9, "token_budget": 30, "row_tokens": 1}
    split = gradient_of(new_trainer(model_path, **options), batch)
    for one, many in zip(whole, split, strict=True):
        assert torch.allclose(one, many, atol=1e-6)


def test_chunked_head_gives_the_same_gradient(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Step(0), random_groups(4))
    whole = gradient_of(new_trainer(model_path, weights_dtype="float32", grad_clip=1e9), batch)
    monkeypatch.setattr("echo2.learner.training.model.LOGIT_BYTES_MIN", 4 * 100 * 7)
    pieces = gradient_of(new_trainer(model_path, weights_dtype="float32", grad_clip=1e9), batch)
    for one, many in zip(whole, pieces, strict=True):
        assert torch.allclose(one, many, atol=1e-6)


def test_gradient_checkpointing_gives_the_same_gradient(model_path: Path) -> None:
    batch = Batch(Step(0), random_groups(5))
    whole = gradient_of(new_trainer(model_path, weights_dtype="float32"), batch)
    again = gradient_of(new_trainer(model_path, weights_dtype="float32", gradient_checkpointing=True), batch)
    for one, other in zip(whole, again, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_parameters_are_the_rounded_masters_after_every_step(model_path: Path) -> None:
    trainer = new_trainer(model_path)
    for number in range(3):
        result = trainer.step(Batch(Step(number), random_groups(number)))
        assert result.step == number + 1 and not result.is_skipped
    moved = 0
    published = trainer.model.snapshot()
    for name, parameter in trainer.model.hf_model.named_parameters():
        master = trainer.model.masters_by_name()[name]
        rounded = master.to(torch.bfloat16)
        assert torch.equal(parameter.to(torch.bfloat16), rounded) and torch.equal(parameter, rounded.float())
        assert torch.equal(published[name], rounded)
        moved += int((master != parameter).sum())
    assert moved > 0, "masters hold more than bf16 does"


def test_same_batches_from_the_same_state_give_the_same_bits(model_path: Path) -> None:
    first, second = new_trainer(model_path), new_trainer(model_path)
    for trainer in (first, second):
        for number in range(3):
            trainer.step(Batch(Step(number), random_groups(number)))
    for one, other in zip(first.model.masters, second.model.masters, strict=True):
        assert torch.equal(one, other)


def test_a_step_that_is_not_finite_changes_nothing_and_stops_after_the_limit(model_path: Path) -> None:
    trainer = new_trainer(model_path, nonfinite_steps_max=2)
    batch = Batch(Step(0), random_groups(6))
    with torch.no_grad():
        trainer.model.parameters[0][0, 0] = float("nan")
    before = [master.clone() for master in trainer.model.masters]
    poisoned = Batch(Step(0), tuple(_with_token(group, 0) for group in batch.groups))
    for _ in range(2):
        assert trainer.step(poisoned).is_skipped
    with pytest.raises(TrainingError, match="in a row"):
        trainer.step(poisoned)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.masters, strict=True))


def _with_token(group: TrainGroup, token: int) -> TrainGroup:
    spec = GroupSpec(group.spec.group_id, (token, *group.spec.prompt_token_ids), 4, group.spec.sampling, 0)
    return TrainGroup(spec, group.cursor, group.rollouts, group.rewards)


def test_kl_penalty_compares_with_the_base_model(model_path: Path) -> None:
    trainer = new_trainer(model_path, loss=LossConfig(kl_coefficient=0.1))
    batch = Batch(Step(0), random_groups(7, logprob=-4.0))
    first = trainer.step(batch)
    assert abs(first.metrics.kl_reference) < 1e-6
    assert trainer.step(batch).metrics.kl_reference > 0


def test_a_folder_that_is_no_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        PolicyModel(str(tmp_path), "float32", torch.device("cpu"), 1.0)


def test_sequences_beyond_the_context_are_refused_before_training(model_path: Path) -> None:
    model = PolicyModel(str(model_path), "float32", torch.device("cpu"), 1.0)
    model.check_length(256)
    with pytest.raises(ConfigError, match="context of 256"):
        model.check_length(257)


def test_tensors_of_several_dtypes_are_refused_by_name() -> None:
    mixed = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    with pytest.raises(ConfigError, match="one dtype, got torch.bfloat16 in a and torch.float32 in b"):
        check_dtypes(mixed, "model")
    with pytest.raises(ConfigError, match="floating-point tensors to train, got torch.int8 in q"):
        check_dtypes({"q": torch.zeros(2, dtype=torch.int8)}, "model")
    check_dtypes({"a": torch.zeros(2), "b": torch.ones(1)}, "model")


def forged(groups: tuple[TrainGroup, ...], count: int, nats: float) -> tuple[TrainGroup, ...]:
    """The first `count` tokens of the first rollout have numbers that are `nats` too low."""
    first, *others = groups
    rollout = first.rollouts[0]
    numbers = tuple(x - nats if place < count else x for place, x in enumerate(rollout.raw_logprobs))
    changed = replace(rollout, logprobs=numbers, raw_logprobs=numbers)
    return (replace(first, rollouts=(changed, *first.rollouts[1:])), *others)


@pytest.mark.parametrize("nats", [5.0, 18.0])
def test_one_forged_report_moves_a_step_no_more_than_a_few_honest_ones(model_path: Path, nats: float) -> None:
    """Whatever its numbers say: without the bound the gradient of a ratio of e^18 is all that is left of the step."""

    def norm_of(groups: tuple[TrainGroup, ...]) -> tuple[float, tuple[int, ...]]:
        result = new_trainer(model_path, grad_clip=1e9).step(Batch(Step(0), groups))
        return result.grad_norm, result.left_out

    plain = new_trainer(model_path)
    groups = random_groups(11)
    groups = tuple(
        replace(
            group, rollouts=tuple(_told(r, tuple(own.tolist())) for r, own in zip(group.rollouts, found, strict=True))
        )
        for group, found in ((g, plain.logprobs([g])) for g in groups)
    )
    lowest = min(range(4), key=lambda n: groups[0].rewards[n])  # a negative advantage: nothing clips a large ratio
    groups = (_rotated(groups[0], lowest), *groups[1:])
    honest, nothing = norm_of(groups)
    tokens = len(groups[0].rollouts[0].token_ids)
    bad, left_out = norm_of(forged(groups, tokens, nats))
    assert sum(nothing) == 0 and left_out[0] == tokens and sum(left_out) == tokens
    assert bad < 2 * honest


def _told(rollout: Rollout, numbers: tuple[float, ...]) -> Rollout:
    return replace(rollout, logprobs=numbers, raw_logprobs=numbers)


def _rotated(group: TrainGroup, first: int) -> TrainGroup:
    order = [first, *(n for n in range(len(group.rollouts)) if n != first)]
    return replace(
        group, rollouts=tuple(group.rollouts[n] for n in order), rewards=tuple(group.rewards[n] for n in order)
    )
