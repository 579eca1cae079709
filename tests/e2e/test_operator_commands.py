"""The operator's commands against a real coordinator: a narrower link is made and works, the run is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from echo2.broadcast.identity import JoinLink
from tests.e2e.cluster import Cluster, environment_of
from tests.e2e.test_doctor import CONFIG


def echo2(cluster: Cluster, *words: str) -> str:
    """What the command printed."""
    argv = [sys.executable, "-m", "echo2.cli.main", *words]
    environment = environment_of(cluster.folder) | {"COLUMNS": "120"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_links_are_made_and_the_run_is_shown(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG.format(folder=tmp_path, host="127.0.0.1"), workers=0) as cluster:
        cluster.start("coordinator")
        path = cluster.run_folder / "links" / "operator.link"
        cluster.wait_until(path.exists, 20, "join links")
        operator = f"@{path}"
        made = echo2(cluster, "link", operator, "--role", "worker", "--uses", "1", "--lifetime", "1d")
        own = JoinLink.parse(path.read_text().strip())
        assert (JoinLink.parse(made).peer_id, JoinLink.parse(made).address) == (own.peer_id, own.address)
        assert "workers" in echo2(cluster, "status", operator)
        assert json.loads(echo2(cluster, "status", operator, "--json"))["run_id"] == "trial"
        listed = echo2(cluster, "link", operator)
        assert listed.startswith("echo2://") and listed != made, "each has a token of its own"
