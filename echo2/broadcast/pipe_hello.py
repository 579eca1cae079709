"""What the first bytes at a relay's port for byte pipes say: a TLS hello that names a member, or a member's answer to one.

A byte pipe carries somebody's TLS to a member that cannot be dialled, and the relay never reads it: it needs no more than the name
that a TLS hello asks for in clear. The member is told a ticket, comes to the same port by itself, and shows it.
Guarantees: `opening_of` is total: an opening, None while more bytes are to come, MalformedMessage for anything else; no more than
OPENING_BYTES_MAX is looked at. Leaves to others: who holds a place (runtime/pipe_relay), TLS itself.
Source: RFC 8446 4.1.2, RFC 6066 3, RFC 7301 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.errors import MalformedMessage
from echo2.base.hosts import joined

OPENING_BYTES_MAX = 8 << 10
TICKET_BYTES = 16
_ANSWER = b"echo2 pipe\n"
_RECORD_HEAD, _HANDSHAKE_HEAD = 5, 4
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _PROTOCOLS = 0, 16


@dataclass(frozen=True, slots=True)
class TlsHello:
    """Of whoever wants to talk to `server_name`; `protocols` as it offers them (ALPN)."""

    server_name: str
    protocols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipeAnswer:
    """Of the member that was told of this ticket."""

    ticket: bytes

    def to_bytes(self) -> bytes:
        return _ANSWER + self.ticket


ANSWER_BYTES = len(_ANSWER) + TICKET_BYTES


def pipe_address(relay_address: str) -> str:
    """Where a relay's byte pipes are had: at the port after that of its libp2p. Empty where there is no such port."""
    host, _, port = relay_address.rpartition(":")
    return joined(host, int(port) + 1) if host and port.isdigit() and 0 < int(port) < 65_535 else ""


def opening_of(data: bytes) -> TlsHello | PipeAnswer | None:
    """None: more has to come."""
    if not data:
        return None
    if data[0] == _HANDSHAKE:
        return _hello_of(data)
    if not _ANSWER.startswith(data[: len(_ANSWER)]):
        raise _malformed("a TLS hello, or a member's answer", data[:16].hex())
    return PipeAnswer(data[len(_ANSWER) : ANSWER_BYTES]) if len(data) >= ANSWER_BYTES else None


def _hello_of(data: bytes) -> TlsHello | None:
    if len(data) < _RECORD_HEAD:
        return None
    size = int.from_bytes(data[3:5])
    if size > OPENING_BYTES_MAX - _RECORD_HEAD:
        raise _malformed(f"a TLS hello of at most {OPENING_BYTES_MAX - _RECORD_HEAD} bytes", str(size))
    body = _Reader(data[_RECORD_HEAD : _RECORD_HEAD + size])
    if len(data) < _RECORD_HEAD + size:
        return None
    if body.number(1) != _CLIENT_HELLO:
        raise _malformed("a TLS hello", "another message of TLS")
    hello = body.part(3)
    hello.skip(2 + 32)  # version, random
    hello.part(1)  # session
    hello.part(2)  # cipher suites
    hello.part(1)  # compression
    name, protocols = "", tuple[str, ...]()
    extensions = hello.part(2)
    while extensions.left:
        kind, value = extensions.number(2), extensions.part(2)
        if kind == _SERVER_NAME:
            name = _name_of(value)
        elif kind == _PROTOCOLS:
            protocols = _protocols_of(value)
    return TlsHello(name, protocols)


def _name_of(value: _Reader) -> str:
    names = value.part(2)
    while names.left:
        kind, name = names.number(1), names.part(2)
        if kind == 0:
            return name.text()
    return ""


def _protocols_of(value: _Reader) -> tuple[str, ...]:
    found, names = list[str](), value.part(2)
    while names.left:
        found.append(names.part(1).text())
    return tuple(found)


class _Reader:
    """Bytes from the front; MalformedMessage where they end too early."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def skip(self, count: int) -> bytes:
        if count > self.left:
            raise _malformed(f"{count} more bytes of a TLS hello", str(self.left))
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.skip(size))

    def part(self, head: int) -> _Reader:
        """What follows its own length."""
        return _Reader(self.skip(self.number(head)))

    def text(self) -> str:
        return self.skip(self.left).decode("ascii", "replace")


def _malformed(expected: str, got: str) -> MalformedMessage:
    return MalformedMessage(f"a caller at the port for byte pipes: expected {expected}, got {got}")
