"""Two threads as two ranks, over real gloo; each holds all rows and codes its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echo2.base.errors import LimitExceeded, StateError, Unreachable
from echo2.base.ids import Version
from echo2.learner.training.shards import HELD_VERSIONS_MAX, Ahead, HeldVersions, ShardFollower, ShardLeader
from echo2.weights import DeltaHeader, encode_delta, fingerprint, join_frames
from echo2.weights.block import EncodedBlock
from echo2.weights.container import Method
from echo2.weights.elements import ELEMENT_TYPES, Block
from tests.unit.weights.models import KEY, with_changes

BLOCK_ELEMENTS = 256
OLD = {"a": torch.randn(64, 33, generator=torch.Generator().manual_seed(1)).bfloat16(), "b": torch.ones(7)}
NEW = {name: with_changes(np.random.default_rng(2), tensor, 0.1, 2) for name, tensor in OLD.items()}
WHOLE = DeltaHeader(target_version=Version(1), fingerprint_key=KEY, block_elements=BLOCK_ELEMENTS)


def two_groups() -> list[dist.ProcessGroup]:
    store, groups = dist.HashStore(), dict[int, dist.ProcessGroup]()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


@pytest.fixture
def leader() -> Iterator[ShardLeader]:
    """With a second rank that serves and holds versions 0 and 1."""
    first, second = two_groups()
    held = HeldVersions()
    held.keep(Version(0), OLD)
    held.keep(Version(1), NEW)
    thread = threading.Thread(target=ShardFollower(second, held).serve)
    thread.start()
    leader = ShardLeader(first, 2)
    yield leader
    leader.stop()
    thread.join()


def delta_header() -> DeltaHeader:
    return DeltaHeader(
        target_version=Version(1), parent_version=Version(0), parent_fingerprint=fingerprint(OLD, KEY),
        fingerprint_key=KEY, block_elements=BLOCK_ELEMENTS,
    )  # fmt: skip


def in_two(header: DeltaHeader) -> DeltaHeader:
    return DeltaHeader(**{name: getattr(header, name) for name in header.__slots__} | {"shard_count": 2})


def test_an_encoding_that_nobody_draws_to_its_end_is_in_nobodys_way(leader: ShardLeader) -> None:
    given_up = leader.keyframe(NEW, WHOLE)
    assert len([next(given_up) for _ in range(8)]) == 8
    assert leader.fingerprint(Version(1), NEW, KEY) == fingerprint(NEW, KEY)
    whole = encode_delta(OLD, NEW, in_two(delta_header()))
    assert join_frames(leader.delta(OLD, NEW, delta_header())) == join_frames(whole)
    with pytest.raises(StateError, match="rank 1: expected block .* encoding 1: expected 2, which was begun last"):
        list(given_up)


def test_a_version_that_is_kept_is_coded_from_and_one_that_is_forgotten_is_told_with_its_rank(
    leader: ShardLeader,
) -> None:
    leader.keep(Version(0))
    leader.forget_before(Version(1))
    whole = encode_delta(OLD, NEW, in_two(delta_header()))
    assert join_frames(leader.delta(OLD, NEW, delta_header())) == join_frames(whole)
    leader.keep(None)
    leader.forget_before(Version(1))
    with pytest.raises(StateError, match="rank 1: expected its part .* version 0: expected it among those held, got 1"):
        leader.fingerprint(Version(0), OLD, KEY)
    with pytest.raises(
        StateError, match="rank 1: expected block 6 of delta from version 0 to version 1, got StateError"
    ):
        list(leader.delta(OLD, NEW, delta_header()))
    assert list(leader.keyframe(NEW, WHOLE)), "the ones that it holds are coded all the same"


def test_a_rank_that_does_not_answer_is_given_up_within_the_time_limit() -> None:
    first, second = two_groups()
    head = torch.zeros(3, dtype=torch.int64)
    taken = [second.recv([head], 0, 0)]  # takes one order, and no more
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"rank 1: expected .* within 1 s"):
        ShardLeader(first, 2, timeout_s=1.0).fingerprint(Version(0), OLD, KEY)
    assert time.monotonic() - began < 20 and taken


def test_a_rank_that_is_gone_is_seen_at_once() -> None:
    first, second = two_groups()
    leader = ShardLeader(first, 2, timeout_s=40.0)
    follower = ShardFollower(second, HeldVersions())
    thread = threading.Thread(target=follower.serve)
    thread.start()
    leader.stop()
    thread.join()
    del thread, follower, second  # its end of the connections goes with it
    began = time.monotonic()
    with pytest.raises(Unreachable, match="rank 1: expected"):
        leader.fingerprint(Version(0), OLD, KEY)
    assert time.monotonic() - began < 20


def test_no_more_than_one_blocks_bytes_wait_for_who_asks() -> None:
    element = ELEMENT_TYPES[0]
    coded = EncodedBlock(Method.RAW, b"x" * 100, 1)
    drawn: list[int] = []

    def blocks() -> Iterator[tuple[Block, EncodedBlock]]:
        for index in range(50):
            drawn.append(index)
            yield Block(index, 1, element, ()), coded

    ahead = Ahead(lambda: (512, blocks()))
    taken, rounds = 0, 0
    with pytest.raises(StateError, match="all were given"):
        while True:
            taken += len(ahead.take()) // 120
            rounds += 1
    ahead.stop()
    assert taken == 50 == len(drawn) and rounds >= 50 / 4 and ahead.ready_bytes_most <= 512
    large = Ahead(lambda: (10, blocks()))
    assert len(large.take()) == 120, "one that is larger comes alone"
    large.stop()


def test_a_rank_holds_few_versions() -> None:
    held = HeldVersions()
    for version in range(HELD_VERSIONS_MAX):
        held.keep(Version(version), OLD)
    with pytest.raises(LimitExceeded, match="expected 5 to be held"):
        held.keep(Version(HELD_VERSIONS_MAX), OLD)
