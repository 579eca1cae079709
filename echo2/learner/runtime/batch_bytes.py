"""Serialises a batch for the other ranks.

Guarantees: tokens, log-probabilities, versions and rewards survive the round trip unchanged. Leaves to others: sending (ranks).

Layout: frames, each a little-endian length of 4 bytes and the payload. The first frame is JSON: the step and, per group, cursor,
rewards, insertions and the number of rollouts. Then follow, per group, its GroupSpec and its rollouts as protobuf messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from echo2.base.errors import MalformedMessage
from echo2.base.ids import Step
from echo2.learner.batch import Batch, TrainGroup
from echo2.learner.episodes import Insertion
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import group_from_message, group_to_message, rollout_from_message, rollout_to_message


def batch_to_bytes(batch: Batch) -> bytes:
    groups = [
        {
            "cursor": group.cursor,
            "rewards": list(group.rewards),
            "insertions": [[[i.position, list(i.token_ids)] for i in row] for row in group.insertions],
            "rollouts": len(group.rollouts),
        }
        for group in batch.groups
    ]
    frames = [json.dumps({"step": batch.step, "groups": groups}).encode()]
    for group in batch.groups:
        frames.append(group_to_message(group.spec).SerializeToString())
        frames += [rollout_to_message(rollout).SerializeToString() for rollout in group.rollouts]
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def batch_from_bytes(data: bytes) -> Batch:
    frames = _frames(data)
    head = json.loads(next(frames))
    groups = []
    for said in head["groups"]:
        spec = group_from_message(rollout_pb2.GroupSpec.FromString(next(frames)), prompt_tokens_min=0)
        rollouts = tuple(
            rollout_from_message(rollout_pb2.RolloutSegment.FromString(next(frames))) for _ in range(said["rollouts"])
        )
        insertions = tuple(tuple(Insertion(at, tuple(ids)) for at, ids in row) for row in said["insertions"])
        groups.append(TrainGroup(spec, said["cursor"], rollouts, tuple(said["rewards"]), insertions))
    return Batch(Step(head["step"]), tuple(groups))


def _frames(data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    while view:
        length = int.from_bytes(view[:4], "little")
        if len(view) < 4 + length:
            raise MalformedMessage(f"batch of rank 0: expected a frame of {length} bytes, got {len(view) - 4}")
        yield bytes(view[4 : 4 + length])
        view = view[4 + length :]
