"""Encodes the session's actions as frames."""

from __future__ import annotations

from echo2.broadcast.events import Action, SendCancel, SendHave, SendHeader, SendRelayAck, SendRequest, SendSeal
from echo2.broadcast.runtime.library import Library
from echo2.wire import broadcast as wire


def control_frame(action: Action, library: Library) -> bytes | None:
    """The frame of a control message; None if its artifact has been dropped, or the action is not a control message."""
    match action:
        case SendHeader():
            return library.header_frame(action.key)
        case SendSeal():
            return library.seal_frame(action.key)
        case SendHave():
            return wire.have_to_bytes(action.key, action.bitmap, action.is_sealed)
        case SendRequest():
            return wire.request_to_bytes(action.key, action.indices)
        case SendCancel():
            return wire.cancel_to_bytes(action.key, action.indices)
        case SendRelayAck():
            return wire.relay_ack_to_bytes(action.key, action.index, action.backlog)
        case _:
            return None
