"""One node's stream as the hub sees it: a bounded queue of orders, and a way to end it.

Guarantees: `send` never blocks; a node that reads so slowly that `limit` orders wait is disconnected and must reconnect, so
that a slow reader costs bounded memory and delays no other node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage, VersionMismatch
from echo2.base.ids import PeerId, RunId
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

Order = TypeVar("Order")


def refusal_of(error: EchoError) -> pb.Refusal:
    """The error as a message: its class name and its text."""
    return pb.Refusal(code=type(error).__name__, message=str(error)[:2000])


def check_protocol(version: int, whose: str) -> None:
    """VersionMismatch for another protocol than this process speaks."""
    if version != PROTOCOL_VERSION:
        text = (
            f"{whose}: expected protocol version {PROTOCOL_VERSION}, got {version}: use one release of echo2 everywhere"
        )
        raise VersionMismatch(text)


def check_hello(first: Any, run_id: RunId, whose: str) -> None:
    """MalformedMessage unless a stream's first message is a hello; VersionMismatch for another protocol or another run."""
    if first.WhichOneof("kind") != "hello":
        raise MalformedMessage(f"{whose}: expected a hello as the first message, got {first.WhichOneof('kind')}")
    check_protocol(first.hello.protocol_version, whose)
    if first.hello.run_id != run_id:
        raise VersionMismatch(f"{whose}: expected run {run_id!r}, got {first.hello.run_id!r}")


class StreamSession(Generic[Order]):
    """`orders`: the orders to write; None ends the stream. `as_order`: turns a refusal into an order."""

    def __init__(self, peer_id: PeerId, limit: int, as_order: Callable[[pb.Refusal], Order]) -> None:
        self.peer_id = peer_id
        self.orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self._limit = limit
        self._as_order = as_order
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def send(self, order: Order) -> None:
        if not self._is_open:
            return
        if self.orders.qsize() >= self._limit:
            self.refuse(LimitExceeded(f"{self.peer_id}: expected at most {self._limit} unread orders; read faster"))
            return
        self.orders.put_nowait(order)

    def refuse(self, error: EchoError) -> None:
        """Ends the stream with the reason. Drops waiting orders, because the node starts anew when it reconnects."""
        if not self._is_open:
            return
        while not self.orders.empty():
            self.orders.get_nowait()
        self.orders.put_nowait(self._as_order(refusal_of(error)))
        self.end()

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self.orders.put_nowait(None)
