"""Frames of a bulk connection come out as they went in, however their bytes were cut; memory follows what has come."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.broadcast.connection import HEAD, READ_BYTES, FrameCutter

LIMIT = 4 << 20


def framed(frames: list[bytes]) -> bytes:
    return b"".join(HEAD.pack(len(frame)) + frame for frame in frames)


def fed(cutter: FrameCutter, data: bytes, steps: list[int]) -> list[bytes]:
    """As a socket would hand it over: at most so many bytes at a time, and never more than there is room for."""
    found, at, turn = list[bytes](), 0, 0
    while at < len(data):
        room = cutter.room()
        piece = data[at : at + min(steps[turn % len(steps)], len(room))]
        room[: len(piece)] = piece
        found += cutter.took(len(piece))
        at, turn = at + len(piece), turn + 1
    return found


@given(
    st.lists(st.integers(1, 3000), max_size=20),
    st.lists(st.sampled_from([1, 3, 4, 5, 1000, 70_000]), min_size=1, max_size=5),
)
def test_frames_come_out_as_they_went_in(sizes: list[int], steps: list[int]) -> None:
    frames = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    cutter = FrameCutter(LIMIT, "x")
    assert fed(cutter, framed(frames), steps) == frames
    assert cutter.held_bytes == 0


def test_large_and_small_frames_pass_one_after_another() -> None:
    frames = [
        random.Random(number).randbytes(size) for number, size in enumerate((2, 1, LIMIT, 3, 1 << 20, 1, 300_000))
    ]
    for step in (16 << 10, 1 << 20):
        assert fed(FrameCutter(LIMIT, "x"), framed(frames), [step]) == frames


def test_memory_follows_the_bytes_that_came_not_those_announced() -> None:
    cutter = FrameCutter(LIMIT, "x")
    assert fed(cutter, HEAD.pack(LIMIT) + bytes(1000), [1 << 20]) == []
    assert cutter.held_bytes == HEAD.size + 1000
    assert len(cutter._buffer) == READ_BYTES
    assert fed(cutter, bytes(1 << 20), [1 << 20]) == []
    assert len(cutter._buffer) <= 4 * (1 << 20)


@pytest.mark.parametrize("size", [0, LIMIT + 1])
def test_an_empty_frame_and_one_beyond_the_limit_are_refused_before_they_come(size: int) -> None:
    with pytest.raises(MalformedMessage, match=rf"peer y: expected frames of 1 to 4194304 bytes, got one of {size}"):
        fed(FrameCutter(LIMIT, "peer y"), HEAD.pack(size), [1 << 20])
