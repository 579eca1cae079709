"""The coordinator's image, built and run where something builds images: docker, podman or buildah. ECHO2_IMAGE_OPTIONS: what the
build needs beside, as behind a mirror."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.fork_server import ROOT
from tests.patience import WAIT_S
from tests.ports import choose_ports

BUILDERS = ("docker", "podman", "buildah")
TAG, BASE = "echo2-coordinator-test", "python:3.12-slim"
CONFIG = "/etc/echo2/run.toml"


def _ran(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3 * WAIT_S)
    if done.returncode and re.search(rf"{BASE}.*(pull|pinging|resolve|registry)", done.stderr):
        pytest.skip(f"{BASE} cannot be had here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.soak
def test_the_coordinators_image_is_built_and_listens(tmp_path: Path) -> None:
    there = (
        name
        for name in BUILDERS
        if shutil.which(name) and not subprocess.run([name, "info"], check=False, capture_output=True).returncode
    )
    builder = next(there, None)
    if builder is None:
        pytest.skip(f"nothing that builds images answers: {', '.join(BUILDERS)}")
    options = shlex.split(os.environ.get("ECHO2_IMAGE_OPTIONS", ""))
    file = ROOT / "deploy" / "containers" / "coordinator.Containerfile"
    _ran(builder, "build", *options, "-f", str(file), "-t", TAG, str(ROOT))
    volume = f"--volume={ROOT / 'deploy' / 'run.toml'}:{CONFIG}:ro"
    names = ("enrol_port", "port", "dashboard_port")
    ports = [f"--coordinator.{name}={port}" for name, port in zip(names, choose_ports([0] * len(names)), strict=True)]
    if builder == "buildah":  # it has no command that runs an image with its entry point
        name = _ran(builder, "from", TAG)
        command = [builder, "run", volume, name, "--", "echo-coordinator", "--config", CONFIG, *ports]
    else:
        name = TAG
        command = [builder, "run", "--name", name, volume, TAG, "--config", CONFIG, *ports]
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as running:
        end = time.monotonic() + WAIT_S
        while "dashboard at" not in log.read_text() and running.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
        running.terminate()
    _ran(builder, "rm", *([] if builder == "buildah" else ["--force"]), name)
    told = log.read_text()
    assert "learner.link) made for the role learner" in told and "listening: enrolment at" in told, told
