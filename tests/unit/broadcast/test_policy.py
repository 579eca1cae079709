"""The window of chunks in flight at a relay: sized by the link and the chunks, and bounded."""

from __future__ import annotations

import pytest

from echo2.broadcast.pace import RelayWindow

GBIT, LAP_AND_SLACK_S = 125e6, 0.25


def room(*chunk_bytes: int) -> int:
    """How many chunks are given to one relay of a 1 Gbit/s link before the first acknowledgement, after chunks of such sizes."""
    window = RelayWindow(0.15, GBIT * LAP_AND_SLACK_S)
    count = 0
    for size in chunk_bytes:
        window.given((b"k", count), size, True, 0.0)
        count += 1
    while window.has_room(0.0):
        window.given((b"k", count), chunk_bytes[-1], True, 0.0)
        count += 1
    return count


def test_a_relay_that_carries_all_of_a_fast_link_gets_what_the_link_holds() -> None:
    assert room(256 << 10) == pytest.approx(GBIT * LAP_AND_SLACK_S / (256 << 10), abs=1)


def test_a_tiny_first_chunk_does_not_size_the_window_for_the_others() -> None:
    """A container's header is a chunk of 84 bytes: by its size the window would be of hundreds of thousands."""
    assert room(84) == RelayWindow.LARGEST
    assert room(84, 256 << 10) == room(256 << 10)


def test_the_window_is_bounded_whatever_the_link() -> None:
    window = RelayWindow(0.15, 1e12)
    count = 0
    while window.has_room(0.0):
        window.given((b"k", count), 256 << 10, True, 0.0)
        count += 1
    assert count == RelayWindow.LARGEST_PLANNED
