"""Records come out whole and in order, however they were cut; of a frame never more is expected than its sender must send."""

import random
from itertools import accumulate

from hypothesis import given, strategies as st

from echo2.outside.tls_streams import (
    HEAD_BYTES,
    PLAIN_BYTES_MAX,
    RECORD_BYTES_MAX,
    RECORDS_AT_ONCE,
    TAG_BYTES,
    RecordCutter,
)

BUFFER_BYTES = 4 * RECORD_BYTES_MAX


def record(plain_bytes: int, seed: int = 0) -> bytes:
    body = random.Random(seed).randbytes(plain_bytes + TAG_BYTES)
    return b"\x17\x03\x03" + len(body).to_bytes(2, "big") + body


def put(cutter: RecordCutter, data: bytes) -> tuple[bytes, int]:
    cutter.room()[: len(data)] = data
    whole, count = cutter.take(len(data))
    found, counted = bytes(whole), count
    while count:
        assert count <= RECORDS_AT_ONCE
        whole, count = cutter.take(0)
        found, counted = found + bytes(whole), counted + count
    return found, counted


@given(
    st.lists(st.integers(0, PLAIN_BYTES_MAX), min_size=1, max_size=12),
    st.lists(st.sampled_from([1, 2, 5, 6, 1448, 16_000, 50_000]), min_size=1, max_size=5),
)
def test_records_come_out_as_they_went_in(sizes: list[int], steps: list[int]) -> None:
    records = [record(size, number) for number, size in enumerate(sizes)]
    data, cutter = b"".join(records), RecordCutter(BUFFER_BYTES)
    ends = set(accumulate(map(len, records)))
    came, found, count, turn = 0, b"", 0, 0
    while came < len(data):
        piece = data[came : came + min(steps[turn % len(steps)], len(cutter.room()))]
        whole, more = put(cutter, piece)
        came, turn = came + len(piece), turn + 1
        found, count = found + whole, count + more
        assert count == sum(end <= came for end in ends), "each as soon as it is whole"
        assert came - len(found) < RECORD_BYTES_MAX
    assert found == data and count == len(records)


@given(st.lists(st.integers(1, PLAIN_BYTES_MAX), min_size=1, max_size=12), st.floats(0, 1))
def test_no_more_is_expected_than_must_come(sizes: list[int], share: float) -> None:
    """A frame fills the rest of the first record and all others; a sender of full records is told to the byte."""
    records = [record(size, number) for number, size in enumerate(sizes)]
    data, cutter = b"".join(records), RecordCutter(64 * RECORD_BYTES_MAX)
    cut = int(share * len(data))
    _, whole = put(cutter, data[:cut])
    missing = sum(sizes[whole:])
    expected = cutter.still_to_come(missing)
    assert expected <= len(data) - cut
    in_part = cut - sum(map(len, records[:whole]))
    if all(size == PLAIN_BYTES_MAX for size in sizes[whole + bool(in_part) : -1]) and not 0 < in_part < HEAD_BYTES:
        assert expected == len(data) - cut


def test_between_frames_the_rest_of_a_record_is_expected_or_nothing() -> None:
    cutter = RecordCutter(BUFFER_BYTES)
    assert cutter.still_to_come(0) == 0
    put(cutter, record(1000)[:300])
    assert cutter.still_to_come(0) == HEAD_BYTES + 1000 + TAG_BYTES - 300
    assert cutter.still_to_come(10) == HEAD_BYTES + 1000 + TAG_BYTES - 300


def test_a_record_longer_than_any_may_be_comes_out_as_it_is() -> None:
    """OpenSSL then refuses it by its head; nothing waits for the rest."""
    cutter, data = RecordCutter(BUFFER_BYTES), b"\x17\x03\x03\xff\xff" + bytes(100)
    assert put(cutter, data) == (data, 1)
