"""A machine is rented; a real process there runs the set-up that it was given, in an environment without echo2, until it joins."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from echo2.coordinator.fleet.wheel import running_wheel
from tests.contract.command_cloud import CommandCloud
from tests.e2e.cluster import ROOT, Cluster
from tests.e2e.test_machines import Page
from tests.packaging.installed import link_libraries


def fresh_machine(folder: Path) -> dict[str, str]:
    """The environment of processes there: the libraries of a worker, as an image would hold them, no echo2 and no package index."""
    libraries = folder / "libraries"
    libraries.mkdir()
    link_libraries(distribution("echo2").requires or [], ("engine",), libraries)
    return {
        "PATH": f"{Path(os.path.realpath(sys.executable)).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(libraries),
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(ROOT / "build" / "numba"),
    }


def offers_of(cloud: CommandCloud, config: Path) -> str:
    settings = {**cloud.settings, "extra": "engine", "arguments": f"--config {config}"}
    lines = [f"{name} = {json.dumps(text)}" for name, text in settings.items()]
    return "\n".join(
        ["[[offer]]", 'name = "there"', 'provider = "command"', "usd_per_hour = 0.5", "[offer.settings]", *lines]
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_rented_machine_gets_the_runs_own_wheel_and_joins(tmp_path: Path, run_config: str) -> None:
    offers = tmp_path / "offers.toml"
    cloud = CommandCloud(tmp_path / "cloud", fresh_machine(tmp_path))
    offers.write_text(offers_of(cloud, tmp_path / "runs" / "trial" / "run.toml"))
    text = run_config.replace(
        "[coordinator]", f'[coordinator]\nplanner_mode = "advise"\noffers = "{offers}"\nusd_per_hour_cap = 8'
    )
    page = Page(tomllib.loads(text)["coordinator"]["dashboard_port"])
    try:
        with Cluster(tmp_path, text, workers=0) as cluster:
            cluster.start_all_but_learner()
            cluster.wait_until(page.is_up, "the page")
            machine_id = page.act("/api/machines", offer="there", reason="to see it join")["machine_id"]
            try:
                cluster.wait_until(
                    lambda: page.machines()[machine_id]["workers"] == [machine_id], "the machine's worker"
                )
            finally:
                print(cloud.log(machine_id)[-4000:])
            environment = cloud.folder / machine_id / "echo2-env"
            (package,) = environment.glob("lib/python3*/site-packages/echo2")
            worker = next(one for one in Path("/proc").glob("[0-9]*/cmdline") if machine_id in _text(one))
            assert _text(worker).split("\0")[:2] == [
                str(environment / "bin" / name) for name in ("python", "echo-worker")
            ]
            assert (package / "cli" / "worker.py").read_bytes() == (ROOT / "echo2" / "cli" / "worker.py").read_bytes()
            assert (cloud.folder / machine_id / running_wheel().name).read_bytes() == running_wheel().data
            page.act("/api/machines/release", machine_id=machine_id, reason="seen")
            assert page.machines()[machine_id]["state"] == "gone"
            assert not list(cloud.folder.glob("*/pid"))
            cluster.wait_until(
                lambda: not any(machine_id in _text(one) for one in Path("/proc").glob("[0-9]*/cmdline")), "its end"
            )
    finally:
        cloud.close()
