"""The coordinator's relay is told whom it is not to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.nat import reach
from echo2.broadcast.nat.reach import HostOptions
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.trust.identity import Role
from tests.unit.coordinator.test_daemon import Node, options, running


async def test_the_relay_serves_who_is_not_banned_and_says_where_it_met_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[HostOptions] = []

    class Relaying:
        def __init__(self, own: Any) -> None: ...

        async def serve(self, options: HostOptions) -> int:
            served.append(options)
            return 7

        async def close(self) -> None: ...

    monkeypatch.setattr(reach, "Nat", Relaying)

    async with running(options(tmp_path, advertise="192.0.2.9")) as daemon:
        hub = daemon.hub
        assert hub is not None and hub.relay_address == "192.0.2.9:7"
        link = daemon.links["worker"].replace("192.0.2.9", "127.0.0.1")
        daemon.links["worker"] = link
        worker = await Node.join(daemon, Role.WORKER)
        worker.credentials.coordinator_address = daemon.services_address.replace("192.0.2.9", "127.0.0.1")
        worker = Node(worker.credentials)
        await worker.hello()
        peer_id, (settings,) = worker.credentials.peer_id, served
        assert not settings.is_barred(peer_id) and not settings.is_barred(PeerId("another"))
        hub.set_worker(peer_id, OperatorSetting.BANNED, "it lies")
        assert settings.is_barred(peer_id)
        settings.proven(peer_id, "198.51.100.7:1")
        while not hub.proven.of(peer_id, hub.clock.now()):
            await worker.read()
