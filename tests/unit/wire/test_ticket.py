"""Lease tickets: what the coordinator signed is accepted, anything else is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import BadSignature, EchoError, MalformedMessage, NotAllowed
from echo2.base.ids import GroupId, LeaseId, RunId
from echo2.trust.identity import Identity
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.ticket import Ticket, sign_ticket, verify_ticket

COORDINATOR = Identity.generate()
WORKER = Identity.generate()
RUN = RunId("a-run")
TICKET = Ticket(LeaseId("lease-1"), GroupId("group-1"), WORKER.peer_id, 1, 1e9, RUN)

ids = st.text("abc-123", min_size=1, max_size=40)


@given(lease=ids, group=ids, attempt=st.integers(1, 1 << 20), deadline=st.floats(0, 1e12))
def test_signed_ticket_comes_back_whole(lease: str, group: str, attempt: int, deadline: float) -> None:
    ticket = Ticket(LeaseId(lease), GroupId(group), WORKER.peer_id, attempt, deadline, RUN)
    wire = sign_ticket(ticket, COORDINATOR).SerializeToString()
    message = rollout_pb2.LeaseTicket.FromString(wire)
    assert verify_ticket(message, RUN, COORDINATOR.peer_id, WORKER.peer_id) == ticket


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_refused(at: int, flip: int) -> None:
    wire = bytearray(sign_ticket(TICKET, COORDINATOR).SerializeToString())
    wire[at % len(wire)] ^= flip
    try:
        message = rollout_pb2.LeaseTicket.FromString(bytes(wire))
    except Exception:  # noqa: BLE001 - protobuf's decoder refused it first
        return
    with pytest.raises(EchoError):
        verify_ticket(message, RUN, COORDINATOR.peer_id, WORKER.peer_id)


def test_forger_other_run_and_other_worker_are_refused() -> None:
    forged = sign_ticket(TICKET, WORKER)
    with pytest.raises(BadSignature, match="expected the signature of the coordinator"):
        verify_ticket(forged, RUN, COORDINATOR.peer_id, WORKER.peer_id)
    good = sign_ticket(TICKET, COORDINATOR)
    with pytest.raises(NotAllowed, match="expected a ticket of run other"):
        verify_ticket(good, RunId("other"), COORDINATOR.peer_id, WORKER.peer_id)
    with pytest.raises(NotAllowed, match="granted to"):
        verify_ticket(good, RUN, COORDINATOR.peer_id, COORDINATOR.peer_id)
    with pytest.raises(MalformedMessage):
        verify_ticket(rollout_pb2.LeaseTicket(), RUN, COORDINATOR.peer_id, WORKER.peer_id)
