"""Fetching an artifact of many chunks: the cost of a chunk does not grow with their number, and no call is long."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks.broadcast_model.pull_load import KEY, Puller, PullLoad

MANY = 165_000  # 11 GB in chunks of 64 KiB
CALL_S_MAX = 0.05
BYTES_PER_S_MIN = 200e6


@pytest.fixture(autouse=True)
def _no_collection_of_other_tests() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fetched(load: PullLoad, chunks_max: int) -> Puller:
    puller = Puller(load)
    puller.begin()
    puller.fetch(chunks_max)
    return puller


def chunk_s(load: PullLoad) -> float:
    """The least of three: of what the machine adds, little is left."""
    return min(fetched(load, 1000).cost.chunk_s for _ in range(3))


def test_a_chunk_of_many_costs_no_more_than_one_of_few() -> None:
    few = chunk_s(PullLoad(1000))
    many = fetched(PullLoad(MANY, kept_share=0.5), 3000)
    assert many.cost.chunks == 3000
    assert many.cost.chunk_s < 3 * few + 20e-6, f"{many.cost.chunk_s * 1e6:.0f} us a chunk, of few {few * 1e6:.0f} us"


def test_a_large_artifact_is_fetched_from_many_at_200_mb_a_second_and_core_and_no_call_is_long() -> None:
    puller = fetched(PullLoad(MANY, kept_share=0.9375), MANY)
    assert puller.session.artifacts[KEY].is_complete
    assert puller.cost.bytes_per_s > BYTES_PER_S_MIN
    puller.leave()
    assert puller.cost.longest_s < CALL_S_MAX, puller.cost.longest


def test_what_is_kept_is_asked_of_nobody() -> None:
    puller = fetched(PullLoad(1000, kept_share=0.5), 1000)
    artifact = puller.session.artifacts[KEY]
    assert artifact.is_complete and artifact.held_bytes == 1000 * 64 << 10
    assert 400 < puller.cost.chunks < 600 and puller.session.duplicates_bytes == 0
