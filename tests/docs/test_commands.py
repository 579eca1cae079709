"""Every command that the documentation shows is run by a test, with the flags that it is shown with, or says why not.

`RUN_HERE` is run below. An entry of `BY` names the file of tests that runs the command, and the function in it where the file
starts more: the command's program, its command word and each of its flags must stand among the strings there. What no test
machine can run is `ONLY_READ`, with the reason: what can be read of it (module, arguments, file, service, secret) is. A make
target is what its recipe runs. A command of none of these kinds fails.
"""

import argparse
import ast
import importlib.util
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import yaml

from tests import fuzz_targets
from tests.docs.test_docs import MAINS, PAGES, ROOT, _code_lines, _parses

PROGRAMS = {
    *MAINS, "make", "python", "pytest", "pip", "git", "docker", "kubectl", "sky", "systemctl", "torchrun", "sqlite3", "export",
    "apt",
}  # fmt: skip
COMMENTED = sorted(
    path
    for folder in ("deploy", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".toml", ".yaml", ".Containerfile")
)

RUN_HERE = (
    r"echo2 (config show|plan(?! examples/configs/)(?!$)|doctor$|doctor --config run\.toml$).*"
    r"|python -m tests\.fuzz_targets"
)

BY = (  # pattern; the file whose tests run the command; the function in it that does
    (r"echo2 run .*", "tests/e2e/test_local_run.py"),
    (r"echo2 publish .*", "tests/e2e/test_serve.py"),
    (r"echo2 serve .*", "tests/unit/cli/test_commands.py"),
    (r"echo2 plan examples/configs/.*", "tests/unit/cli/test_resolved.py"),
    (r"echo2 ctl .*", "tests/unit/coordinator/test_actions.py"),
    (r"echo2 offers.*", "tests/unit/cli/test_offers.py"),
    (r"echo2 (status|samples) .*", "tests/unit/cli/test_report.py"),
    (r"echo2 demo(?!.*--(engine|model)).*|echo2 export.*", "tests/packaging/test_wheel.py"),
    (r"echo2 doctor --link.*", "tests/e2e/test_commands.py"),
    (r"echo-worker (status|drain|leave)", "tests/unit/worker/test_control.py"),
    (r"echo-learner join @.*|echo-(coordinator|worker join @).*", "tests/e2e/cluster.py"),
    (
        r"torchrun .*",
        "tests/e2e/test_run.py",
        "test_two_processes_as_torchruns_environment_describes_them_are_one_learner",
    ),
    (r"sqlite3 .*", "tests/e2e/test_run.py", "back_up"),
    (
        r"python -m echo2\.cli\.demo\.model .*",
        "echo2/cli/demo/run.py",
        "_make_base_model",
    ),  # which tests/e2e/conftest.py calls
    (r"python examples/own_trainer\.py .*", "tests/e2e/test_own_trainer.py"),
    (r"python examples/conversations\.py .*", "tests/unit/learner/test_prompts.py"),
    (r"python -m echo2\.sim\.storm --seed .*", "tests/unit/sim/test_said.py"),
    (r"python -m sphinx .*|python docs/generate\.py", "tests/docs/test_docs.py"),
    (r"python proto/generate\.py.*", "tests/docs/test_commands.py"),
    (r"python -m benchmarks\.gpu.*", "tests/contract/test_gpu_bench.py"),
)

AS_SHOWN = r"echo2 link .*|echo-worker join ('|LINK).*"  # word for word in tests/e2e/test_commands.py

ONLY_READ = (
    (r"python -m pytest.*|pytest .*|ruff .*|python -m mypy", "they are what runs the tests and checks"),
    (r"python -m benchmarks\.\w+.*", "minutes of measuring each"),
    (r"python -m tests\.soak.*", "half an hour of storms"),
    (r"python -m tests\.contract\.test_golden", "writes the golden bytes anew; the test beside it compares with those kept"),
    (r"python -m tests\.contract\.families", "writes the table of docs/models.md; the test beside it walks it"),
    (r"python -m tests\.mutants\.run", "hours: each defect is looked for by tests and seeds"),
    (r"python -m tests\.redteam\.run.*", "measures attackers one at a time; tests/redteam/test_messages.py runs the same ones"),
    (r"echo2 demo --model smollm2.*", "a quarter of an hour with a model from a package; tests/unit/cli/test_demo_llm.py makes it"),
    (r"python docs/record\.py.*", "needs npm, Chromium and two minutes; makes pictures"),
    (r"echo2 demo .*--engine vllm.*", "needs vLLM's environment; make test-vllm runs the engine in it"),
    (r"python -m tests\.security\.dependency_audit", "asks an advisory service on the Internet"),
    (r"(python -m )?pip install .*|git clone .*|apt install .*", "need a package index"),
    (r"python -m tests\.size", "counts lines"),
    (r"python -m tests.lock", "makes constraints.txt anew, of the versions that happen to be installed"),
    (r"docker .*|kubectl .*|sky .*|systemctl .*", "need a container engine, a cluster, a cloud or an init system"),
    (r"echo2 (plan|run|status)|echo-worker join( ….*| --help)?", "named; what is given of it is parsed by tests/docs/test_docs.py"),
)  # fmt: skip


def _in_comments(path: Path) -> Iterator[str]:
    for line in re.findall(r"^#(.*)", path.read_text(), re.MULTILINE):
        yield from re.split(r"\s{2,}| ; ", line.strip())
        yield from re.findall(r"`([^`]+)`", line)


def shown() -> list[str]:
    found = set()
    lines = [line for page in PAGES if page.parent.name != "reference" for line in _code_lines(page.read_text())]
    lines += [line for path in COMMENTED for line in _in_comments(path)]
    lines += list(_code_lines((ROOT / "examples" / "README.md").read_text()))
    for line in lines:
        command = re.split(r"\s+#|   |: ", line.strip())[0].strip()
        if command.split(" ")[0] in PROGRAMS and " " in command:
            found.add(command)
    return sorted(found)


COMMANDS = shown()


@cache
def recipe(command: str) -> tuple[str, ...]:
    """What a make command would run, by make itself, without installing anything."""
    made = ["-o", ".venv/.installed", "-o", ".venv/.installed-dev", "-o", ".venv-vllm/.installed"]
    words = [*made, *shlex.split(command.replace("NAME", "links").replace("SEED=n", "SEED=3").replace("…", "3"))[1:]]
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    lines = [re.sub(r"^(PYTHONPATH=\. )?\.venv(-vllm)?/bin/", "", line) for line in done.stdout.splitlines()]
    lines = [re.split(r" >|; ", re.sub(r"^python3(?= )", "python", line))[0] for line in lines]
    return tuple(line.strip() for line in lines if line.split(" ")[0] in PROGRAMS | {"ruff"})


def commands_of(command: str) -> tuple[str, ...]:
    if command == "make bench":
        return tuple(f"python -m benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("bench_*.py"))
    return recipe(command) if command.startswith("make ") else (command,)


SINGLE = sorted({single for command in COMMANDS for single in commands_of(command)})


@cache
def strings_of(file: str, function: str = "") -> set[str]:
    """The strings in a file of tests, or in one of its functions, their words and the ends of paths."""
    tree: ast.AST = ast.parse((ROOT / file).read_text())
    if function:
        (tree,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = {word for text in found for word in (text, *text.split(), text.rpartition("/")[2])}
    if "echo2.cli.main" in words:
        words.add("echo2")  # the program, by its module
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    starts_cluster = "Cluster" in names if function else "e2e" in file and file != "tests/e2e/cluster.py"
    return words | (strings_of("tests/e2e/cluster.py") if starts_cluster else set())


def words_that_must_be_run(command: str) -> set[str]:
    """Program or module, command word, flags: what stands for the command whatever its values."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words[0] = "torch.distributed.run"
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    elif words[0] == "python":
        words = [Path(words[1]).name, *words[2:]]
    named = words[1:2] if len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]) else []
    flags = [word.split("=")[0] for word in words[1:] if re.match(r"--[a-z]", word)]
    return {words[0], *named, *flags}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_is_run_or_says_why_not(command: str) -> None:
    singles = commands_of(command)
    assert singles, f"`{command}` runs nothing that is known"
    for single in singles:
        if re.fullmatch(f"{RUN_HERE}|{AS_SHOWN}", single):
            continue
        if by := next((where for pattern, *where in BY if re.fullmatch(pattern, single)), None):
            missing = words_that_must_be_run(single) - strings_of(*by)
            assert not missing, f"{' '.join(by)} does not run `{single}`: no {sorted(missing)} in it"
            continue
        assert any(re.fullmatch(pattern, single) for pattern, _ in ONLY_READ), f"no test runs `{single}`"


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


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if re.fullmatch(RUN_HERE, one) and one.startswith("echo2")]
)
def test_it_runs(
    command: str, quick_start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command.replace("NAME.toml", "slow-uplink.toml"))
    monkeypatch.chdir(quick_start)
    monkeypatch.setenv("HOME", str(quick_start))
    code = MAINS[program](words)
    printed = capsys.readouterr()
    assert code == 0 or (words[0] == "doctor" and code == 6 and "BAD" in printed.out), printed.err
    assert printed.out.strip()
    assert command != "echo2 plan run.toml" or "not feasible" not in printed.out, "what it would rent is enough"


def test_the_fuzzers_corpus_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {path.name for path in fuzz_targets.CORPUS.iterdir()}
    monkeypatch.setattr(fuzz_targets, "CORPUS", tmp_path)
    fuzz_targets.main()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_files_that_a_command_names_are_there() -> None:
    for command in SINGLE:
        for word in shlex.split(command):
            if re.match(r"(tests|deploy|examples|docs|proto)/", word) and "NAME" not in word:
                assert (ROOT / word).exists(), command


class _Parsed(BaseException):
    """Past every `except Exception`: nothing after the arguments is run."""


def _only_parse(self: argparse.ArgumentParser, args: object = None, namespace: object = None) -> object:
    _, rest = argparse.ArgumentParser.parse_known_args(self, args, namespace)  # type: ignore[call-overload]
    if rest:
        self.error(f"unknown: {rest}")
    raise _Parsed


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "command", [one for one in SINGLE if re.match(r"python (-m (benchmarks|tests|echo2)\.|docs/|proto/)", one)]
)
def test_arguments_of_a_module_are_its_own(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = "swaps" if "bench_worker" in command else "grid"
    words = shlex.split(re.sub(r"\[|\](\.\.\.)?", "", command.replace("…", "3").replace("PART", part)))
    path, given = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    spec = importlib.util.find_spec(path) if words[1] == "-m" else None
    file = ROOT / path if spec is None else Path(str(spec.origin))
    if "parse_args" not in file.read_text():
        assert all(f'"{word}" in sys.argv' in file.read_text().replace("not in", "in") for word in given), command
        return
    monkeypatch.setattr(sys, "argv", [str(file), *given])
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    with mock.patch.object(argparse.ArgumentParser, "parse_args", _only_parse), pytest.raises(_Parsed):
        runpy.run_path(str(file), run_name="__main__") if spec is None else runpy.run_module(path, run_name="__main__")


def test_what_torchrun_starts_is_a_learner() -> None:
    commands = [command for command in COMMANDS if command.startswith("torchrun")]
    assert commands
    for words in map(shlex.split, commands):
        assert _parses(["echo-learner", *words[words.index("echo2.cli.learner") + 1 :]]) == []


def test_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [command for command in COMMANDS if command.startswith("pip install")]
    named = {extra for command in installs for extra in re.findall(r"\[([a-z,]+)\]", command)}
    assert named and {one for extra in named for one in extra.split(",")} <= extras.keys()
    for command in installs:
        assert re.search(r"['\"]\.(/echo2)?\[", command), f"{command}: echo2 is installed from a clone"


FOREIGN = {  # what our pages use of other people's programs; a flag that is not here was not looked up
    "docker build": {"-f", "-t", "--build-arg"},
    "docker run": {"--gpus", "--shm-size", "-v"},
    "docker compose": {"-f", "--build", "--scale", "--profile"},
    "kubectl apply": {"-f"},
    "kubectl create": {"--from-file"},
    "kubectl scale": {"--replicas"},
    "sky launch": {"-c", "--secret", "--env", "--use-spot"},
    "systemctl enable": {"--now"},
}


@pytest.mark.parametrize("command", [one for one in COMMANDS if re.match("docker |kubectl |sky |systemctl ", one)])
def test_commands_of_others_name_what_is_in_deploy(command: str) -> None:
    words = shlex.split(command)
    flags = {word.split("=")[0] for word in words if word.startswith("-")}
    assert flags <= FOREIGN[" ".join(words[:2])], command
    text = "\n".join(path.read_text() for path in (ROOT / "deploy").rglob("*") if path.is_file())
    for flag, value in itertools.pairwise(words):
        name = value.split("=")[0]
        if flag in ("--secret", "--env"):
            task = yaml.safe_load(next(ROOT / word for word in words if word.endswith(".yaml")).read_text())
            assert name in task["secrets" if flag == "--secret" else "envs"], command
        elif flag in ("--scale", "exec", "--profile"):
            compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
            profiles = {profile for service in compose.values() for profile in service.get("profiles", [])}
            assert name in (profiles if flag == "--profile" else compose), command
        elif flag in ("generic", "configmap", "deployment"):
            assert re.search(rf"(secretName|configMap: {{name|metadata: {{name): {name}\b", text), command
    if words[0] == "systemctl":
        assert (ROOT / "deploy" / "systemd" / f"{words[-1]}.service").exists()


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
