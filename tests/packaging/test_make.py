"""Which torch `make` installs, and what it says; pip, uv and nvidia-smi are scripts that note how they are called."""

import os
import subprocess
import tomllib
from pathlib import Path

from tests.packaging.installed import ROOT

_PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *+cpu*) [ -n "$HAS_CPU" ] || { echo "ERROR: no such build" >&2; exit 1; } ;;
  *"-m uv"*) [ -n "$HAS_UV" ] || { echo "error: no route" >&2; exit 2; } ;;
esac
echo "Collecting torch"
echo "  Downloading torch-2.13.0.whl.metadata (31 kB)"
echo "  Downloading torch-2.13.0.whl (191.8 MB)"
"""
CPU, CUDA = "torch==2.13.0+cpu", "torch==2.13.0"


class Machine:
    def __init__(self, folder: Path, gpu: bool = False) -> None:
        self._folder = folder
        self._script("venv/bin/python", _PYTHON)
        self._script("bin/nvidia-smi", f"#!/bin/sh\n{'echo GPU 0: L4' if gpu else 'exit 9'}\n")

    def _script(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)

    def make(self, *words: str, **has: str) -> tuple[int, str, list[str]]:
        """Exit code, output, and the last words of each call of pip and uv."""
        calls = self._folder / "calls"
        calls.write_text("")
        environment = {"PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), **has}
        command = ["make", "--no-print-directory", f"VENV={self._folder / 'venv'}", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def chosen(tmp_path: Path, gpu: bool) -> str:
    """The target of torch that `make` goes on with."""
    machine = Machine(tmp_path / str(gpu), gpu)
    stamp = tmp_path / str(gpu) / "venv" / ".installed"
    _, output, _ = machine.make("-n", str(stamp))
    said = {"with CUDA: 2.7 GB": "cuda", "CPU build, as nvidia-smi shows no GPU": "cpu"}
    return next((which for text, which in said.items() if text in output), output)


def test_without_a_gpu_the_cpu_build_is_installed_and_with_one_cuda(tmp_path: Path) -> None:
    assert chosen(tmp_path, gpu=False) == "cpu"
    assert chosen(tmp_path, gpu=True) == "cuda"


def test_the_cpu_build_comes_from_pip_s_indexes_or_by_uv_and_never_silently_with_cuda(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    code, output, calls = machine.make("torch-cpu", HAS_CPU="1")
    assert (code, [call.split()[-1] for call in calls]) == (0, [CPU])
    assert "0.2 GB to fetch" in output and "  Downloading torch-2.13.0.whl (191.8 MB)" in output
    assert "metadata" not in output and "Collecting" not in output
    code, output, calls = machine.make("torch-cpu", HAS_UV="1")
    assert (code, [call.split()[-1] for call in calls]) == (0, [CPU, "uv", CUDA])
    assert calls[-1].startswith("-m uv pip install") and "--torch-backend cpu" in calls[-1]
    code, output, calls = machine.make("torch-cpu")
    assert code != 0 and "make demo TORCH_INDEX=ADDRESS; or take the ordinary build, 6.4 GB with CUDA" in output
    assert not [call for call in calls if "-m pip" in call and call.endswith(CUDA)]
    _, _, calls = machine.make("torch-cpu", "TORCH_INDEX=file:///mirror", HAS_CPU="1")
    assert "--extra-index-url file:///mirror" in calls[0], "beside pip's own index, which has the rest"


def test_the_release_of_torch_is_the_one_that_the_project_pins() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    version = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH_VERSION"))
    assert f"torch=={version.split()[-1]}" in extras["engine"] and f"torch=={version.split()[-1]}" in extras["learner"]
