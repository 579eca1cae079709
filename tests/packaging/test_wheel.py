"""The wheel and the source distribution, tried in empty environments as a user would install them."""

from __future__ import annotations

import io
import json
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from echo2.coordinator.money.providers.machine_setup import running_wheel
from tests.packaging.installed import Environment, add_extras, build, install

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


def test_loopback_run_from_the_wheel(whole: Environment, base_model: Path) -> None:
    """The demo's real processes, all started from the installed wheel, to the last step; it finds its model made."""
    (whole.home / ".cache" / "echo2").mkdir(parents=True)
    (whole.home / ".cache" / "echo2" / "demo").symlink_to(base_model.parent)
    options = ("--steps", "4", "--name", "wheel", "--seed", "0", "--staleness", "8", "--learner.lr", "2e-4",
               "--learner.prompts_per_step", "8", "--task.eval_prompts", "32")  # fmt: skip
    done = whole.run("echo2", "demo", "--plain", *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((whole.home / "runs" / "wheel" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["tokens_over_bound"] == 0 and all(summary["versions_equal"].values())
    done = whole.run("echo2", "export", "runs/wheel", "my-model")
    assert done.returncode == 0 and "step 4" in done.stdout, done.stderr
    assert (whole.home / "my-model" / "config.json").exists()
