"""The operator's commands against a real coordinator: a narrower link is made and works, the run is looked at."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from echo2.cli import worker
from echo2.trust.identity import JoinLink
from tests.docs.test_commands import AS_SHOWN, COMMANDS
from tests.e2e.cluster import Cluster, environment_of
from tests.e2e.test_doctor import CONFIG
from tests.patience import WAIT_S


def echo2(cluster: Cluster, *words: str) -> str:
    """What the command printed."""
    argv = [sys.executable, "-m", "echo2.cli.main", *words]
    environment = environment_of(cluster.folder) | {"COLUMNS": "120"}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment, cwd=cluster.folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def documented() -> tuple[list[str], list[str]]:
    """Commands that the pages show, with links of this run: what ends by itself, and what runs until it is stopped."""
    lines = [line for line in COMMANDS if re.fullmatch(AS_SHOWN, line)]
    return [line for line in lines if line.startswith("echo2")], [
        line for line in lines if line.startswith("echo-worker")
    ]


def flags_of(line: str) -> set[str]:
    return {word for word in shlex.split(line) if word.startswith("--")}


def test_links_are_made_and_used_and_the_run_is_shown_as_the_pages_say(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG.format(folder=tmp_path, host="127.0.0.1"), workers=0) as cluster:
        cluster.start("coordinator")
        path = cluster.run_folder / "links" / "operator.link"
        cluster.wait_until(path.exists, "join links")
        shutil.copy(path, tmp_path / "operator.link")
        own = JoinLink.parse(path.read_text().strip())
        links = {flags_of(line) != set(): echo2(cluster, *shlex.split(line)[1:]) for line in documented()[0]}
        assert len(links) == 2 and links[True] != links[False], "each has a token of its own"
        for made in links.values():
            assert (JoinLink.parse(made).peer_id, JoinLink.parse(made).address) == (own.peer_id, own.address)
        assert "workers" in echo2(cluster, "status", f"@{path}")
        assert json.loads(echo2(cluster, "status", f"@{path}", "--json"))["run_id"] == "trial"

        joins = [line for line in documented()[1] if not any(flags_of(line) < flags_of(o) for o in documented()[1])]
        for number, line in enumerate(sorted(joins, key=len)):
            link = links[False] if number else links[True]  # the narrow one lets one worker in
            words = [link if re.match("echo2://|LINK", word) else word for word in shlex.split(line)]
            name = f"machine-{number}"
            cluster.commands[name] = [*words, "--folder", str(tmp_path / name)]
            cluster.start(name)
        names = [name for name in cluster.commands if name.startswith("machine")]
        for name in names:
            cluster.wait_until(lambda n=name: "enrolled" in cluster.log(n), f"{name} to enrol")  # type: ignore[misc]
            assert worker.main(["leave", "--folder", str(tmp_path / name)]) == 0
        for name in names:
            assert cluster.wait(name) == 0, cluster.log(name)[-2000:]
