"""Exact behaviour log-probabilities of a real model under the versions that it went through."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from echo2.base.errors import StateError
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.learner.audit import examined, pieces_of
from echo2.learner.runtime.adapter import AdapterOptions
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


def test_tokens_are_scored_under_their_own_versions(tmp_path: Path) -> None:
    model, snapshots = model_with_history(tmp_path)
    rollouts = [sampled(model, snapshots, [(2, TOKENS // 2), (4, TOKENS // 2)], seed) for seed in range(2)]
    scorer = SnapshotScorer(copy.deepcopy(model.hf_model), snapshots, TEMPERATURE, [1])
    scorer.prompts[GroupId("g")] = PROMPT
    pieces = [piece for rollout in rollouts for piece in pieces_of(rollout, [(PeerId("w"), TOKENS)])]
    found = examined(pieces, snapshots.versions, scorer)
    assert [(e.piece.version, bool(e.previous)) for e in found] == [(2, False), (4, True)] * 2
    for evidence in found:
        assert evidence.exact.logprobs == pytest.approx(evidence.claimed, abs=1e-5)
        assert all(0 < chance < 1 for chance in evidence.exact.stop_chances)
        tokens = evidence.piece.rollout.token_ids[evidence.piece.start : evidence.piece.stop]
        assert evidence.exact.stopped == tuple(token == 1 for token in tokens)
    assert max(abs(a - b) for a, b in zip(found[1].previous, found[1].claimed, strict=True)) > 0.01


def test_only_the_newest_versions_are_kept_and_an_older_one_is_named(tmp_path: Path) -> None:
    _, snapshots = model_with_history(tmp_path)
    assert [version in snapshots for version in (Version(0), Version(2), Version(4))] == [False, True, True]
    with pytest.raises(StateError, match="version 0: expected a kept snapshot among 2, 4"):
        snapshots.of(Version(0))


def test_versions_of_an_adapter_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = str(make_tiny_model(tmp_path / "model"))
    model = PolicyModel(path, "bfloat16", torch.device("cpu"), 1.0, adapter=AdapterOptions(2, 4))
    snapshots = KeptSnapshots(versions_max=3)
    snapshots.keep(Version(0), model.snapshot())
    scorer = SnapshotScorer(model.hf_model, snapshots, 1.0, ())
    scorer.prompts[GroupId("g")] = PROMPT
    with torch.no_grad():
        for master in model.masters:
            master.add_(0.5 * torch.randn_like(master))
    model.round_to_policy()
    snapshots.keep(Version(1), model.snapshot())
    tokens = (9, 10, 11)
    rollout = Rollout(
        GroupId("g"), 0, tokens, (-1.0,) * 3, (-1.0,) * 3, (VersionSpan(Version(1), 3),), FinishReason.STOP
    )
    base, adapted = (scorer(Version(v), rollout, 0, 3).logprobs for v in (0, 1))
    assert base != adapted and scorer(Version(0), rollout, 0, 3).logprobs == base
    snapshots.keep(Version(2), {"elsewhere.weight": torch.zeros(1)})
    with pytest.raises(StateError, match=r"version 2: expected tensors of the model that scores, got elsewhere"):
        scorer(Version(2), rollout, 0, 3)
