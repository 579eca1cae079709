"""What a user can get wrong: one clear error line each, a code that is not 0, nothing left running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.cli.demo.model import ModelRecipe, make_model
from tests.e2e.cluster import MODULES, Cluster, environment_of
from tests.patience import WAIT_S


def run(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = environment_of(cwd)
    command = [sys.executable, "-m", f"echo2.cli.{MODULES.get(program, 'main')}", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, cwd=cwd, env=environment, check=False
    )


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    assert result.returncode != 0
    return lines[0]


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    for program in ("echo-coordinator",):
        assert "no-such.toml" in error_line(run(program, "--config", "no-such.toml", cwd=tmp_path))


def test_a_missing_link_file_is_named(tmp_path: Path) -> None:
    assert "no.link" in error_line(run("echo-worker", "join", "@no.link", cwd=tmp_path))


def test_a_broken_link_says_what_a_link_looks_like(tmp_path: Path) -> None:
    assert "echo2://" in error_line(run("echo-worker", "join", "http://example", cwd=tmp_path))


def test_a_busy_port_is_named(tmp_path: Path, run_config: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = tmp_path / "run.toml"
        config.write_text(run_config)
        line = error_line(
            run("echo-coordinator", "--config", str(config), "--coordinator.port", str(port), cwd=tmp_path)
        )
    assert "PortBusy" in line and str(port) in line


@pytest.fixture
def coordinator(tmp_path: Path, run_config: str):  # type: ignore[no-untyped-def]
    with Cluster(tmp_path, run_config) as cluster:
        cluster.start("coordinator")
        links = cluster.run_folder / "links"
        cluster.wait_until(lambda: (links / "worker.link").exists() and (links / "learner.link").exists(), "links")
        yield cluster


def test_a_wrong_token_is_refused(tmp_path: Path, coordinator: Cluster) -> None:
    link = (coordinator.run_folder / "links" / "worker.link").read_text().strip()
    broken = link.split("token=")[0] + "token=" + "A" * 43
    assert "BadToken" in error_line(run("echo-worker", "join", broken, "--name", "x", cwd=tmp_path))


def test_a_wrong_identity_of_the_coordinator_is_refused(tmp_path: Path, coordinator: Cluster) -> None:
    from echo2.trust.identity import Identity, JoinLink

    link = (coordinator.run_folder / "links" / "worker.link").read_text().strip()
    pinned = JoinLink.parse(link).peer_id
    other = link.replace(pinned, Identity.generate().peer_id)
    line = error_line(run("echo-worker", "join", other, "--name", "x", cwd=tmp_path))
    assert "TrustError" in line and pinned in line


def test_a_worker_token_is_no_learner_token(tmp_path: Path, coordinator: Cluster) -> None:
    links = coordinator.run_folder / "links"
    config = str(coordinator.run_folder / "run.toml")
    line = error_line(run("echo-learner", "join", f"@{links / 'worker.link'}", "--config", config, cwd=tmp_path))
    assert "learner" in line and "worker" in line


def test_a_missing_model_is_named(tmp_path: Path, coordinator: Cluster) -> None:
    links = coordinator.run_folder / "links"
    config = str(coordinator.run_folder / "run.toml")
    arguments = ("join", f"@{links / 'learner.link'}", "--config", config, "--model.path", str(tmp_path / "nothing"))
    assert "nothing" in error_line(run("echo-learner", *arguments, cwd=tmp_path))


def test_a_full_disk_is_named(tmp_path: Path, run_config: str) -> None:
    """The learner's run folder on a tiny file system; needs root to mount it."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with Cluster(tmp_path, run_config) as cluster:
            cluster.start_all_but_learner()
            links = cluster.run_folder / "links"
            config = str(cluster.run_folder / "run.toml")
            arguments = ("join", f"@{links / 'learner.link'}", "--config", config, "--folder", str(small / "learner"))
            line = error_line(run("echo-learner", *arguments, cwd=tmp_path))
            assert "DiskFull" in line and str(small) in line
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def test_another_protocol_version_is_refused(tmp_path: Path, coordinator: Cluster) -> None:
    link = (coordinator.run_folder / "links" / "worker.link").read_text().strip()
    program = (
        "import sys, echo2.trust.tls as tls; tls.PROTOCOL_VERSION = 99;"
        "from echo2.cli.worker import main; sys.exit(main(['join', sys.argv[1], '--name', 'x']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, link],
        capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path, env=environment_of(tmp_path), check=False,
    )  # fmt: skip
    line = error_line(result)
    assert "VersionMismatch" in line and "99" in line


def test_another_model_is_refused(tmp_path: Path, coordinator: Cluster) -> None:
    """By the run folder where it is the same, by the coordinator where the folder is new."""
    other = tmp_path / "other"
    make_model(other, ModelRecipe(hidden_size=32, warmup_steps=1))
    coordinator.start("learner")
    coordinator.wait_until(lambda: "connected to the coordinator" in coordinator.log("learner"), "the learner")
    coordinator.kill("learner")
    arguments = [*coordinator.commands["learner"][1:], "--model.path", str(other)]
    line = error_line(run("echo-learner", *arguments, cwd=tmp_path))
    assert "StateError" in line and "model" in line
    line = error_line(run("echo-learner", *arguments, "--folder", str(tmp_path / "new"), cwd=tmp_path))
    assert "model" in line and "expected" in line
