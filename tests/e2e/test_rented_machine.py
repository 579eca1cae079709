"""A rented machine: a real process there runs its set-up in an environment without echo2, joins, trains and is given back.

The operator's commands are those of docs/first-run.md, in its order, in a terminal of 80 columns."""

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from echo2.coordinator.money.providers.machine_setup import running_wheel
from tests.contract.command_cloud import CommandCloud
from tests.e2e.cluster import ROOT, Cluster, environment_of, small_run
from tests.packaging.installed import link_libraries
from tests.patience import WAIT_S


class Page:
    """The JSON API of the dashboard, as a script of the operator's."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=WAIT_S) as answer:
            return json.load(answer)

    def act(self, path: str, **body: str) -> Any:
        headers = {"x-echo2-csrf": self.get("/api/session")["csrf"], "content-type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.load(answer)

    def machines(self) -> dict[str, Any]:
        return {one["machine_id"]: one for one in self.get("/api/state")["machines"]["machines"]}

    def is_up(self) -> bool:
        try:
            return bool(self.get("/readyz")["status"] == "ready")
        except OSError:
            return False


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


def processes_of(machine_id: str) -> list[list[str]]:
    lines = [_text(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line.split("\0") for line in lines if machine_id in line]


def echo2(folder: Path, *words: str) -> str:
    """What a command says; no line is wider than the terminal, but for a path that alone is."""
    done = subprocess.run(
        [sys.executable, "-m", "echo2.cli.main", *words], env={**environment_of(folder), "COLUMNS": "80"}, cwd=folder,
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and len(line.split()) > 1] == []
    return " ".join(done.stdout.split())


def test_a_rented_machine_gets_the_runs_wheel_joins_trains_and_is_given_back(tmp_path: Path, base_model: Path) -> None:
    offers = tmp_path / "offers.toml"
    cloud = CommandCloud(tmp_path / "cloud", fresh_machine(tmp_path))
    offers.write_text(offers_of(cloud, tmp_path / "runs" / "trial" / "run.toml"))
    run_config = small_run(tmp_path, base_model, prompts=4) + "emulated_step = 0.5\n"  # others work on these cores
    text = run_config.replace(
        "[coordinator]", f'[coordinator]\nplanner_mode = "advise"\noffers = "{offers}"\nusd_per_hour_cap = 8'
    )
    page = Page(tomllib.loads(text)["coordinator"]["dashboard_port"])
    try:
        with Cluster(tmp_path, text, workers=0) as cluster:
            run = str(cluster.run_folder)
            checked = echo2(tmp_path, "doctor", "--config", f"{run}/run.toml")
            assert "task: sort_digits" in checked and "BAD" not in checked
            cluster.start_all()
            cluster.wait_until(page.is_up, "the page")
            machine_id = page.act("/api/machines", offer="there", reason="to see it join")["machine_id"]
            try:
                cluster.wait_until(lambda: cluster.step() >= 1, "a step made from the rented worker's rollouts")
            finally:
                print(cloud.log(machine_id)[-4000:])
            environment = cloud.folder / machine_id / "echo2-env"
            (package,) = environment.glob("lib/python3*/site-packages/echo2")
            (worker, *_) = processes_of(machine_id)
            assert worker[:2] == [str(environment / "bin" / name) for name in ("python", "echo-worker")]
            assert (package / "cli" / "worker.py").read_bytes() == (ROOT / "echo2" / "cli" / "worker.py").read_bytes()
            assert (cloud.folder / machine_id / running_wheel().name).read_bytes() == running_wheel().data
            for is_restarted in (False, True):
                if is_restarted:
                    cluster.kill("coordinator")
                    cluster.start("coordinator")
                    cluster.wait_until(page.is_up, "the page after the kill")
                    step = cluster.step()
                    cluster.wait_until(lambda at=step: cluster.step() >= at + 2, "steps after the kill")
                shown = page.machines()[machine_id]
                assert (shown["state"], shown["workers"], shown["price"]) == ("running", [machine_id], 0.5)
            assert machine_id in echo2(tmp_path, "status", run)
            echo2(tmp_path, "ctl", run, "pause", "look at the samples")
            assert "Resume the run when you want it to go on" in echo2(tmp_path, "status", run)
            echo2(tmp_path, "ctl", run, "resume")
            money = page.get("/api/state")["money"]
            (rented, *_) = [one for one in money["journal"] if one["whom"] == machine_id]
            assert (rented["action"], rented["reason"]) == ("rent", "to see it join") and 0 < money["spent"] < 1
            echo2(tmp_path, "ctl", run, "stop", "seen")
            cluster.wait("learner")
            assert "Traceback" not in cluster.log("learner")
            del cluster.processes["learner"]
            cluster.wait_until(lambda: not list(cloud.folder.glob("*/pid")), "its return")
            cluster.wait_until(lambda: not processes_of(machine_id), "its end")
            assert "Traceback" not in cloud.log(machine_id)
            assert "stopped by the operator: seen" in echo2(tmp_path, "status", run)
    finally:
        cloud.close()
