"""One node's stream as the hub sees it: a bounded queue of orders, and a way to end it.

Guarantees: `send` never blocks; a node that reads so slowly that `limit` orders wait is disconnected and must reconnect, so
that a slow reader costs bounded memory and delays no other node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from echo2.base.errors import ConfigError, EchoError, LimitExceeded, VersionMismatch
from echo2.base.ids import PeerId, RunId
from echo2.coordinator.fleet.members import Activation, Member
from echo2.coordinator.leases.events import Grant
from echo2.coordinator.planning.board import LearnerBoard
from echo2.coordinator.planning.telemetry import WorkerHello
from echo2.trust.identity import Identity
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import Ticket, group_to_message, sign_ticket

Order = TypeVar("Order")


def refusal_of(error: EchoError) -> pb.Refusal:
    """The error as a message: its class name and its text."""
    return pb.Refusal(code=type(error).__name__, message=str(error)[:2000])


def check_hello(run_id: RunId, whose: str, protocol_version: int, theirs: str) -> None:
    """VersionMismatch for another protocol or another run."""
    if protocol_version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{whose}: expected protocol version {PROTOCOL_VERSION}, got {protocol_version}: use one release of "
            "echo2 everywhere"
        )
    if theirs != run_id:
        raise VersionMismatch(f"{whose}: expected run {run_id!r}, got {theirs!r}")


def check_quantisation(hello: WorkerHello, is_allowed: bool) -> None:
    """ConfigError for a worker that generates with quantised weights in a run that does not allow it."""
    if hello.quantisation and not is_allowed:
        raise ConfigError(
            f"worker {hello.name}: expected weights as they are published, it generates by {hello.quantisation} "
            "(worker.quantisation); a run allows that by worker.quantisation in its own file"
        )


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
        """False once it was ended or refused."""
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
        """Ends the stream after the waiting orders."""
        if self._is_open:
            self._is_open = False
            self.orders.put_nowait(None)


def order_of(grant: Grant, run_id: RunId, identity: Identity) -> pb.WorkerOrder:
    """The order for a grant. `identity`: the coordinator's, which signs the ticket."""
    ticket = Ticket(grant.lease_id, grant.group.group_id, grant.worker_id, grant.attempt, grant.deadline, run_id)
    return pb.WorkerOrder(
        lease_grant=pb.LeaseGrant(
            ticket=sign_ticket(ticket, identity),
            group=group_to_message(grant.group),
            is_continuation=grant.is_continuation,
            is_renewal=grant.is_renewal,
        )
    )


def whereabouts_of(board: LearnerBoard) -> pb.LearnerWhereabouts | None:
    """The learner's address and model; None before the first learner has connected."""
    hello = board.hello
    if hello is None:
        return None
    return pb.LearnerWhereabouts(
        peer_id=board.peer_id, address=board.address, chunk_address=board.chunk_address, model_name=hello.model_name,
        model_config_json=hello.model_config_json, model_digest=hello.model_digest,
        newest_version=board.newest_version, relay_address=hello.relay_address,
        longest_sequence_tokens=hello.longest_sequence_tokens, full_snapshot_bytes=hello.full_snapshot_bytes,
    )  # fmt: skip


def barring_of(member: Member) -> pb.LearnerOrder:
    """The order that tells the learner whether this worker is barred now, and why."""
    is_lifted = not member.activation.is_barred
    banned = pb.WorkerBanned(
        peer_id=member.peer_id,
        reason=member.setting_reason,
        is_lifted=is_lifted,
        is_banned=member.activation is Activation.BANNED,
    )
    return pb.LearnerOrder(banned=banned)
