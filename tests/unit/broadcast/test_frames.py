"""What is read from the first bytes of a connection and of a caller at a byte-pipe port, however they were cut."""

import contextlib
import random
import ssl

import pytest
from hypothesis import given, settings, strategies as st

from echo2.base.errors import MalformedMessage
from echo2.broadcast.connection import HEAD, READ_BYTES, FrameCutter
from echo2.broadcast.nat.pipes import ANSWER_BYTES, OPENING_BYTES_MAX, PipeAnswer, TlsHello, opening_of, pipe_address
from echo2.trust.identity import Identity, dns_name_of

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
        found += cutter.take(len(piece))
        at, turn = at + len(piece), turn + 1
    return found


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 3000) | st.sampled_from([300_000, 1 << 20, LIMIT]), max_size=20),
    st.lists(st.sampled_from([1000, 16 << 10, 70_000, 1 << 20]), min_size=1, max_size=5),
)
def test_frames_come_out_as_they_went_in(sizes: list[int], steps: list[int]) -> None:
    frames = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    cutter = FrameCutter(LIMIT, "x")
    assert fed(cutter, framed(frames), steps) == frames and cutter.held_bytes == 0


def test_memory_follows_the_bytes_that_came_not_those_announced() -> None:
    cutter = FrameCutter(LIMIT, "x")
    assert fed(cutter, HEAD.pack(LIMIT) + bytes(1000), [1 << 20]) == []
    assert cutter.held_bytes == HEAD.size + 1000 and len(cutter._buffer) == READ_BYTES
    assert fed(cutter, bytes(1 << 20), [1 << 20]) == [] and len(cutter._buffer) <= 4 * (1 << 20)


@pytest.mark.parametrize("size", [0, LIMIT + 1])
def test_an_empty_frame_and_one_beyond_the_limit_are_refused_before_they_come(size: int) -> None:
    with pytest.raises(MalformedMessage, match=rf"peer y: expected frames of 1 to 4194304 bytes, got one of {size}"):
        fed(FrameCutter(LIMIT, "peer y"), HEAD.pack(size), [1 << 20])


def tls_hello(name: str, protocols: list[str] | None = None) -> bytes:
    """As OpenSSL writes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if protocols:
        context.set_alpn_protocols(protocols)
    written = ssl.MemoryBIO()
    shaking = context.wrap_bio(ssl.MemoryBIO(), written, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        shaking.do_handshake()
    return written.read()


NAME = dns_name_of(Identity.generate().peer_id)
TICKET = PipeAnswer(bytes(range(16)))
assert len(TICKET.to_bytes()) == ANSWER_BYTES


@pytest.mark.parametrize(
    ("opening", "expected"),
    [
        *((tls_hello(NAME, protocols), TlsHello(NAME, tuple(protocols))) for protocols in ([], ["h2"], ["http/1.1", "h2"])),
        (TICKET.to_bytes(), TICKET),
    ],
)  # fmt: skip
def test_a_hello_names_the_peer_that_is_meant_an_answer_its_ticket_and_of_a_part_more_is_awaited(
    opening: bytes, expected: TlsHello | PipeAnswer
) -> None:
    assert opening_of(opening) == expected == opening_of(opening + b"what follows it")
    assert {opening_of(opening[:cut]) for cut in range(len(opening))} == {None}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\x17\x03\x03\x00\x05hello",
        b"echo2 pope",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x05\x02\0\0\x01\0",
        tls_hello("peer.example")[:6] + b"\xff" + tls_hello("peer.example")[7:],  # longer than itself
    ],
)
def test_whatever_else_comes_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="byte pipes: expected"):
        opening_of(data)


@given(st.binary(max_size=2 * OPENING_BYTES_MAX))
def test_any_bytes_are_an_opening_or_refused_or_too_few(data: bytes) -> None:
    for given_ in (data, b"\x16\x03\x01" + data):
        with contextlib.suppress(MalformedMessage):
            opening = opening_of(given_)
            assert opening is not None or len(given_) < OPENING_BYTES_MAX


def test_byte_pipes_are_had_at_the_port_after_the_relays() -> None:
    assert pipe_address("203.0.113.5:8423") == "203.0.113.5:8424"
    assert pipe_address("[2001:db8::1]:8423") == "[2001:db8::1]:8424"
    assert [pipe_address(one) for one in ("", "h:0", "h:65535", "h:", "h:x", "h:-5")] == [""] * 6
