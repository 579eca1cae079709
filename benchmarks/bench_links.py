"""What each kind of link carries, and at which cost: direct gRPC, a punched hole, a relay.

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
from echo2.broadcast.runtime.transport import Connection, way_of
from echo2.broadcast.runtime.transport_grpc import GrpcTransport
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.trust.identity import Identity, Role, TlsKey, certificate_request
from echo2.trust.runtime import tls
from tests.contract.nat_lab import NatLab, reason_unavailable

RESULTS = Path(__file__).parent / "results" / "links.json"
FRAME_BYTES, FRAMES, ROUNDS = 256 << 10, 256, 3
GRPC_PORT, RELAY_PORT = 7100, 7101


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
        await settled(transport)
    say(ready=True)
    begun = cpu_s()
    await asyncio.to_thread(sys.stdin.readline)
    say(cpu_s=cpu_s() - begun)


async def settled(transport: MixedTransport) -> None:
    while not transport.facts.relays:
        await asyncio.sleep(0.05)


async def send(address: str, hub: str, folder: Path) -> None:
    """Dials `address`, host:port or `circuit`, and measures."""
    transport = MixedTransport(credentials_of("left", folder))
    if address == "circuit":
        address = circuit_address(identity_of("hub").peer_id)
        transport.use_relay(identity_of("hub").peer_id, f"{hub}:{RELAY_PORT}")
        await settled(transport)
    connection = await transport.dial(address, identity_of("right").peer_id)
    for _ in range(ROUNDS):
        begun, before = time.perf_counter(), cpu_s()
        for _ in range(FRAMES):
            await connection.send(bytes(FRAME_BYTES))
        await connection.send(b"end")
        answer = json.loads(await connection.receive() or b"{}")
        taken = time.perf_counter() - begun
        say(mb_per_s=FRAMES * FRAME_BYTES / 1e6 / taken, cpu_s=cpu_s() - before + answer["cpu_s"])
    say(way=way_of(connection).kind.value)
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
            public, private = (("hub", "right", "left"), ()) if kind == "direct" else (("hub",), ("left", "right"))
            lab = stack.enter_context(NatLab(public, private, is_symmetric=kind == "relayed"))
            addresses = lab.addresses
        hub, right = addresses["hub"], addresses["right"]
        relay = stack.enter_context(process(lab, "hub", "--serve", "hub", hub, hub, folder))
        ready(relay)
        receiver = stack.enter_context(process(lab, "right", "--serve", "right", right, hub, folder))
        ready(receiver)
        target = f"{right}:{GRPC_PORT}" if kind == "direct" else "circuit"
        with process(lab, "left", "--send", target, hub, folder) as sender:
            assert sender.stdout is not None
            said = [json.loads(line) for line in sender.stdout]
        rounds = [one for one in said if "mb_per_s" in one]
        assert len(rounds) == ROUNDS and said[-1]["way"] == kind, f"expected a link of kind {kind}, got {said}"
        relay_cpu_s = 0.0
        if kind == "relayed":
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
    own = parser.parse_args()
    if own.serve:
        asyncio.run(serve(*own.serve[:3], Path(own.serve[3])))
        return
    if own.send:
        asyncio.run(send(*own.send[:2], Path(own.send[2])))
        return
    missing = reason_unavailable()
    rows: list[dict[str, object]] = []
    bound, _ = direct = measure("direct")
    targets: dict[str, float | None] = {"direct": None, "hole-punched": 20.0, "relayed": 8.0}
    print(f"{'kind':<14}{'MB/s':>8}{'of direct':>11}{'target':>8}{'CPU s / GiB':>13}")
    for kind, target in targets.items():
        if missing and kind != "direct":
            print(f"{kind:<14} not measured: {missing}")
            continue
        rate, cost = direct if kind == "direct" else measure(kind)
        print(f"{kind:<14}{rate:>8.1f}{rate / bound:>11.2f}{target or '-':>8}{cost:>13.1f}")
        rows.append(
            {"name": f"{kind}, MB/s", "value": round(rate, 1), "unit": "MB/s", "target": target, "better": "higher"}
        )
        rows.append(
            {"name": f"{kind}, CPU", "value": round(cost, 1), "unit": "s/GiB", "target": None, "better": "lower"}
        )
    if not missing:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
