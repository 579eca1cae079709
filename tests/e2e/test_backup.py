"""What docs/runbook.md says of backups, done: a copy of a run at work, all machines lost, and the run goes on from the copy."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.test_run import assert_run_ended_well, trained_groups
from tests.patience import WAIT_S

STEPS = 11


def back_up(run: Path, into: Path) -> None:
    """Of the run's folder, while coordinator and learner work in it."""
    shutil.copytree(run / "links", into / "links")
    shutil.copytree(run / "coordinator", into / "coordinator", ignore=shutil.ignore_patterns("state.sqlite*", "lock"))
    state, copy = run / "coordinator" / "state.sqlite", into / "coordinator" / "state.sqlite"
    if tool := shutil.which("sqlite3"):
        subprocess.run([tool, str(state), f".backup '{copy}'"], check=True, timeout=WAIT_S, capture_output=True)
    else:
        with sqlite3.connect(state) as source, sqlite3.connect(copy) as target:
            source.backup(target)
    for name in ("checkpoints", "journal", "node"):
        shutil.copytree(run / "learner" / name, into / "learner" / name)
    shutil.copy(run / "learner" / "run.json", into / "learner" / "run.json")


def test_a_run_goes_on_from_its_backup_in_other_folders(tmp_path: Path, run_config: str) -> None:
    config = run_config.replace("steps = 30", f"steps = {STEPS}")
    with Cluster(tmp_path / "lost", config.replace(f"{tmp_path}/runs", f"{tmp_path}/lost/runs")) as lost:
        lost.start_all()
        lost.wait_until(lambda: lost.step() >= 6, "step 6")
        kept = tmp_path / "kept"
        back_up(lost.run_folder, kept)
        lost.wait_until(lambda: lost.step() >= 8, "work that the backup does not have")
    shutil.rmtree(lost.run_folder)

    with Cluster(tmp_path / "new", config.replace(f"{tmp_path}/runs", f"{tmp_path}/new/runs"), workers=1) as new:
        shutil.copytree(kept, new.run_folder, dirs_exist_ok=True)
        newest = max((new.run_folder / "learner" / "checkpoints").glob("step-????????"))
        checkpoint = int(newest.name.removeprefix("step-"))
        assert 0 < checkpoint <= 6
        new.start_all()
        assert new.wait("learner") == 0, new.log("learner")[-3000:]
        assert_run_ended_well(new, STEPS, 4, kills=STEPS)  # metrics.jsonl begins anew
        assert f"checkpoint of step {checkpoint}" in new.log("learner")
        assert Counter(trained_groups(new).values()) == dict.fromkeys(range(STEPS), 12), "a step lost or doubled groups"
