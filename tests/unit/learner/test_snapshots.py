"""Exact behaviour log-probabilities of a real model under the versions that it went through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echo2.base.errors import StateError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.learner.audit import AuditTolerance, audited, exact_scores
from echo2.learner.runtime.model import PolicyModel
from echo2.learner.runtime.snapshots import KeptSnapshots, SnapshotScorer
from tests.unit.learner.tiny import make_tiny_model

PROMPT = (5, 6, 7)
TOKENS = 40
TEMPERATURE = 0.9


def model_with_history(tmp_path: Path) -> tuple[PolicyModel, KeptSnapshots]:
    """A policy that was published at 0, 2 and 4, and has moved on."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PolicyModel(str(make_tiny_model(tmp_path / "model")), "bfloat16", torch.device("cpu"), TEMPERATURE)
    snapshots = KeptSnapshots(versions_max=2)
    for version in (0, 2, 4):
        snapshots.keep(Version(version), model.snapshot())
        with torch.no_grad():
            for master in model.masters:
                master.add_(0.1 * torch.randn_like(master))
        model.round_to_policy()
    return model, snapshots


def sampled(model: PolicyModel, snapshots: KeptSnapshots, spans: list[tuple[int, int]], seed: int) -> Rollout:
    """As an honest worker samples that recomputes its cache at each swap."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    logprobs: list[float] = []
    for version, count in spans:
        own = model.hf_model
        own.load_state_dict({**own.state_dict(), **snapshots.of(Version(version))})
        for _ in range(count):
            with torch.no_grad():
                logits = own(input_ids=torch.tensor([[*PROMPT, *token_ids]]), use_cache=False).logits[0, -1]
            logprobs_V = (logits / TEMPERATURE).log_softmax(-1)
            token_ids.append(int(torch.multinomial(logprobs_V.exp(), 1, generator=generator)))
            logprobs.append(float(logprobs_V[token_ids[-1]]))
    claimed = tuple(VersionSpan(Version(version), count) for version, count in spans)
    numbers = tuple(logprobs)
    return Rollout(GroupId("g"), 0, tuple(token_ids), numbers, numbers, claimed, FinishReason.LENGTH)


def test_tokens_are_scored_under_their_own_versions_and_a_worker_on_another_is_found_out(tmp_path: Path) -> None:
    model, snapshots = model_with_history(tmp_path)
    rollouts = [sampled(model, snapshots, [(2, TOKENS // 2), (4, TOKENS // 2)], seed) for seed in range(2)]
    scorer = SnapshotScorer(model.hf_model, snapshots, TEMPERATURE)
    scorer.prompts[GroupId("g")] = PROMPT
    for rollout, exact in zip(rollouts, exact_scores(rollouts, scorer), strict=True):
        assert exact.logprobs == pytest.approx(rollout.logprobs, abs=1e-5)
        assert audited(rollout.logprobs, exact, AuditTolerance()).problem == ""
    liar = sampled(model, snapshots, [(4, TOKENS)], seed=9)
    lie = Rollout(
        liar.group_id, 0, liar.token_ids, liar.logprobs, liar.raw_logprobs, (VersionSpan(Version(2), TOKENS),),
        FinishReason.LENGTH,
    )  # fmt: skip
    (exact,) = exact_scores([lie], scorer)
    assert "not those of the version claimed" in audited(lie.logprobs, exact, AuditTolerance()).problem


def test_only_the_newest_versions_are_kept_and_an_older_one_is_named(tmp_path: Path) -> None:
    _, snapshots = model_with_history(tmp_path)
    assert [version in snapshots for version in (Version(0), Version(2), Version(4))] == [False, True, True]
    with pytest.raises(StateError, match="version 0: expected a kept snapshot among 2, 4"):
        snapshots.of(Version(0))


def test_filtered_sampling_is_not_taken_for_cold_sampling(tmp_path: Path) -> None:
    model, snapshots = model_with_history(tmp_path)
    scorer = SnapshotScorer(model.hf_model, snapshots, TEMPERATURE)
    scorer.prompts[GroupId("g")] = PROMPT
    greedy = sampled(model, snapshots, [(2, 1)], 0)
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model.hf_model(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1]
        logprobs_V = (logits / TEMPERATURE).log_softmax(-1)
        tokens.append(int(logprobs_V.argmax()))
        logprobs.append(float(logprobs_V.max()))
    cold = Rollout(
        greedy.group_id, 0, tuple(tokens), tuple(logprobs), tuple(logprobs), (VersionSpan(Version(2), TOKENS),),
        FinishReason.LENGTH,
    )  # fmt: skip
    (exact,) = exact_scores([cold], scorer)
    assert "no draw" in audited(cold.logprobs, exact, AuditTolerance()).problem
    assert audited(cold.logprobs, exact, AuditTolerance(), is_filtered=True).is_honest
