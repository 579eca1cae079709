"""The wheel and the source distribution, tried in empty environments as a user would install them."""

import io
import json
import re
import socket
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from echo2.config.run import RunConfig
from echo2.coordinator.money.providers.machine_setup import running_wheel
from tests.e2e.test_local_run import left_over, steps_of, trains
from tests.packaging.installed import Environment, add_extras, build, install
from tests.patience import WAIT_S

COMMANDS = ("echo2", "echo-coordinator", "echo-learner", "echo-worker")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def plain(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """No extra: what an operator or a coordinator's machine gets."""
    return install(built[0], tmp_path_factory.mktemp("plain") / "env")


@pytest.fixture(scope="module")
def whole(plain: Environment) -> Environment:
    """With the extras learner and engine: what a laptop gets that runs everything. From here on nothing is plain."""
    add_extras(plain, ("learner", "engine"))
    return plain


def test_wheel_holds_the_package_and_what_it_reads(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    for needed in ("echo2/py.typed", "echo2/cost_model/gpus.toml", "echo2/cli/main.py"):
        assert needed in names
    assert any(name.startswith("echo2/coordinator/web/") for name in names), "the dashboard's page"
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    served = zipfile.ZipFile(io.BytesIO(running_wheel().data)).namelist()
    assert sorted(served) == sorted(names), "a rented machine gets what a builder makes"


def test_source_distribution_can_be_built_from_again(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "echo2/py.typed"} <= names


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_answer_without_torch(plain: Environment, command: str) -> None:
    done = plain.run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {command}")


def test_plain_install_has_no_torch_and_says_what_is_missing(plain: Environment, tmp_path: Path) -> None:
    assert plain.run("python", "-c", "import torch").returncode != 0
    done = plain.run("echo2", "demo", "--plain")
    assert done.returncode == 2, done.stderr
    assert "echo2[learner]" in done.stderr and "Traceback" not in done.stderr
    joined = plain.run("echo-worker", "join", "echo2://127.0.0.1:1/x?token=y")
    assert joined.returncode == 2 and "echo2[engine]" in joined.stderr


def test_doctor_looks_at_the_machine_without_torch(plain: Environment) -> None:
    found = {row["what"]: row["found"] for row in json.loads(plain.run("echo2", "doctor", "--json").stdout)}
    assert found["torch"] == "not installed; coordinators and operators need none"
    assert "can be coordinator;" in found["packages"] and "engine lacks torch" in found["packages"]


def test_planner_and_config_work_without_torch(plain: Environment) -> None:
    config = plain.run("echo2", "config", "show", "--preset", "wan")
    assert tomllib.loads(config.stdout)["staleness"]["bound"] == 4
    done = plain.run("echo2", "plan", "--billions", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def begun(environment: Environment, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(environment.scripts / "echo2"), *words], env=environment.variables(), cwd=environment.home,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_demo_from_the_wheel_is_stopped_and_goes_on_to_its_end(whole: Environment, base_model: Path) -> None:
    """It finds its model made; a second command in its folder and another run's port are left alone."""
    (whole.home / ".cache" / "echo2").mkdir(parents=True)
    (whole.home / ".cache" / "echo2" / "demo").symlink_to(base_model.parent)
    run = whole.home / "runs" / "wheel"
    words = ["demo", "--plain", "--steps", "100000", "--name", "wheel", "--seed", "0", "--staleness", "8", "--learner.lr", "2e-4",
             "--learner.prompts_per_step", "8", "--task.eval_prompts", "32", "--learner.checkpoint_every_steps", "2",
             "--learner.emulated_step", "0.5"]  # fmt: skip
    try:
        taken = socket.create_server(("127.0.0.1", RunConfig().coordinator.dashboard_port))
    except OSError:  # somebody else's run has it
        taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        demo = begun(whole, *words)
        trains(demo, run)
        kept = (run / "run.toml").read_bytes()
        second = whole.run("echo2", "run", str(run / "run.toml"), "--plain", "--learner.steps=99")
        assert (
            second.returncode == 8 and f"found echo2 (process {demo.pid}); to end it: kill {demo.pid}" in second.stderr
        )
        assert (run / "run.toml").read_bytes() == kept, "a live run's config is not written over"
        tail, stop = (begun(whole, word, str(run)) for word in ("tail", "stop"))
        said, stopped, followed = (process.communicate(timeout=WAIT_S)[0] for process in (demo, stop, tail))
        assert (stop.returncode, tail.returncode) == (0, 0) and "the same `echo2 run` goes on from" in stopped
        assert all(re.match(r"\S+ +\d\d \w+ \d\d:\d\d:\d\d ", line) for line in followed.splitlines())
        assert re.search("learner .*stopped after step", followed), "it follows until the last process has ended"
        assert demo.returncode == 130 and "dashboard http://127.0.0.1:" in said
    assert "what was trained is saved in" in said and "the same command with --name wheel goes on from there" in said
    assert "Traceback" not in said and left_over(whole.folder) == []
    assert "stopped after step" in (run / "logs" / "learner.log").read_text()

    last = steps_of(run)[-1] + 3
    words[words.index("100000")] = str(last)
    done = whole.run("echo2", *words)
    logs = "\n".join(path.read_text()[-1500:] for path in (run / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert steps_of(run) == list(range(last + 1)), "it went on from what was saved"
    model = "runs/wheel/learner/model"
    assert model in "".join(done.stdout.split()), "the report says where the model is"
    assert (whole.home / model / "config.json").exists() and f"the model lies in {model}" in logs
    assert f"step {last}/{last}  reward " in logs
    assert f"run wheel is finished after {last} steps" in logs, "the coordinator heard of the end"
    assert left_over(whole.folder) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == last and summary["tokens_over_bound"] == 0 and any(summary["versions_equal"].values())
    done = whole.run("echo2", "export", "runs/wheel", "my-model")
    assert done.returncode == 0 and f"step {last}" in done.stdout, done.stderr
    assert (whole.home / "my-model" / "config.json").exists()
