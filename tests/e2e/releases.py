"""What a release leaves on disk, kept as files: a small run, stopped half-way. Made once, by that release itself:

    python -m tests.e2e.releases [FILE]

writes `tests/fixtures/run-RELEASE.tar.xz`, or FILE, and `test_upgrade.py` goes on with each from then on.
"""

from __future__ import annotations

import io
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

from echo2 import __version__
from echo2.cli.demo.model import ModelRecipe, make_model
from tests.e2e.cluster import Cluster, small_run

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
STOPPED_AFTER = 6
NOT_STATE = (".sock", "lock", ".jsonl")
"""Endings of files that a release needs not find."""


def config_of(folder: Path, steps: int) -> str:
    """Of a run below `folder`, whose model is in `folder/model`."""
    return small_run(
        folder, folder / "model", steps=steps, prompts=4, rollouts=4, eval_prompts=8, eval_every_steps=20,
        checkpoint_every_steps=3,
    )  # fmt: skip


def make(into: Path, folder: Path) -> None:
    make_model(folder / "model", ModelRecipe(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=32))
    with Cluster(folder, config_of(folder, 1000), workers=1) as cluster:
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= STOPPED_AFTER, 120, f"step {STOPPED_AFTER}")
        for name in ("learner", "w0", "coordinator"):
            cluster.kill(name, signal.SIGTERM)
            assert cluster.wait(name, 60) == 0, cluster.log(name)[-2000:]
    with tarfile.open(into, "w:xz") as packed:
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if name.split("/")[0] in ("model", "runs") and path.is_file() and not name.endswith(NOT_STATE):
                entry, content = tarfile.TarInfo(name), path.read_bytes()
                entry.size, entry.mode = len(content), path.stat().st_mode & 0o700
                packed.addfile(entry, io.BytesIO(content))


def unpack(release: Path, folder: Path) -> None:
    with tarfile.open(release) as packed:
        packed.extractall(folder, filter="data")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(sys.argv[1]) if sys.argv[1:] else FIXTURES / f"run-{__version__}.tar.xz", Path(folder))
