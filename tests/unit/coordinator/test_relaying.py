"""The coordinator's relay is told whom it is not to serve."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.runtime.transport_mixed import P2pSettings
from echo2.coordinator.runtime import relay

BANNED = PeerId("banned")


def test_the_relay_asks_who_is_banned_and_tells_who_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[P2pSettings] = []
    met: list[tuple[PeerId, str]] = []

    class Transport:
        def __init__(self, own: object, exchange: object, settings: P2pSettings) -> None:
            made.append(settings)

        async def serve(self) -> int:
            return 7

        def is_piped(self, peer: PeerId) -> bool:
            return peer == BANNED

        async def close(self) -> None: ...

    monkeypatch.setattr(relay, "MixedTransport", Transport)
    served = asyncio.run(
        relay.serve_relay(cast(Any, None), "h", 0, lambda peer: peer == BANNED, lambda *one: met.append(one))
    )
    (settings,) = made
    assert (
        served.port == 7
        and served.is_piped(BANNED)
        and settings.is_barred(BANNED)
        and not settings.is_barred(PeerId("another"))
    )
    settings.proven(BANNED, "a:1")
    assert met == [(BANNED, "a:1")]
