"""Every command that the documentation shows is run by a test: here, where that is cheap, or in the test that is named.

A command that no test can run stands in NOT_RUN with the reason; what can be checked of it without running is checked.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.test_docs import MAINS, PAGES, ROOT, _code_lines, _parses

PROGRAMS = {
    *MAINS, "make", "python", "pytest", "pip", "git", "docker", "kubectl", "sky", "systemctl", "torchrun", "sqlite3", "export",
}  # fmt: skip

RUN_HERE = r"echo2 (config show|plan \S|sim examples/scenarios/slow).*"

ELSEWHERE = (  # pattern; the test's file; words of it that run the command
    (r"echo2 demo.*|make demo( SEED=0)?", "tests/packaging/test_wheel.py", '"echo2", "demo"'),
    (r"echo2 export.*", "tests/packaging/test_wheel.py", '"echo2", "export"'),
    (r"echo2 doctor.*", "tests/e2e/test_doctor.py", '"doctor", "--link"'),
    (r"echo2 link.*", "tests/e2e/test_operator_commands.py", '"link", operator'),
    (r"echo2 plan( --explain)?|echo2 sim", "tests/unit/cli/test_plan_and_sim.py", "--explain"),
    (r"echo2 sim examples/scenarios/NAME.toml", "tests/unit/cli/test_plan_and_sim.py", "sim"),
    (r"echo-coordinator --config.*", "tests/e2e/cluster.py", '"echo-coordinator", *common'),
    (r"echo-learner join.*", "tests/e2e/cluster.py", '"echo-learner", "join"'),
    (r"echo-worker join [^-].*|echo-worker join", "tests/e2e/cluster.py", '"echo-worker", "join"'),
    (r"echo-worker join --help", "tests/docs/test_docs.py", "test_every_command_shown_is_one"),
    (r"echo-worker (status|drain|leave)", "tests/unit/worker/test_control.py", "worker.main"),
    (r"torchrun .*", "tests/unit/learner/test_ranks.py", "--nproc-per-node"),
    (r"python -m examples.own_trainer .*", "tests/e2e/test_own_trainer.py", "examples.own_trainer"),
    (r"make sim.*", "tests/unit/sim/test_cluster.py", "cluster_run"),
    (r"make docs", "tests/docs/test_docs.py", '"sphinx"'),
    (r"make proto", "tests/docs/test_commands.py", "proto/generate.py"),
    (r"python -m tests.fuzz_targets", "tests/unit/test_fuzz.py", "fuzz_targets"),
    (r"pytest tests/.*", "tests/docs/test_commands.py", "test_files_that_a_command_names_are_there"),
)

NOT_RUN = (
    (r"make (test|check)|make test-vllm.*", "they are what runs the tests"),
    (
        r"make bench.*|python -m benchmarks\..*|python -m echo2\.sim\.broadcast_scenarios .*",
        "minutes of measuring each",
    ),
    (r"make soak.*", "half an hour of storms"),
    (r"make demo ENGINE=vllm", "needs vLLM's environment; make test-vllm runs the engine in it"),
    (r"make recording", "needs npm and a minute and a half; makes pictures"),
    (r"make audit", "asks an advisory service on the Internet"),
    (
        r"pip install .*|git clone .*|export PIP_INDEX_URL=.*",
        "need a package index; tests/packaging installs without one",
    ),
    (
        r"docker .*|kubectl .*|sky .*|systemctl .*",
        "need a cluster, a cloud or an init system; tests/deploy checks the files",
    ),
    (r"sqlite3 .*", "the tool of another project"),
)


def shown() -> list[str]:
    found = set()
    for page in PAGES:
        if page.parent.name == "reference":
            continue
        for line in _code_lines(page.read_text()):
            command = re.split(r"\s+#|   ", line.strip())[0].strip()
            if command.split(" ")[0] in PROGRAMS and " " in command:
                found.add(command)
    return sorted(found)


COMMANDS = shown()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_is_run_somewhere_or_says_why_not(command: str) -> None:
    if re.fullmatch(RUN_HERE, command):
        return
    for pattern, file, words in ELSEWHERE:
        if re.fullmatch(pattern, command):
            assert words in (ROOT / file).read_text(), f"{file} does not run `{command}` any more"
            return
    assert any(re.fullmatch(pattern, command) for pattern, _ in NOT_RUN), f"no test runs `{command}`"


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run.toml of the quick start, word for word, and the files of the checkout that commands name."""
    folder = tmp_path_factory.mktemp("quickstart")
    text = (ROOT / "docs" / "quickstart.md").read_text()
    block = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    tomllib.loads(block[1])
    (folder / "run.toml").write_text(block[1])
    for name in ("examples", "deploy"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("command", [command for command in COMMANDS if re.fullmatch(RUN_HERE, command)])
def test_it_runs(
    command: str, quick_start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command)
    monkeypatch.chdir(quick_start)
    monkeypatch.setenv("HOME", str(quick_start))
    code = MAINS[program](words)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.out.strip()


def test_files_that_a_command_names_are_there() -> None:
    for command in COMMANDS:
        for word in shlex.split(command):
            if re.match(r"(tests|deploy|examples|docs|proto)/", word) and "NAME" not in word:
                assert (ROOT / word).exists(), command


def test_modules_that_a_command_names_are_there() -> None:
    for command in COMMANDS:
        for module in re.findall(r"-m ([a-z_0-9.]+)", command):
            assert importlib.util.find_spec(module) is not None, command


def test_what_torchrun_starts_is_a_learner() -> None:
    (command,) = (command for command in COMMANDS if command.startswith("torchrun"))
    words = shlex.split(command)
    assert _parses(["echo-learner", *words[words.index("echo2.cli.learner") + 1 :]]) == []


def test_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for command in COMMANDS for extra in re.findall(r"echo2\[([a-z]+)\]", command)}
    assert named and named <= extras.keys()


def test_stubs_are_made_from_the_protocol_as_make_proto_does() -> None:
    done = subprocess.run(
        [sys.executable, "proto/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_error_is_in_the_page_on_troubleshooting() -> None:
    errors = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(errors) > 15
    assert [name for name in errors if f"`{name}" not in page] == []
