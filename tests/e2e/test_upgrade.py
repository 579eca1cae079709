"""What docs/runbook.md says of upgrades: this release goes on with a run that an earlier one began."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.releases import FIXTURES, config_of, unpack
from tests.e2e.test_run import RUN_WITHIN_S, assert_run_ended_well, trained_groups

STEPS = 20
RELEASES = sorted(FIXTURES.glob("run-*.tar.xz"))


def test_there_is_a_run_of_each_release() -> None:
    assert "run-0.1.0.tar.xz" in [release.name for release in RELEASES]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_run_of_an_earlier_release_goes_on(tmp_path: Path, release: Path) -> None:
    with Cluster(tmp_path, config := config_of(tmp_path, STEPS), workers=1) as cluster:
        unpack(release, tmp_path)
        (cluster.run_folder / "run.toml").write_text(config)
        checkpoints = cluster.run_folder / "learner" / "checkpoints"
        stopped_at = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-????????"))
        cluster.start_all()
        assert cluster.wait("learner", RUN_WITHIN_S) == 0, cluster.log("learner")[-3000:]
        assert_run_ended_well(cluster, STEPS, 4, kills=STEPS)  # metrics.jsonl begins anew
        assert f"checkpoint of step {stopped_at}" in cluster.log("learner")
        assert Counter(trained_groups(cluster).values()) == dict.fromkeys(range(STEPS), 4), (
            "a step lost or doubled groups"
        )
        assert "bad" not in cluster.log("w0"), "it took what the earlier release had fetched"
