"""Converts scoring leases and their answers to and from messages.

Guarantees: the result is self-consistent (stretches within the tokens, columns of one length, finite numbers), or a
MalformedMessage names what is wrong. Numbers travel as float32. Leaves to others: bounds of single fields (wire/bounds, checked
first by every receiver), whether the answer fits the request (learner/scorings).
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, LeaseId, Version
from echo2.scoring.request import Column, ScoreRequest, Stretch, TokenScores
from echo2.wire.gen.echo2.v1 import ingest_pb2
from echo2.wire.rollout import sampling_from_message, sampling_to_message

_COLUMNS = tuple(one.name for one in fields(TokenScores))


def lease_to_message(request: ScoreRequest, within_s: float) -> ingest_pb2.ScoringLease:
    return ingest_pb2.ScoringLease(
        lease_id=request.request_id,
        token_ids=request.token_ids,
        sampling=sampling_to_message(request.sampling),
        stretches=[
            ingest_pb2.Stretch(
                version=stretch.version,
                first=stretch.first,
                count=stretch.count,
                group_id=stretch.prefix_key,
                position=stretch.position,
            )
            for stretch in request.stretches
        ],
        within_s=within_s,
    )


def lease_from_message(message: ingest_pb2.ScoringLease) -> tuple[ScoreRequest, float]:
    """The request, and the lease's duration in seconds."""
    stretches = tuple(
        Stretch(Version(stretch.version), stretch.first, stretch.count, GroupId(stretch.group_id), stretch.position)
        for stretch in message.stretches
    )
    if not stretches or not message.token_ids:
        raise MalformedMessage(f"scoring {message.lease_id}: expected tokens to score, got none")
    sampling = sampling_from_message(message.sampling)
    return ScoreRequest(message.lease_id, tuple(message.token_ids), sampling, stretches), message.within_s


def scores_to_message(lease_id: LeaseId, scores: tuple[TokenScores, ...]) -> ingest_pb2.Scores:
    return ingest_pb2.Scores(
        lease_id=lease_id,
        stretches=[
            ingest_pb2.StretchScores(**dict(zip(_COLUMNS, map(np.ndarray.tolist, one.columns), strict=True)))
            for one in scores
        ],
    )


def scores_from_message(message: ingest_pb2.Scores) -> tuple[LeaseId, tuple[TokenScores, ...]]:
    return LeaseId(message.lease_id), tuple(_of_stretch(one, message.lease_id) for one in message.stretches)


def _of_stretch(message: ingest_pb2.StretchScores, whose: str) -> TokenScores:
    columns: list[Column] = [np.array(getattr(message, name), dtype=np.float64) for name in _COLUMNS]
    sizes = {len(column) for column in columns}
    if len(sizes) != 1:
        raise MalformedMessage(f"scores {whose}: expected columns of one length, got {sorted(sizes)}")
    return TokenScores(*columns)
