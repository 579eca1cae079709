"""Byte streams between nodes, encrypted and authenticated both ways. Two implementations: TLS on sockets, and the simulator's.

Every implementation guarantees: bytes arrive in order; nothing of a peer is passed on before both certificates were checked
against the run's authority; a dialler reaches exactly the node that it names; what was written before `close` goes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from echo2.outside.net import Shown

Remote = tuple[str, int]  # the other end of a connection: its address (IPv4-mapped ones as plain IPv4) and its port


class Stream(Protocol):
    """A transport of asyncio is one."""

    def write(self, data: bytes | memoryview) -> None:
        """Takes all of it; the reader is asked to pause writing while much is unsent."""
        ...

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        """Takes all of them; the first can be read before anything of the second has come."""
        ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool: ...

    def close(self) -> None:
        """What was written goes out; nothing more is read."""
        ...

    def abort(self) -> None:
        """At once; what was written may be lost."""
        ...


class StreamReader(Protocol):
    """What takes a stream's bytes. `missing_bytes`: of the message that has begun, so that the reader is woken for whole ones."""

    def connection_made(self, stream: Stream, remote: Remote, certificate: bytes) -> None:
        """The handshake is done. `remote`: port 0 if there is no such end. `certificate`: the peer's, in DER, its issuer checked;
        empty if the peer has proven otherwise who it is."""
        ...

    def get_buffer(self, sizehint: int) -> memoryview: ...

    def buffer_updated(self, nbytes: int) -> None: ...

    @property
    def missing_bytes(self) -> int: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def worked(self, seconds: float, records: int, nbytes: int) -> None:
        """A read of so many bytes, in so many records, took so long."""
        ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class StreamCaller(Protocol):
    """Somebody who has connected and has not proven who it is."""

    @property
    def host(self) -> str: ...

    async def shake_hands(self, reader: StreamReader, shown: Shown, within_s: float) -> None:
        """OSError if the handshake fails or takes longer."""
        ...

    def close(self) -> None: ...


class StreamListener(Protocol):
    @property
    def port(self) -> int: ...

    async def accept(self) -> StreamCaller:
        """The next caller. OSError if it was gone before, or no descriptor is free."""
        ...

    def close(self) -> None: ...
