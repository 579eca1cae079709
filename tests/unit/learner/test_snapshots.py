"""Exact behaviour log-probabilities of a real model under the versions that it went through, kept as changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.base.errors import StateError
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rng import rollout_seed, uniforms
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import Bets, Evidence, Habits, KindNoise, Passage, Scorer, examine, passage_of
from echo2.learner.options import TrainerOptions
from echo2.learner.rollouts.groups import SentTokens, TrainGroup
from echo2.learner.training.adapter import AdapterOptions
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.scoring import (
    KeptVersions,
    TrainerScorer,
    VersionScorer,
    rows_by_name,
)
from echo2.learner.training.team import Team
from echo2.learner.training.token_scores import cache_name
from echo2.learner.training.trainer import Trainer
from echo2.worker.engines.embedded.loop import draw
from tests.unit.learner.tiny import make_tiny_model

PROMPT = (5, 6, 7)
TOKENS = 40
WORKER = PeerId("w")
Snapshots = dict[int, dict[str, torch.Tensor]]


def model_with_history(
    tmp_path: Path, changed: float = 1.0, is_own: bool = False, weights_dtype: str = "bfloat16"
) -> tuple[PolicyModel, Scorer, Snapshots]:
    """A policy that was published at 0, 2 and 4, and has moved on. `changed`: the share of weights that each step changes;
    `is_own`: scored by the model that trains, else by a copy."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = str(make_tiny_model(tmp_path / "model"))
    model = PolicyModel(path, weights_dtype, torch.device("cpu"), 1.0)
    scorer: Scorer
    if is_own:
        scorer = Team(Trainer(model, TrainerOptions(path), 10)).scorer(2, Version(0))
    else:
        scorer = VersionScorer(PolicyModel(path, weights_dtype, torch.device("cpu"), 1.0).hf_model, versions_max=2)
    snapshots: Snapshots = {}
    for version in (0, 2, 4):
        snapshots[version] = dict(model.snapshot())
        scorer.keep(Version(version), snapshots[version])
        with torch.no_grad():
            for master in model.masters:
                master.add_(0.1 * torch.randn_like(master) * (torch.rand_like(master) < changed))
        model.round_to_policy()
    return model, scorer, snapshots


def sampled(
    model: PolicyModel, snapshots: Snapshots, spans: list[tuple[int, int]], sampling: SamplingParams, keeps_cache: bool
) -> Passage:
    """As an honest worker samples, which computes its cache anew at each change of versions, or keeps it."""
    own: Any = model.hf_model
    numbers = uniforms(rollout_seed(sampling.seed, 0), TOKENS).tolist()
    token_ids: list[int] = []
    logprobs: list[float] = []
    raw: list[float] = []
    cache, cached = None, 0
    for version, count in spans:
        own.load_state_dict({**own.state_dict(), **snapshots[version]})
        if not keeps_cache:
            cache, cached = None, 0
        for _ in range(count):
            text = [*PROMPT, *token_ids]
            with torch.no_grad():
                out = own(input_ids=torch.tensor([text[cached:]]), use_cache=True, **{cache_name(): cache})
            cache, cached = out[cache_name()], len(text)
            drawn = draw(out.logits[0, -1:].float(), [sampling], [numbers[len(token_ids)]])
            token_ids += drawn.token_ids
            logprobs += drawn.logprobs
            raw += drawn.raw_logprobs
    claimed = tuple(VersionSpan(Version(version), count) for version, count in spans)
    rollout = Rollout(GroupId("g"), 0, tuple(token_ids), tuple(logprobs), tuple(raw), claimed, FinishReason.LENGTH)
    spec = GroupSpec(GroupId("g"), PROMPT, 1, sampling, 0)
    group = TrainGroup(spec, 0, (rollout,), (1.0,), (), ((SentTokens(WORKER, TOKENS),),))
    return passage_of(group, 0, lambda peer: Habits(True, keeps_cache))


PLAIN = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=(1,), seed=9)


def found_by(scorer: Scorer, passages: list[Passage]) -> list[list[Evidence]]:
    with scorer.turn():
        return examine(passages, scorer)


FILTERED = replace(PLAIN, temperature=0.8, top_k=12, top_p=0.7)


@pytest.mark.parametrize(
    ("sampling", "keeps_cache", "changed", "is_own", "weights_dtype"),
    [
        (PLAIN, True, 1.0, True, "bfloat16"),
        (FILTERED, False, 0.05, True, "bfloat16"),
        (replace(PLAIN, top_p=0.8), True, 0.05, True, "float32"),
        (PLAIN, False, 0.05, False, "bfloat16"),
        (FILTERED, True, 1.0, False, "bfloat16"),
    ],
)
def test_tokens_are_scored_as_they_were_sampled(
    tmp_path: Path, sampling: SamplingParams, keeps_cache: bool, changed: float, is_own: bool, weights_dtype: str
) -> None:
    """Under their own versions, behind the cache that their engine had, and by the numbers of their lease."""
    model, scorer, snapshots = model_with_history(tmp_path, changed, is_own, weights_dtype)
    spans = [(2, TOKENS // 2), (4, TOKENS // 2)]
    passages = [sampled(model, snapshots, spans, replace(sampling, seed=seed), keeps_cache) for seed in range(2)]
    model.load_masters({name: master + 1e-3 for name, master in model.masters_by_name().items()})
    trained = {name: p.detach().clone() for name, p in model.hf_model.named_parameters()}
    all_found = found_by(scorer, passages)
    assert all(torch.equal(p, trained[name]) for name, p in model.hf_model.named_parameters()), "what trains is back"
    for found in all_found:
        assert [e.piece.version for e in found] == [2, 4]
        for evidence in found:
            exact = evidence.exact
            assert exact.logprobs == pytest.approx(evidence.claimed, abs=2e-5)
            assert np.all(exact.picked == 1.0)
            assert np.all((evidence.uniforms >= exact.low) & (evidence.uniforms <= exact.high))
            assert exact.high - exact.low == pytest.approx(np.exp(exact.drawn), abs=1e-5)
            assert np.all((exact.low_spread >= 0.0) & (exact.low_spread**2 <= exact.low * (1 - exact.low) + 1e-9))


def test_only_the_newest_versions_are_kept_whose_bits_are_those_that_were_published(tmp_path: Path) -> None:
    model, scorer, snapshots = model_with_history(tmp_path, changed=0.05)
    assert isinstance(scorer, VersionScorer)
    kept = scorer.kept
    with pytest.raises(StateError, match=r"version 5: expected tensors of the model that scores, got elsewhere"):
        scorer.keep(Version(5), {"elsewhere.weight": torch.zeros(1)})
    assert kept.versions == [2, 4]
    assert kept.held_bytes < 0.4 * sum(tensor.nbytes for tensor in snapshots[4].values())
    for version in (4, 2, 2, 4, 2):
        kept.load(Version(version))
        own = dict(scorer._model.named_parameters())
        assert all(torch.equal(own[name].bfloat16(), tensor) for name, tensor in snapshots[version].items())
    with pytest.raises(StateError, match="version 0: expected a kept version among 2, 4"):
        kept.load(Version(0))
    # Where all weights change, bytes bound how many are kept; another rank forgets what the first one tells it to.
    bounded, follows = (KeptVersions(rows_by_name(model.hf_model), 100, is_leader=leads) for leads in (True, False))
    for number in range(8):
        bounded.keep(Version(number), {name: t * (1 + number) for name, t in snapshots[2].items()})
        follows.keep(Version(number), snapshots[2 * (number % 3)])
    size = sum(tensor.nbytes for tensor in snapshots[0].values())
    assert bounded.versions[-1] == 7 and len(bounded.versions) < 8 and bounded.held_bytes <= 2 * size
    follows.forget_before(Version(6))
    assert follows.versions == [6, 7]


def test_versions_of_an_adapter_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = str(make_tiny_model(tmp_path / "model"))
    model = PolicyModel(path, "bfloat16", torch.device("cpu"), 1.0, adapter=AdapterOptions(2, 4))
    scorer = TrainerScorer(model, versions_max=3)
    scorer.keep(Version(0), dict(model.snapshot()))
    with torch.no_grad():
        for master in model.masters:
            master.add_(0.5 * torch.randn_like(master))
    model.round_to_policy()
    scorer.keep(Version(1), dict(model.snapshot()))
    numbers = (-1.0,) * 3
    rollout = Rollout(GroupId("g"), 0, (9, 10, 11), numbers, numbers, (VersionSpan(Version(1), 3),), FinishReason.STOP)
    spec = GroupSpec(GroupId("g"), PROMPT, 1, SamplingParams(), 0)
    group = TrainGroup(spec, 0, (rollout,), (1.0,), (), ((SentTokens(WORKER, 3),),))
    before = replace(rollout, version_spans=(VersionSpan(Version(0), 3),))
    passages = [passage_of(replace(group, rollouts=(one,)), 0, lambda peer: Habits()) for one in (rollout, before)]
    (newer,), (older,) = found_by(scorer, passages)
    assert np.abs(newer.exact.logprobs - older.exact.logprobs).max() > 1e-4
    with pytest.raises(StateError, match=r"version 2: expected tensors of the model that scores, got elsewhere"):
        scorer.keep(Version(2), {"elsewhere.weight": torch.zeros(1)})


def test_greedy_answers_are_held_to_the_likeliest_token_and_honest_ones_pass(tmp_path: Path) -> None:
    """What an evaluation is answered by: tokens that were drawn, or are another model's, are found as such."""
    model, scorer, snapshots = model_with_history(tmp_path)
    greedy = replace(PLAIN, temperature=0.0)
    honest, liar = Bets(0.0), Bets(0.0)
    for seed in range(3):
        own = sampled(model, snapshots, [(4, TOKENS)], replace(greedy, seed=seed), False)
        drawn = sampled(model, snapshots, [(4, TOKENS)], replace(PLAIN, seed=seed), False)
        passages = [own, replace(drawn, sampling=greedy)]
        for bets, found in zip((honest, liar), found_by(scorer, passages), strict=True):
            for evidence in found:
                assert evidence.exact.logprobs == pytest.approx(evidence.claimed, abs=2e-5)
                bets.observe(evidence, "embedded none", KindNoise())
    assert honest.accusation is None
    assert liar.accusation is not None and liar.accusation.bet == "sums"
