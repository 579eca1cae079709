"""The doctor and the real daemons through NATs, no flag given: coordinator public, workers and perhaps the learner hidden."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import EchoError
from echo2.worker.control import ask
from tests.contract.nat_lab import NatLab, reason_unavailable
from tests.e2e.cluster import Cluster
from tests.e2e.test_commands import CONFIG, findings

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(reason_unavailable()), reason=reason_unavailable() or "available"),
]
HOSTS = {"coordinator": "hub", "learner": "learner", "w0": "left", "w1": "right"}


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    """What `echo-worker status` shows; empty while it does not answer."""
    try:
        return dict(asyncio.run(ask(cluster.run_folder / "workers" / name, "status", 5)))
    except (EchoError, OSError):
        return {}


def kinds(cluster: Cluster, name: str) -> list[str]:
    links = status(cluster, name).get("links", [])
    return sorted(link.split(" ")[1].rstrip(":") for link in links)


@pytest.mark.parametrize(
    ("is_symmetric", "kind"), [(False, "hole-punched"), pytest.param(True, "relayed", marks=pytest.mark.soak)]
)
def test_a_machine_behind_a_nat_learns_how_it_will_be_met(tmp_path: Path, is_symmetric: bool, kind: str) -> None:
    with NatLab(("hub", "open"), ("left",), is_symmetric=is_symmetric) as lab:
        config = CONFIG.format(folder=tmp_path, host=lab.addresses["hub"])
        with Cluster(tmp_path, config, workers=0) as cluster:
            cluster.placed = lambda name, argv: lab.command("hub" if name == "coordinator" else name, argv)
            cluster.start("coordinator")
            if is_symmetric:
                code, found = findings(cluster, "left", "learner", "--learner.port", "7000")
                assert code == 6 and not found["reach"]["is_good"], "a learner must be dialled"
            else:
                code, found = findings(cluster, "left", "worker", "--worker.port", "7000")
                assert code == 0 and "worker.port" in found["reach"]["advice"]
            assert found["reach"]["found"].startswith(f"{kind}: nobody can dial it: it is behind a NAT")
            assert "port 7000" in found["reach"]["found"]
            if not is_symmetric:
                code, found = findings(cluster, "open", "learner", "--learner.port", "7001")
                where = f"{lab.addresses['open']}, port 7001"
                assert (code, found["reach"]["found"]) == (0, f"direct: others can dial this machine at {where}")


LINKS = {
    ("left", "right"): {"w0": ["direct", "hole-punched"], "w1": ["direct", "hole-punched"]},
    ("learner", "left"): {"w0": ["direct", "relayed"], "w1": ["reverse", "reverse"]},
}
"""By who is hidden: how each worker meets learner and worker."""


@pytest.mark.soak  # tests/contract/test_nat.py has the links in the default run
@pytest.mark.parametrize("hidden", LINKS)
def test_all_join_without_flags_train_and_meet(tmp_path: Path, run_config: str, hidden: tuple[str, str]) -> None:
    """Rollouts, leases' reports and weights of all; the coordinator's relay is killed on the way, and comes back."""
    with NatLab([name for name in HOSTS.values() if name not in hidden], hidden) as lab:
        config = run_config.replace("[coordinator]\n", f'[coordinator]\nhost = "{lab.addresses["hub"]}"\n')
        with Cluster(tmp_path, config.replace("steps = 30", "steps = 400")) as cluster:
            cluster.placed = lambda name, argv: lab.command(HOSTS[name], argv)
            cluster.start_all()
            cluster.wait_until(lambda: cluster.step() >= 2, "two steps of training")
            assert ("through the byte pipes of this coordinator" in cluster.log("coordinator")) == ("learner" in hidden)
            for name, wanted in LINKS[hidden].items():
                cluster.wait_until(lambda n=name, w=wanted: kinds(cluster, n) == w, f"links of {name}")  # type: ignore[misc]
                assert (status(cluster, name)["can_be_dialled"] == "no") == (HOSTS[name] in hidden)
            reached = cluster.step()
            cluster.kill("coordinator")
            cluster.start("coordinator")
            cluster.wait_until(lambda: cluster.step() >= reached + 3, "three more steps")
            for name in LINKS[hidden] if "learner" not in hidden else ():
                cluster.wait_until(lambda n=name: status(cluster, n).get("relays") == 2, f"both relays at {name}")  # type: ignore[misc]
                assert kinds(cluster, name) == LINKS[hidden][name]
