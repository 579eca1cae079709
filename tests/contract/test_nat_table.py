"""Every cell of the table of NAT kinds in docs/networking.md, played by real processes in network namespaces."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.nat_lab import Families, NatKind, NatLab, reason_unavailable
from tests.contract.nat_table import DIALLED, RELAYED, ROWS, Scene, table
from tests.contract.test_nat import running

pytestmark = pytest.mark.network_namespaces
PAGE = Path(__file__).parents[2] / "docs" / "networking.md"
BEHIND_ROUTER = {kind for kind in NatKind if kind is not NatKind.FIREWALL}


def params(column: int) -> list[object]:
    return [
        pytest.param(row[column], id=name, marks=[pytest.mark.soak] if row[column].is_soak else [])
        for name, row in ROWS.items()
    ]


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text(), "python -m tests.contract.nat_table prints it"


def arranged(scene: Scene, other: str) -> dict[str, object]:
    """Where the nodes stand: `other` is hidden, too, behind what most homes have unless the scene says otherwise."""
    kinds, hidden = {other: NatKind.PORT_RESTRICTED, **scene.kinds}, list[str]()
    if scene.kind is not None:
        kinds[scene.who] = scene.kind
    hidden = [name for name, kind in kinds.items() if kind in BEHIND_ROUTER]
    mapped = scene.who if scene.is_mapped else ""
    return {
        "hidden": tuple(hidden), "kinds": kinds, "families": scene.families, "mapped": mapped,
        "named": (mapped,) if mapped else (),
    }  # fmt: skip


@pytest.mark.parametrize("scene", params(0))
def test_a_worker_behind_it_has_every_version_and_meets_a_hidden_one(scene: Scene, tmp_path: Path) -> None:
    with running(tmp_path, **arranged(scene, "right")) as run:  # type: ignore[arg-type]
        run.wait("links to the learner", lambda: run.link("left", "learner") == DIALLED)
        run.wait(f"a link of its kind: {scene.way}", lambda: run.link("right", "left").startswith(scene.way))
        if scene.way == RELAYED:
            run.wait("a byte pipe", lambda: "through a byte pipe of relay " in run.link("left", "right"))
        assert run.nodes["left"].seen["facts"]["is_reachable"] is (scene.way == DIALLED)
        run.publish(1)
        run.wait("version 1 at both", lambda: run.version("left") == run.version("right") == 1)
        if scene.way != RELAYED:
            run.publish(2)
            run.wait("version 2 at both", lambda: run.version("left") == run.version("right") == 2)
            run.wait(
                "chunks between the two",
                lambda: run.from_peer("left", "right") + run.from_peer("right", "left") > 1 << 20,
            )


@pytest.mark.parametrize("scene", params(1))
def test_a_learner_behind_it_publishes_to_dialled_workers_and_hidden_ones(scene: Scene, tmp_path: Path) -> None:
    is_apart = scene.families.get("learner") is Families.IPV6 and "left" not in scene.families
    with running(tmp_path, **arranged(scene, "left")) as run:  # type: ignore[arg-type]
        if scene.way == DIALLED:
            for name in ("left", "right"):
                run.wait("a link to the learner", lambda name=name: run.link(name, "learner") == DIALLED)
        else:
            run.wait("a pipe", lambda: "through a byte pipe of relay " in run.link("left", "learner"))
            wanted = "relayed: " if is_apart else "reverse: it dialled us"
            run.wait("the other worker's link", lambda: run.link("right", "learner").startswith(wanted))
        run.publish(1)
        run.wait("version 1 at both", lambda: run.version("left") == run.version("right") == 1)
        if scene.way != DIALLED and not is_apart:
            assert run.from_peer("right", "learner") > 1 << 20, "straight from the learner"


_SERVER = """
import socket
with socket.create_server(("::", 9000), family=socket.AF_INET6, dualstack_ipv6=True) as s:
    print("ready", flush=True)
    while True:
        s.accept()[0].close()
"""
_DIAL = """
import socket, sys
with socket.socket() as s:
    s.settimeout(1.5)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("0.0.0.0", int(sys.argv[2])))
    s.connect((sys.argv[1], 9000))
"""


def test_the_routers_of_the_lab_are_of_their_kinds() -> None:
    """After the host has dialled one end from its port 9000: who else reaches that port."""
    if reason := reason_unavailable():
        pytest.skip(reason)
    expected = {
        NatKind.FULL_CONE: (True, True, True),
        NatKind.ADDRESS_RESTRICTED: (True, True, False),
        NatKind.PORT_RESTRICTED: (True, False, False),
        NatKind.SYMMETRIC: (True, False, False),
    }
    names = {kind: f"h{number}" for number, kind in enumerate(expected)}
    kinds = {name: kind for kind, name in names.items()}
    with contextlib.ExitStack() as held:
        lab = held.enter_context(NatLab(("one", "other"), tuple(names.values()), kinds=kinds))

        def serve(host: str) -> None:
            command = lab.command(host, [sys.executable, "-c", _SERVER])
            made = held.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            held.callback(made.kill)
            assert made.stdout is not None and made.stdout.readline() == "ready\n"

        def reaches(host: str, address: str, port: int) -> bool:
            argv = [sys.executable, "-c", _DIAL, address, str(port)]
            return subprocess.run(lab.command(host, argv), capture_output=True, check=False).returncode == 0

        serve("one")
        for number, (kind, name) in enumerate(names.items(), start=2):
            outer = f"10.90.{number}.2"
            seen = [reaches(name, lab.addresses["one"], 9000)]
            serve(name)
            seen += [reaches("one", outer, 9100 + number), reaches("other", outer, 9100 + number)]
            assert tuple(seen) == expected[kind], kind
