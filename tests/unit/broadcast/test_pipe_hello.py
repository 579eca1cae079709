"""What a caller at a relay's port for byte pipes wants is read from its first bytes, and nothing else is."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.broadcast.nat.pipes import ANSWER_BYTES, OPENING_BYTES_MAX, PipeAnswer, TlsHello, opening_of, pipe_address
from echo2.trust.identity import Identity, dns_name_of


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


@pytest.mark.parametrize("protocols", [[], ["h2"], ["http/1.1", "h2"]])
def test_a_tls_hello_names_the_peer_that_is_meant_and_what_is_spoken(protocols: list[str]) -> None:
    name = dns_name_of(Identity.generate().peer_id)
    assert opening_of(tls_hello(name, protocols)) == TlsHello(name, tuple(protocols))


@pytest.mark.parametrize("opening", [tls_hello("peer.example", ["h2"]), PipeAnswer(bytes(range(16))).to_bytes()])
def test_of_any_beginning_it_is_said_that_more_has_to_come(opening: bytes) -> None:
    whole = opening_of(opening)
    assert whole is not None
    assert {opening_of(opening[:cut]) for cut in range(len(opening))} == {None}
    assert opening_of(opening + b"what follows it") == whole


def test_an_answer_carries_its_ticket() -> None:
    answer = PipeAnswer(bytes(range(16)))
    assert opening_of(answer.to_bytes()) == answer and len(answer.to_bytes()) == ANSWER_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\x17\x03\x03\x00\x05hello",
        b"echo2 pope",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x05\x02\0\0\x01\0",
    ],
)
def test_whatever_else_comes_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="byte pipes: expected"):
        opening_of(data)


def test_a_hello_whose_parts_are_longer_than_itself_is_refused() -> None:
    made = bytearray(tls_hello("peer.example"))
    made[6] = 255  # of its length, in three bytes
    with pytest.raises(MalformedMessage, match="more bytes of a TLS hello"):
        opening_of(bytes(made))


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
