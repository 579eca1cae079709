"""What a machine concludes of its own link: rates without their slow start, and how it can be met."""

from __future__ import annotations

import pytest

from echo2.broadcast.reachability import BLOCK_BYTES, TRANSFER_BYTES, TRANSFER_S, LinkKind, Seen, Throughput, own_reach


def test_the_rate_leaves_out_the_time_in_which_a_connection_gets_going() -> None:
    rate = Throughput()
    for step in range(41):  # two seconds at 1 MB/s, then two at 8 MB/s
        rate.add(50_000 if step <= 20 else 400_000, step * 0.05)
    assert rate.bytes_per_s == pytest.approx(8e6)


def test_a_rate_needs_two_moments() -> None:
    rate = Throughput()
    assert rate.bytes_per_s == 0.0
    rate.add(1000, 1.0)
    assert rate.bytes_per_s == 0.0
    rate.add(1000, 1.0)
    assert rate.bytes_per_s == 0.0
    rate.add(1000, 2.0)
    assert rate.bytes_per_s == pytest.approx(1000)
    assert rate.total_bytes == 3000


def test_a_transfer_ends_by_its_time_or_its_bytes() -> None:
    slow, fast = Throughput(), Throughput()
    assert not slow.is_enough(1e9)
    slow.add(BLOCK_BYTES, 5.0)
    assert not slow.is_enough(5.0 + 0.99 * TRANSFER_S)
    assert slow.is_enough(5.0 + TRANSFER_S)
    for _ in range(TRANSFER_BYTES // BLOCK_BYTES - 1):
        fast.add(BLOCK_BYTES, 0.0)
    assert not fast.is_enough(0.0)
    fast.add(BLOCK_BYTES, 0.0)
    assert fast.is_enough(0.0)


HOME, OUTSIDE = ("192.168.1.2", 5000), "198.51.100.7"


@pytest.mark.parametrize(
    ("seen", "kind", "words"),
    [
        (Seen(HOME, (OUTSIDE, 5000), 7000, True), LinkKind.DIRECT, "198.51.100.7, port 7000"),
        (Seen(HOME, (OUTSIDE, 5000), 0, True), LinkKind.HOLE_PUNCHED, "192.168.1.2 is seen as 198.51.100.7"),
        (Seen(HOME, (OUTSIDE, 61234), 0, True), LinkKind.RELAYED, "port 5000 became 61234"),
        (Seen((OUTSIDE, 5000), (OUTSIDE, 5000), 0, True), LinkKind.HOLE_PUNCHED, "something filters"),
        (Seen(HOME, (OUTSIDE, 5000), 0, False), LinkKind.NONE, "no relay"),
        (Seen(None, (OUTSIDE, 5000), 0, True), LinkKind.RELAYED, "cannot be told here"),
    ],
)
def test_how_a_machine_can_be_met_comes_with_its_reason(seen: Seen, kind: LinkKind, words: str) -> None:
    found = own_reach(seen)
    assert found.kind is kind
    assert words in found.reason
