"""What each kind of link carries, and at which cost: direct, over a punched hole, through a relay's byte pipe.

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
from echo2.broadcast.connection import Connection
from echo2.broadcast.nat.pipes import PipeMember
from echo2.broadcast.nat.reach import HostOptions, Nat
from echo2.broadcast.transport import Transport
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, TlsKey, certificate_request
from tests.contract.nat_lab import NatLab, reason_unavailable

RESULTS = Path(__file__).parent / "results" / "links.json"
DIRECT, RELAYED = ("direct",), ("byte pipe",)
FRAME_BYTES, FRAMES, ROUNDS = 256 << 10, 256, 3
PORT, RELAY_PORT = 7100, 7101


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
    """A relay (`hub`), or a receiver that can be dialled and be met at the hub."""
    credentials = credentials_of(name, folder)
    nat = Nat(credentials, take)
    if name == "hub":
        await nat.serve(HostOptions(address, RELAY_PORT))
    else:
        nat.use_relay(identity_of("hub").peer_id, f"{hub}:{RELAY_PORT}")
        transport = Transport(credentials)
        transport.listen(address, PORT)
        transport.serve(take)
        pipes = PipeMember(transport.dial, lambda caller, way: transport.take(caller, take, way))
        pipes.keep(nat.pipes)
        await settled(nat)
        while not pipes.held:
            await asyncio.sleep(0.05)
    say(ready=True)
    begun = cpu_s()
    await asyncio.to_thread(sys.stdin.readline)
    say(cpu_s=cpu_s() - begun)


async def settled(nat: Nat) -> None:
    while not nat.facts.relays:
        await asyncio.sleep(0.05)


async def send(address: str, hub: str, folder: Path) -> None:
    """Connects to `address`, host:port or `hole`, and measures."""
    credentials, peer = credentials_of("left", folder), identity_of("right").peer_id
    punched: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def accept(connection: Connection) -> None:
        punched.set_result(connection)
        await done.wait()

    nat, connection = Nat(credentials, accept), None
    if address == "hole":
        nat.use_relay(identity_of("hub").peer_id, f"{hub}:{RELAY_PORT}")
        await settled(nat)
        nat.punch(peer, identity_of("hub").peer_id)
        connection = await asyncio.wait_for(punched, 60)
    else:
        connection = await Transport(credentials).dial(address, peer)
    for _ in range(ROUNDS):
        begun, before = time.perf_counter(), cpu_s()
        for _ in range(FRAMES):
            await connection.send(bytes(FRAME_BYTES))
        await connection.send(b"end")
        answer = json.loads(await connection.receive() or b"{}")
        taken = time.perf_counter() - begun
        say(mb_per_s=FRAMES * FRAME_BYTES / 1e6 / taken, cpu_s=cpu_s() - before + answer["cpu_s"])
    done.set()
    await nat.close()


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
        target = {"direct": f"{right}:{PORT}", "byte pipe": f"{hub}:{RELAY_PORT + 1}", "hole-punched": "hole"}[kind]
        with process(lab, "left", "--send", target, hub, folder) as sender:
            assert sender.stdout is not None
            said = [json.loads(line) for line in sender.stdout]
        rounds = [one for one in said if "mb_per_s" in one]
        assert len(rounds) == ROUNDS, f"expected a link of kind {kind}, got {said}"
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
        name, address, hub, folder = own.serve
        asyncio.run(serve(name, address, hub, Path(folder)))
        return
    if own.send:
        address, hub, folder = own.send
        asyncio.run(send(address, hub, Path(folder)))
        return
    missing = reason_unavailable()
    rows: list[dict[str, object]] = []
    chosen = own.only.split(",") if own.only else []
    bound, _ = direct = measure("direct")
    targets: dict[str, float | None] = {"direct": None, "hole-punched": 20.0, "byte pipe": 60.0}
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
