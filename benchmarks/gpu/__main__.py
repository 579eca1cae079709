"""Everything that is to be known on a GPU, by one command that needs no network and installs nothing.

    make gpu                                              # every part, on the first CUDA device
    python -m benchmarks.gpu --only publishing            # one part
    python -m benchmarks.gpu --device cpu --small --out gpu.json   # the same code on tiny shapes, in a minute

Each part runs in a process of its own, within `--seconds`; one that fails, or lacks a package, is a row that says so, and
the others go on. Rows are written after every part, to benchmarks/results/gpu.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"


@dataclass(frozen=True, slots=True)
class Part:
    """A module with `run(setup)`, whose rows are kept as they come, and the packages without which it cannot run."""

    module: str
    needs: tuple[str, ...]


LEARNER_NEEDS = ("torch", "transformers", "safetensors", "numba", "numpy", "cryptography", "zstandard", "xxhash")
PARTS: Mapping[str, Part] = {
    "attention": Part("benchmarks.gpu.attending", ("torch",)),
    "step": Part("benchmarks.gpu.stepping", LEARNER_NEEDS),
    "states": Part("benchmarks.gpu.states", LEARNER_NEEDS),
    "publishing": Part("benchmarks.gpu.publishing", ("torch", "numba", "numpy", "zstandard", "xxhash")),
    "noise": Part("benchmarks.gpu.noise", LEARNER_NEEDS),
    "vllm": Part("benchmarks.gpu.contract", ("vllm", "pytest", *LEARNER_NEEDS)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=600.0, help="of one part at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part, arguments.device, arguments.small, arguments.out)
        return 0
    if missing := absent(("torch",)):
        print(f"expected torch in {sys.executable}, found no {missing[0]}")
        return 1
    import torch

    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            f"expected a CUDA device, torch {torch.__version__} sees none; --device cpu --small tries the code itself"
        )
        return 1
    print(machine(arguments.device))
    rows: list[dict[str, object]] = [{"name": "machine", "value": None, "unit": "", "target": None, "better": "higher",
                                      "why": machine(arguments.device)}]  # fmt: skip
    for name in arguments.only:
        rows += rows_of_part(name, arguments)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(str(row.get("why", "")).startswith("failed") for row in rows) else 0


def machine(device: str) -> str:
    import torch

    found = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return f"{found}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def absent(packages: Sequence[str]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


def rows_of_part(name: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """In a process of its own, so that a kernel that hangs or a device that is full ends this part alone."""
    if missing := absent(PARTS[name].needs):
        return [told(name, f"not installed: {', '.join(missing)}")]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--part",
            name,
            "--device",
            arguments.device,
            "--out",
            str(out),
        ]
        try:
            done = subprocess.run(
                [*command, *(["--small"] if arguments.small else [])], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                timeout=arguments.seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            ends = [told(name, f"failed: not done after {arguments.seconds:g} s")]
        else:
            ends = []
            if done.returncode:
                lines = [line for line in done.stderr.strip().splitlines() if line]
                print(done.stderr, file=sys.stderr)
                ends = [told(name, f"failed with {done.returncode}: {lines[-1] if lines else 'without a word'}")]
        rows: list[dict[str, object]] = json.loads(out.read_text()) if out.exists() else []
    print(f"{name}: {time.monotonic() - began:.0f} s")
    for row in rows:
        value, target = row["value"], row["target"]
        shown = f"{value:>12.4g} {row['unit']}" if isinstance(value, int | float) else f"{'-':>12} {row.get('why', '')}"
        print(f"  {row['name']:<84} {shown}" + (f"  (target {target:g})" if isinstance(target, int | float) else ""))
    return rows + ends


def told(name: str, why: str) -> dict[str, object]:
    print(f"{name}: {why}")
    return {"name": f"part {name}", "value": None, "unit": "", "target": None, "better": "higher", "why": why}


def run_part(name: str, device: str, is_small: bool, out: Path) -> None:
    import torch

    from benchmarks.gpu.setup import Setup, write_rows

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(torch.device(device), is_small, Path(folder))
        rows = []
        for row in importlib.import_module(PARTS[name].module).run(setup):
            rows.append(row)
            write_rows(out, rows)


if __name__ == "__main__":
    sys.exit(main())
