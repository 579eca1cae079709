"""The operator's commands and the doctor against one real coordinator."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2.cli import worker
from echo2.trust.identity import JoinLink
from tests.docs.test_commands import AS_SHOWN, COMMANDS
from tests.e2e.cluster import Cluster, environment_of, words_of
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
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("commands")
    with Cluster(folder, CONFIG.format(folder=folder, host="127.0.0.1"), workers=0) as cluster:
        cluster.start("coordinator")
        links = cluster.run_folder / "links"
        roles = ("operator", "learner", "worker")
        cluster.wait_until(lambda: all((links / f"{role}.link").exists() for role in roles), "join links")
        yield cluster


def command(cluster: Cluster, host: str, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cluster.placed(host, [sys.executable, *words_of(program), *words]),
        capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=cluster.folder,
        env=environment_of(cluster.folder) | {"COLUMNS": "120"},
    )  # fmt: skip


def echo2(cluster: Cluster, *words: str) -> str:
    done = command(cluster, "here", "echo2.cli.main", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def findings(cluster: Cluster, host: str, role: str, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The doctor's exit code and its findings by name, of the machine `host` with a link of `role`. Workers of others that hang on
    this machine are not the test's."""
    link = cluster.run_folder / "links" / f"{role}.link"
    cluster.wait_until(link.exists, "join links")
    done = command(cluster, host, "echo2.cli.main", "doctor", "--link", f"@{link}", "--json", *more)
    assert done.returncode in (0, 6), done.stderr
    found = {row["what"]: row for row in json.loads(done.stdout)}
    is_fit = all(row["is_good"] is not False for row in found.values())  # None: what cannot be told here
    assert is_fit == (done.returncode == 0)
    return 0 if is_fit else 6, found


def test_a_machine_learns_of_its_link_before_it_joins(cluster: Cluster) -> None:
    code, found = findings(cluster, "here", "worker")
    assert code == 0
    assert found["join link"]["found"] == "its token lets a machine in as worker"
    assert found["reach"]["found"].startswith("direct: others can dial this machine at 127.0.0.1, port ")
    assert "0.0 s" in found["clock skew"]["found"]
    for name in ("uplink", "downlink"):
        assert "at least" in found[name]["found"] and "MB/s" in found[name]["found"]
    assert "enrolled" not in cluster.log("coordinator")


def documented() -> tuple[list[str], list[str]]:
    """Commands that the pages show, with links of this run: what ends by itself, and what runs until it is stopped."""
    lines = [line for line in COMMANDS if re.fullmatch(AS_SHOWN, line)]
    return [line for line in lines if line.startswith("echo2")], [
        line for line in lines if line.startswith("echo-worker")
    ]


def flags_of(line: str) -> set[str]:
    return {word for word in shlex.split(line) if word.startswith("--")}


def test_links_are_made_and_used_and_the_run_is_shown_as_the_pages_say(cluster: Cluster, tmp_path: Path) -> None:
    path = cluster.run_folder / "links" / "operator.link"
    shutil.copy(path, cluster.folder / "operator.link")
    own = JoinLink.parse(path.read_text().strip())
    links = {flags_of(line) != set(): echo2(cluster, *shlex.split(line)[1:]) for line in documented()[0]}
    assert len(links) == 2 and links[True] != links[False], "each has a token of its own"
    for made in links.values():
        assert (JoinLink.parse(made).peer_id, JoinLink.parse(made).address) == (own.peer_id, own.address)
    assert "workers" in echo2(cluster, "status", f"@{path}")
    assert json.loads(echo2(cluster, "status", f"@{path}", "--json"))["run_id"] == "trial"

    joins = [line for line in documented()[1] if not any(flags_of(line) < flags_of(o) for o in documented()[1])]
    names = [f"machine-{number}" for number in range(len(joins))]
    for name, line in zip(names, sorted(joins, key=len), strict=True):
        link = links[name != names[0]]  # the narrow one lets one worker in
        words = [link if re.match("echo2://|LINK", word) else word for word in shlex.split(line)]
        cluster.commands[name] = [*words, "--folder", str(tmp_path / name)]
        cluster.start(name)
    for name in names:
        cluster.wait_until(lambda n=name: "enrolled" in cluster.log(n), f"{name} to enrol")  # type: ignore[misc]
        assert worker.main(["leave", "--folder", str(tmp_path / name)]) == 0
    for name in names:
        assert cluster.wait(name) == 0, cluster.log(name)[-2000:]
