"""Scoring leases and answers come back as they were sent, or are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, LeaseId, Version
from echo2.base.rollout import SamplingParams
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import ingest_pb2
from echo2.wire.scoring import lease_from_message, lease_to_message, scores_from_message, scores_to_message

REQUEST = ScoreRequest(
    "s-1",
    (5, 6, 7, 8),
    SamplingParams(temperature=0.5, top_k=3, stop_token_ids=(8,)),
    (Stretch(Version(4), 2, 2, GroupId("g.1.1"), 0), Stretch(Version(2), 3, 1, GroupId("g.1.1"), 1)),
)


def test_a_lease_comes_back_as_it_was_sent() -> None:
    message = lease_to_message(REQUEST, 60.0)
    check(message, "the learner")
    assert lease_from_message(ingest_pb2.ScoringLease.FromString(message.SerializeToString())) == (REQUEST, 60.0)


@pytest.mark.parametrize("first, count", [(0, 1), (3, 2), (2, 0)])
def test_a_stretch_outside_the_tokens_is_refused(first: int, count: int) -> None:
    message = lease_to_message(REQUEST, 60.0)
    message.stretches[0].first, message.stretches[0].count = first, count
    with pytest.raises(MalformedMessage, match="expected tokens 1 to 3"):
        lease_from_message(message)


def test_scores_come_back_in_float32_and_uneven_or_wild_ones_are_refused() -> None:
    columns = [np.array([-0.25, -1.5])] * 3 + [np.array([0.5, 0.125])] * 4
    message = scores_to_message(LeaseId("s-1"), (TokenScores(*columns),))
    check(message, "a worker")
    lease_id, (found,) = scores_from_message(ingest_pb2.Scores.FromString(message.SerializeToString()))
    assert lease_id == "s-1" and [one.tolist() for one in found.columns] == [one.tolist() for one in columns]
    message.stretches[0].below.append(0.5)
    with pytest.raises(MalformedMessage, match="columns of one length"):
        scores_from_message(message)
    for name, value in (("below", 1.5), ("logprobs", float("nan")), ("logprobs", 3.0)):
        wild = scores_to_message(LeaseId("s-1"), (TokenScores(*columns),))
        getattr(wild.stretches[0], name)[0] = value
        with pytest.raises(MalformedMessage, match=name):
            check(wild, "a worker")
