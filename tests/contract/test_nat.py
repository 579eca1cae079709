"""A run through NATs, with real processes in network namespaces: who meets whom how, and what happens to them then."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contract.nat_lab import Families, NatKind, NatLab, reason_unavailable
from tests.patience import WAIT_S

pytestmark = pytest.mark.network_namespaces
GRPC_PORT, OUTER_PORT = 7000, 41873
_NODE = str(Path(__file__).with_name("nat_node.py"))


@dataclass
class Node:
    """A process of nat_node.py; `seen` holds the newest of each kind of line that it wrote."""

    process: subprocess.Popen[str]
    log: Path
    seen: dict[str, dict[str, object]] = field(default_factory=dict)

    def look(self) -> None:
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                self.seen[said["kind"]] = said

    def story(self) -> str:
        """The log, without lines that say again what one said before."""
        lines = [line for line in self.log.read_text().splitlines() if '"received"' not in line]
        return "\n".join(dict.fromkeys(lines))[-4000:]

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()


class Run:
    """A hub (relay, and maker of the plan), a learner and two workers, in a lab."""

    def __init__(self, lab: NatLab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.nodes: dict[str, Node] = {}

    def start(self, name: str, role: str) -> Node:
        log = self.folder / f"{name}.log"
        argv = [
            sys.executable,
            _NODE,
            role,
            name,
            ",".join(at[name] for at in (self.lab.addresses, self.lab.addresses_6) if name in at),
            self.lab.address("hub", name),
            str(self.folder),
        ]
        with log.open("w") as out:
            process = subprocess.Popen(
                self.lab.command(name, argv), stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, text=True
            )
        self.nodes[name] = Node(process, log)
        return self.nodes[name]

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for node in self.nodes.values():
                node.look()
            if holds():
                return
            time.sleep(0.1)
        logs = "\n".join(f"--- {name}\n{node.story()}" for name, node in self.nodes.items())
        pytest.fail(f"expected {what} within {WAIT_S:.0f} s\n{logs}")

    def link(self, name: str, peer: str) -> str:
        """How `name` says it is connected to `peer`: kind and reason."""
        links = self.nodes[name].seen.get("links", {})
        return str(links.get(peer, "")) if isinstance(links, dict) else ""

    def version(self, name: str) -> int:
        return int(str(self.nodes[name].seen.get("version", {}).get("version", 0)))

    def topology(self, name: str) -> str:
        return str(self.nodes[name].seen.get("plan", {}).get("topology", "star"))

    def publish(self, version: int) -> None:
        self.nodes["learner"].say(f"publish {version}")

    def from_peer(self, name: str, peer: str) -> int:
        """Bytes that `name` has received from `peer`."""
        received = self.nodes[name].seen.get("received", {})
        return int(str(received.get(peer, 0)))

    def close(self) -> None:
        for node in self.nodes.values():
            node.process.kill()
            node.process.wait()
            if node.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    node.process.stdin.close()


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    is_symmetric: bool = False,
    mapped: str = "",
    named: tuple[str, ...] = (),
    hidden: tuple[str, ...] = ("left", "right"),
    kinds: Mapping[str, NatKind] | None = None,
    families: Mapping[str, Families] | None = None,
) -> Iterator[Run]:
    """`mapped`: port OUTER_PORT of its router goes to its own; `named`: these advertise that port; `hidden`: these are behind
    routers; `kinds`, `families`: as of NatLab."""
    if reason := reason_unavailable():
        pytest.skip(reason)
    public = tuple(name for name in ("hub", "learner", "left", "right") if name not in hidden)
    with NatLab(public, hidden, is_symmetric=is_symmetric, kinds=kinds, families=families) as lab:
        run = Run(lab, folder)
        for name in {*hidden, *(kinds or {})} - {mapped}:
            (folder / f"{name}.hidden").touch()
        if mapped:
            outer = lab.map_port(mapped, OUTER_PORT, GRPC_PORT)
            (folder / f"{mapped}.outer").write_text(outer.rpartition(":")[0])
        for name in named:
            (folder / f"{name}.advertise").write_text(str(OUTER_PORT))
        try:
            run.start("hub", "hub")
            run.wait("the hub to listen", lambda: "ready" in run.nodes["hub"].seen)
            for name, role in (("learner", "learner"), ("left", "worker"), ("right", "worker")):
                run.start(name, role)
            run.wait("all to join", lambda: all("ready" in node.seen for node in run.nodes.values()))
            yield run
        finally:
            run.close()


def test_workers_behind_two_nats_punch_a_hole_and_pass_chunks_through_it(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.wait("a hole-punched link", lambda: run.link("left", "right").startswith("hole-punched: "))
        run.wait("the same at the other end", lambda: run.link("right", "left").startswith("hole-punched: "))
        run.wait("links to the learner", lambda: run.link("left", "learner") == "direct: we dialled it")
        assert run.link("learner", "left") == "reverse: it dialled us"
        assert run.nodes["left"].seen["facts"]["is_reachable"] is False
        run.wait("trees over the hole", lambda: run.topology("left") == run.topology("learner") != "star")
        run.publish(1)
        run.wait("version 1 at both", lambda: run.version("left") == run.version("right") == 1)
        run.wait(
            "chunks between the two",
            lambda: max(run.from_peer("left", "right"), run.from_peer("right", "left")) > 1 << 20,
        )
        run.nodes["hub"].process.send_signal(signal.SIGKILL)
        run.publish(2)
        run.wait("version 2 without the relay", lambda: run.version("left") == run.version("right") == 2)
        assert run.link("left", "right").startswith("hole-punched: "), "the relay has no part in it any more"


def test_where_no_hole_can_be_punched_the_relay_carries_and_another_takes_over(tmp_path: Path) -> None:
    (tmp_path / "learner.late").touch()  # which of two relays they meet at first would be a race
    with running(tmp_path, is_symmetric=True) as run:
        run.wait("a relayed link", lambda: run.link("left", "right").startswith("relayed: "))
        hub, learner = (str(run.nodes[name].seen["ready"]["peer_id"]) for name in ("hub", "learner"))
        assert hub in run.link("left", "right"), "the reason names the relay"
        for one, other in (("left", "right"), ("right", "left")):
            run.wait(
                "a byte pipe", lambda one=one, other=other: run.link(one, other).endswith(f"byte pipe of relay {hub}")
            )
        run.publish(1)
        run.wait("version 1 at both", lambda: run.version("left") == run.version("right") == 1)
        before = run.from_peer("left", "right") + run.from_peer("right", "left")
        assert before > 0, "what each holds is told over the relayed link"
        for one in ("left", "right"):
            run.nodes[one].say(f"relay {run.lab.address('learner', one)}")
        # The learner serves one worker only: the other has nobody but its hidden peer.
        run.nodes["learner"].say("ban right")
        run.publish(2)
        run.wait("version 2 through the relay", lambda: run.version("left") == run.version("right") == 2)
        assert run.from_peer("right", "left") - before > 1 << 20
        run.nodes["hub"].process.send_signal(signal.SIGKILL)
        run.wait("a pipe of the learner", lambda: run.link("left", "right").endswith(f"byte pipe of relay {learner}"))
        run.publish(3)
        run.wait("version 3 through the other relay", lambda: run.version("left") == run.version("right") == 3)
