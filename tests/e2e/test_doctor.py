"""`echo2 doctor` of a machine that has not joined, against a real coordinator: on loopback, in the open, behind NATs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.nat_lab import NatLab, reason_unavailable
from tests.e2e.cluster import Cluster, environment_of
from tests.patience import WAIT_S

CONFIG = """
preset = "local"
[run]
name = "trial"
folder = "{folder}/runs"
[model]
path = "{folder}"
[coordinator]
host = "{host}"
enrol_port = 0
port = 0
dashboard_port = 0
relay_port = 0
"""


def findings(cluster: Cluster, host: str, role: str, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The doctor's exit code and its findings by name, of the machine `host` with a link of `role`."""
    link = cluster.run_folder / "links" / f"{role}.link"
    cluster.wait_until(link.exists, "join links")
    argv = [sys.executable, "-m", "echo2.cli.main", "doctor", "--link", f"@{link}", "--json", *more]
    done = subprocess.run(
        cluster.placed(host, argv),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=environment_of(cluster.folder),
    )
    assert done.returncode in (0, 6), done.stderr
    found = {row["what"]: row for row in json.loads(done.stdout) if not row["what"].startswith("worker ")}
    is_fit = all(row["is_good"] for row in found.values())
    assert is_fit or done.returncode == 6
    return 0 if is_fit else 6, found  # workers of others that hang on this machine are not this test's


def test_a_machine_learns_of_its_link_before_it_joins(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG.format(folder=tmp_path, host="127.0.0.1"), workers=0) as cluster:
        cluster.start("coordinator")
        code, found = findings(cluster, "here", "worker")
        assert code == 0
        assert found["join link"]["found"] == "its token lets a machine in as worker"
        assert found["reach"]["found"].startswith("direct: others can dial this machine at 127.0.0.1, port ")
        assert "0.0 s" in found["clock skew"]["found"]
        for name in ("uplink", "downlink"):
            assert "at least" in found[name]["found"] and "MB/s" in found[name]["found"]
        assert "enrolled" not in cluster.log("coordinator")


@pytest.mark.network_namespaces
@pytest.mark.parametrize(
    ("is_symmetric", "kind"), [(False, "hole-punched"), pytest.param(True, "relayed", marks=pytest.mark.soak)]
)
def test_a_machine_behind_a_nat_learns_how_it_will_be_met(tmp_path: Path, is_symmetric: bool, kind: str) -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
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
