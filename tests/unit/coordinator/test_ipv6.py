"""A coordinator on IPv6 addresses: it listens, its links say where in brackets, and workers join by them. Over real gRPC."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from echo2.base.errors import PortBusy
from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.trust.identity import JoinLink, Role
from echo2.worker.heartbeat import listen_host
from echo2.worker.options import WorkerOptions
from tests.unit.coordinator.test_daemon import Node, options, running


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["[::1]", "::"])
async def test_a_worker_joins_a_coordinator_on_an_ipv6_address(tmp_path: Path, host: str) -> None:
    async with running(options(tmp_path / "first", host=host)) as daemon:
        link = JoinLink.parse(daemon.links[Role.WORKER.value])
        host_told = "127.0.0.1" if host == "::" else "::1"  # `::` takes both, and every machine has the former
        assert link.host == host_told and f"echo2://{joined(host_told, link.port)}/" in str(link)
        node = await Node.join(daemon, Role.WORKER)
        await node.hello()
        await node.close()
        with pytest.raises(PortBusy, match=r"\[::1?\]:"):
            async with running(options(tmp_path / "second", host=host, enrol_port=link.port)):
                pass


def test_hosts_are_joined_with_brackets_once_and_a_worker_listens_where_a_coordinator_on_its_machine_does(
    tmp_path: Path,
) -> None:
    assert joined("::1", 7) == joined("[::1]", 7) == "[::1]:7"
    assert joined("10.0.0.1", 7) == "10.0.0.1:7" and joined("host.example", 7) == "host.example:7"
    hosts = {"::1": "::1", "127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "2001:db8::1": "::"}
    for host, own in hosts.items():
        assert listen_host(WorkerOptions("", tmp_path), JoinLink(host, 8418, PeerId("p"), "t")) == own
