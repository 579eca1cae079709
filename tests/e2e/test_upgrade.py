"""What docs/runbook.md says of upgrades: this release goes on with a run that an earlier one began."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, environment_of
from tests.e2e.releases import FIXTURES, config_of, unpack
from tests.e2e.test_run import RUN_WITHIN_S, assert_run_ended_well, trained_groups

RELEASES = sorted(FIXTURES.glob("run-*.tar.xz"))


def goes_on(release: Path, folder: Path) -> None:
    with Cluster(folder, "", workers=1) as cluster:
        unpack(release, folder)
        checkpoints = cluster.run_folder / "learner" / "checkpoints"
        stopped_at = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-????????"))
        steps = stopped_at + 12
        (cluster.run_folder / "run.toml").write_text(config_of(folder, steps))
        cluster.start_all()
        assert cluster.wait("learner", RUN_WITHIN_S) == 0, cluster.log("learner")[-3000:]
        assert_run_ended_well(cluster, steps, 4, kills=steps)  # metrics.jsonl begins anew
        assert f"checkpoint of step {stopped_at}" in cluster.log("learner")
        trained = Counter(trained_groups(cluster).values())
        assert trained == dict.fromkeys(range(steps), 4), "a step lost or doubled groups"
        assert "bad" not in cluster.log("w0"), "it took what the earlier release had fetched"


def test_there_is_a_run_of_each_release() -> None:
    assert "run-0.1.0.tar.xz" in [release.name for release in RELEASES]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_run_of_an_earlier_release_goes_on(tmp_path: Path, release: Path) -> None:
    goes_on(release, tmp_path)


@pytest.mark.soak
def test_what_is_kept_of_this_release_will_go_on(tmp_path: Path) -> None:
    made = tmp_path / "run-next.tar.xz"
    command = [sys.executable, "-m", "tests.e2e.releases", str(made)]
    subprocess.run(command, check=True, timeout=RUN_WITHIN_S, env=environment_of(tmp_path))
    goes_on(made, tmp_path / "later")
