"""What each kind of link carries, and at which cost: direct gRPC, a bulk connection, a punched hole, a relay by libp2p and by
a byte pipe.

Real processes in network namespaces, two of them behind NATs of their own (tests/contract/nat_lab.py); 64 MiB in frames
of 256 KiB from one to the other, median of three. Without root or nftables the direct row alone is measured, on
loopback.

    python -m benchmarks.bench_links
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from echo2.base.ids import RunId
from echo2.broadcast.reachability import circuit_address
from echo2.broadcast.relay_book import RelayBook, RelayLimits
from echo2.broadcast.runtime.pipe_member import PipeMember
from echo2.broadcast.runtime.transport import Connection, way_of
from echo2.broadcast.runtime.transport_bulk import BulkTransport
from echo2.broadcast.runtime.transport_grpc import GrpcTransport
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.trust.identity import Identity, Role, TlsKey, certificate_request
from echo2.trust.runtime import tls
from tests.contract.nat_lab import NatLab, reason_unavailable

RESULTS = Path(__file__).parent / "results" / "links.json"
DIRECT, RELAYED = ("direct", "bulk"), ("relayed", "byte pipe")
FRAME_BYTES, FRAMES, ROUNDS = 256 << 10, 256, 3
GRPC_PORT, RELAY_PORT, BULK_PORT = 7100, 7101, 7103


def identity_of(name: str) -> Identity:
    return Identity.from_private_bytes(name.encode().ljust(32, b"."))


def credentials_of(name: str, folder: Path) -> tls.Credentials:
    authority = tls.load_or_create_authority(folder / "authority", identity_of("hub"), RunId("bench"))
    identity, key = identity_of(name), TlsKey.generate()
    issued = authority.issue(certificate_request(identity, key), Role.WORKER, time.time())
    hub = identity_of("hub").peer_id
    return tls.Credentials(identity, key.to_pem(), issued, authority.certificate_pem, authority.run_id, hub, "")


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def take(connection: Connection) -> None:
    """Answers each round's last frame with what it cost this side."""
    before = cpu_s()
    while (frame := await connection.receive()) is not None:
        if frame == b"end":
            await connection.send(json.dumps({"cpu_s": cpu_s() - before}).encode())
            before = cpu_s()


async def serve(name: str, address: str, hub: str, folder: Path) -> None:
    """A relay (`hub`), or a receiver that can be met over gRPC and at the hub."""
    credentials = credentials_of(name, folder)
    transport = MixedTransport(credentials, take)
    if name == "hub":
        await transport.serve(P2pSettings(address, RELAY_PORT, book=RelayBook(RelayLimits())))
    else:
        transport.use_relay(identity_of("hub").peer_id, f"{hub}:{RELAY_PORT}")
        grpc_side, server = GrpcTransport(credentials), tls.new_server()
        grpc_side.add_to_server(server, take)
        tls.bind_server(server, f"{address}:{GRPC_PORT}", tls.server_credentials(credentials))
        await server.start()
        bulk = BulkTransport(credentials)
        bulk.listen(address, BULK_PORT, take)
        pipes = PipeMember(bulk.dial, lambda raw, host: bulk.take(raw, host, take))
        pipes.keep(transport.pipes)
        await settled(transport)
        while not pipes.held:
            await asyncio.sleep(0.05)
    say(ready=True)
    begun = cpu_s()
    await asyncio.to_thread(sys.stdin.readline)
    say(cpu_s=cpu_s() - begun)


async def settled(transport: MixedTransport) -> None:
    while not transport.facts.relays:
        await asyncio.sleep(0.05)


async def send(address: str, hub: str, folder: Path) -> None:
    """Dials `address`, host:port, `circuit` or `bulk` and host:port, and measures."""
    transport, bulk = MixedTransport(credentials_of("left", folder)), BulkTransport(credentials_of("left", folder))
    is_bulk = address.startswith("bulk ")
    if address == "circuit":
        address = circuit_address(identity_of("hub").peer_id)
        transport.use_relay(identity_of("hub").peer_id, f"{hub}:{RELAY_PORT}")
        await settled(transport)
    peer = identity_of("right").peer_id
    if is_bulk:
        host, _, port = address.removeprefix("bulk ").rpartition(":")
        connection: Connection = await bulk.dial(host, int(port), peer)
    else:
        connection = await transport.dial(address, peer)
    for _ in range(ROUNDS):
        begun, before = time.perf_counter(), cpu_s()
        for _ in range(FRAMES):
            await connection.send(bytes(FRAME_BYTES))
        await connection.send(b"end")
        answer = json.loads(await connection.receive() or b"{}")
        taken = time.perf_counter() - begun
        say(mb_per_s=FRAMES * FRAME_BYTES / 1e6 / taken, cpu_s=cpu_s() - before + answer["cpu_s"])
    say(way="" if is_bulk else way_of(connection).kind.value)
    await transport.close()


@contextmanager
def process(lab: NatLab | None, host: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.bench_links", *argv]
    made = subprocess.Popen(
        lab.command(host, command) if lab else command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait()


def ready(one: subprocess.Popen[str]) -> None:
    assert one.stdout is not None
    assert json.loads(one.stdout.readline() or "{}").get("ready"), "a process ended before it listened"


def measure(kind: str) -> tuple[float, float]:
    """MB/s, and CPU seconds per GiB of all processes together."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        lab, addresses = None, {"hub": "127.0.0.1", "right": "127.0.0.1"}
        if not reason_unavailable():
            public, private = (("hub", "right", "left"), ()) if kind in DIRECT else (("hub",), ("left", "right"))
            lab = stack.enter_context(NatLab(public, private, is_symmetric=kind in RELAYED))
            addresses = lab.addresses
        hub, right = addresses["hub"], addresses["right"]
        relay = stack.enter_context(process(lab, "hub", "--serve", "hub", hub, hub, folder))
        ready(relay)
        receiver = stack.enter_context(process(lab, "right", "--serve", "right", right, hub, folder))
        ready(receiver)
        target = {
            "direct": f"{right}:{GRPC_PORT}", "bulk": f"bulk {right}:{BULK_PORT}", "byte pipe": f"bulk {hub}:{RELAY_PORT + 1}"
        }.get(kind, "circuit")  # fmt: skip
        with process(lab, "left", "--send", target, hub, folder) as sender:
            assert sender.stdout is not None
            said = [json.loads(line) for line in sender.stdout]
        rounds = [one for one in said if "mb_per_s" in one]
        assert len(rounds) == ROUNDS and said[-1]["way"] in ("", kind), f"expected a link of kind {kind}, got {said}"
        relay_cpu_s = 0.0
        if kind in RELAYED:
            assert relay.stdin is not None and relay.stdout is not None
            relay.stdin.write("\n")
            relay.stdin.flush()
            relay_cpu_s = json.loads(relay.stdout.readline())["cpu_s"] / ROUNDS
        per_gib = (1 << 30) / (FRAMES * FRAME_BYTES)
        cost = (statistics.median(one["cpu_s"] for one in rounds) + relay_cpu_s) * per_gib
        return statistics.median(one["mb_per_s"] for one in rounds), cost


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=4)
    parser.add_argument("--send", nargs=3)
    parser.add_argument("--only", default="", help="kinds, by commas; their rows replace the old ones")
    own = parser.parse_args()
    if own.serve:
        asyncio.run(serve(*own.serve[:3], Path(own.serve[3])))
        return
    if own.send:
        asyncio.run(send(*own.send[:2], Path(own.send[2])))
        return
    missing = reason_unavailable()
    rows: list[dict[str, object]] = []
    chosen = own.only.split(",") if own.only else []
    bound, _ = direct = measure("direct")
    targets: dict[str, float | None] = {
        "direct": None, "bulk": None, "hole-punched": 20.0, "relayed": None, "byte pipe": 60.0
    }  # fmt: skip
    print(f"{'kind':<14}{'MB/s':>8}{'of direct':>11}{'target':>8}{'CPU s / GiB':>13}")
    for kind, target in targets.items():
        if chosen and kind not in chosen:
            continue
        if missing and kind != "direct":
            print(f"{kind:<14} not measured: {missing}")
            continue
        rate, cost = direct if kind == "direct" else measure(kind)
        print(f"{kind:<14}{rate:>8.1f}{rate / bound:>11.2f}{target or '-':>8}{cost:>13.1f}")
        rows.append(
            {"name": f"{kind}, MB/s", "value": round(rate, 1), "unit": "MB/s", "target": target, "better": "higher"}
        )
        rows.append(
            {
                "name": f"{kind}, CPU",
                "value": round(cost, 1),
                "unit": "s/GiB",
                "target": 8.0 if kind == "byte pipe" else None,
                "better": "lower",
            }
        )
    if not missing:
        keep(rows)


def keep(rows: list[dict[str, object]]) -> None:
    """A row replaces that of its name."""
    found = {row["name"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    found.update({row["name"]: row for row in rows})
    RESULTS.write_text(json.dumps(list(found.values()), indent=1) + "\n")


if __name__ == "__main__":
    main()
