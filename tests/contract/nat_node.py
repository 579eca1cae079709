"""One node of test_nat.py: ROLE NAME ADDRESSES HUB_ADDRESS FOLDER. Writes what it sees as JSON lines, reads commands.

Between addresses there is a comma.

The hub is the coordinator's part of it: run authority, relay, and the plan from what the workers found out, which it
keeps in files of the folder that all namespaces share. The broadcast, its transports and the rules are the real ones.
"""

import asyncio
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.catch_up import ArtifactSealed
from echo2.broadcast.nat.reach import HostOptions, Nat
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.broadcast.plan import NodeLink
from echo2.broadcast.reachability import Access, LinkKind
from echo2.broadcast.trees import plan
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, TlsKey, certificate_request
from echo2.wire.broadcast import access_from_message
from echo2.worker.heartbeat import reach_of

NAMES = ("hub", "learner", "left", "right")
PORT, RELAY_PORT = 7000, 7001
BLOCK_BYTES, BLOCKS = 256 << 10, 16
LOOK_S = 0.2


def say(kind: str, **values: object) -> None:
    print(json.dumps({"kind": kind, **values}), flush=True)


def identity_of(name: str) -> Identity:
    return Identity.from_private_bytes(name.encode().ljust(32, b"."))


PEERS: dict[str, PeerId] = {name: identity_of(name).peer_id for name in NAMES}
NAME_OF = {peer: name for name, peer in PEERS.items()}


def credentials_of(name: str, role: Role, folder: Path) -> tls.Credentials:
    authority = tls.load_or_create_authority(folder / "authority", identity_of("hub"), RunId("nat"))
    identity, key = identity_of(name), TlsKey.generate()
    certificate = authority.issue(certificate_request(identity, key), role, time.time())
    return tls.Credentials(
        identity, key.to_pem(), certificate, authority.certificate_pem, authority.run_id, PEERS["hub"], ""
    )


def of_family(addresses: Sequence[str], own: str) -> str:
    """One that a node with `own` addresses can dial; the first where there is none."""
    has_4 = any("[" not in one for one in own.split(","))
    return next((one for one in addresses if ("[" not in one) == has_4), addresses[0])


async def hub(folder: Path) -> None:
    relay = Nat(credentials_of("hub", Role.COORDINATOR, folder))
    await relay.serve(HostOptions("::", RELAY_PORT))
    say("ready", peer_id=PEERS["hub"])
    await asyncio.Event().wait()


def outer_port(folder: Path, name: str) -> int:
    """As a worker's --advertise says it: a file of the test's, where it mapped a port."""
    path = folder / f"{name}.advertise"
    return int(path.read_text()) if path.exists() else PORT


def is_hidden(folder: Path, name: str) -> bool:
    """Of the learner: whether it is behind a NAT, as the coordinator finds when it dials back."""
    return (folder / f"{name}.hidden").exists()


def outer_address(folder: Path, name: str, own: str) -> str:
    """Of a learner with a mapped port that of its router, as learner.advertise says it."""
    path = folder / f"{name}.outer"
    return path.read_text() if path.exists() else own


def access_of(folder: Path, name: str) -> Access | None:
    path = folder / f"{name}.access"
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    return Access(**{key: value if isinstance(value, str) else tuple(value) for key, value in fields.items()})


async def follow_plans(node: BroadcastNode, folder: Path) -> None:
    """As the coordinator plans: a new plan whenever somebody is met differently. All compute the same one."""
    known: tuple[Access | None, ...] = ()
    while True:
        found = tuple(access_of(folder, name) for name in NAMES[1:])
        if None not in found and found != known:
            known = found
            nodes = [
                NodeLink(
                    PEERS[name], name, access.addresses, 50e6, 100e6, 0.001, dataclasses.replace(access, addresses=())
                )
                for name, access in zip(NAMES[1:], found, strict=True)
                if access is not None
            ]
            epoch = int(sum(len(access.met) + len(access.relays) * 4 for access in found if access is not None)) + 1
            made = plan(nodes, epoch)
            node.set_plan(made)
            say("plan", topology=made.topology, epoch=epoch)
        await asyncio.sleep(LOOK_S)


async def tell(node: BroadcastNode, name: str, address: str, folder: Path) -> None:
    """What a worker's heartbeat says, here by way of a file."""
    while True:
        links = {NAME_OF[link.peer_id]: link for link in node.stats().links}
        say("links", **{peer: str(link.way) for peer, link in links.items()})
        say("received", **{peer: link.received_bytes for peer, link in links.items()})
        facts = node.nat.facts
        met = tuple(PEERS[p] for p, link in links.items() if link.way.kind is LinkKind.HOLE_PUNCHED)
        own = tuple(f"{one}:{outer_port(folder, name)}" for one in outer_address(folder, name, address).split(","))
        at = () if is_hidden(folder, name) else own
        access = Access(at) if name == "learner" else None
        if name != "learner" and facts.is_reachable is not None:
            say("facts", is_reachable=facts.is_reachable, public_host=facts.public_host, relays=list(facts.relays))
            reach = reach_of(facts, list(own), outer_port(folder, name), PEERS["hub"])
            assert reach is not None, "the relay has said"
            hidden = access_from_message(reach.access)
            access = dataclasses.replace(hidden, addresses=tuple(reach.addresses), met=met)
        if access is not None:
            temporary = folder / f"{name}.access.new"
            temporary.write_text(json.dumps(dataclasses.asdict(access)))
            temporary.replace(folder / f"{name}.access")
        await asyncio.sleep(LOOK_S)


async def consume(node: BroadcastNode) -> None:
    async for step in node.progress():
        if isinstance(step, ArtifactSealed):
            say("version", version=step.artifact.version, fingerprint=step.fingerprint)


async def obey(node: BroadcastNode) -> None:
    lines: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().split():
        if line[0] == "publish":
            version = int(line[1])
            blocks = iter([bytes([version, number]) * (BLOCK_BYTES // 2) for number in range(BLOCKS)])
            await node.publish(ArtifactId(Version(version), None), blocks, lambda: "whole", BLOCKS * BLOCK_BYTES)
        elif line[0] == "ban":
            node.exchange.accuse(PEERS[line[1]], "the test says so", is_ban=True)
        elif line[0] == "relay":
            node.nat.use_relay(PEERS["learner"], f"{line[1]}:{RELAY_PORT}")


async def node(role: str, name: str, address: str, hub_address: str, folder: Path) -> None:
    credentials = credentials_of(name, Role(role), folder)
    nat = HostOptions(own_port=outer_port(folder, name))
    options = NodeOptions(folder / f"{name}-chunks", chunk_bytes=64 << 10, host="::", port=PORT, nat=nat)
    made = BroadcastNode(credentials, options)
    made.listen()
    await made.start()
    if role == "learner":
        await made.nat.serve(HostOptions("::", RELAY_PORT))
        made.nat.hold_pipe_place(PEERS["hub"], f"{hub_address}:{RELAY_PORT}")
    else:
        made.nat.use_relay(PEERS["hub"], f"{hub_address}:{RELAY_PORT}")
        learner = access_of(folder, "learner")
        while learner is None:
            await asyncio.sleep(LOOK_S)
            learner = access_of(folder, "learner")
        pipes = f"{hub_address}:{RELAY_PORT + 1}"
        made.set_publisher(PEERS["learner"], learner.addresses[0] if learner.addresses else pipes)
        if learner.addresses and not (folder / "learner.late").exists():
            there = of_family(learner.addresses, address)
            made.nat.use_relay(PEERS["learner"], f"{there.rpartition(':')[0]}:{RELAY_PORT}")
    say("ready", peer_id=PEERS[name])
    parts = [follow_plans(made, folder), tell(made, name, address, folder), obey(made)]
    await asyncio.gather(*parts, *([consume(made)] if role != "learner" else []))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s", stream=sys.stdout)
    role, name, address, hub_address, folder = sys.argv[1:]
    asyncio.run(hub(Path(folder)) if role == "hub" else node(role, name, address, hub_address, Path(folder)))


if __name__ == "__main__":
    main()
