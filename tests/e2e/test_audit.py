"""The audit in a run of real processes: a worker that makes its numbers up is banned, an honest one is not."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cluster import Cluster

RUN_WITHIN_S = 150


def test_a_worker_that_fabricates_its_log_probabilities_is_banned(tmp_path: Path, run_config: str) -> None:
    config = run_config.replace("steps = 30", "steps = 12")
    with Cluster(tmp_path, config, workers=2) as cluster:
        cluster.commands["w1"] = ["tests.e2e.cheating_worker", *cluster.commands["w1"][1:]]
        cluster.start_all()
        assert cluster.processes["w1"].wait(RUN_WITHIN_S) == 4, cluster.log("w1")[-2000:]
        assert "is banned: audit: its log-probabilities are not those of the version that it claims" in cluster.log(
            "w1"
        )
        del cluster.processes["w1"]
        assert cluster.wait("learner", RUN_WITHIN_S) == 0
        last = cluster.metrics()[-1]
        assert last["step"] == 12 and last["audit/accused_workers"] == 1
        assert cluster.processes["w0"].poll() is None, "the honest one works on"
