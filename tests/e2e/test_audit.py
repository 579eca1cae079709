"""The audit in a run of real processes: a worker that makes its numbers up is banned, an honest one is not."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cluster import Cluster


def test_a_worker_that_fabricates_its_log_probabilities_is_banned(tmp_path: Path, run_config: str) -> None:
    config = run_config.replace("steps = 30", "steps = 12")
    with Cluster(tmp_path, config, workers=2) as cluster:
        cluster.commands["w1"] = ["tests.e2e.cheating_worker", *cluster.commands["w1"][1:]]
        cluster.start_all()
        assert cluster.wait("w1") == 4, cluster.log("w1")[-2000:]
        assert "is banned: audit: its log-probabilities are not those of the version that it claims" in cluster.log(
            "w1"
        )
        del cluster.processes["w1"]
        assert cluster.wait("learner") == 0
        last = cluster.metrics()[-1]
        assert last["step"] == 12 and last["audit/accused_workers"] == 1
        assert cluster.wait("w0") == 0, "the honest one worked until the run had finished"
        assert_no_secret_is_logged(cluster)


def assert_no_secret_is_logged(cluster: Cluster) -> None:
    links = (cluster.run_folder / "links").iterdir()
    secrets = [
        path.read_text().strip() for path in links if path.name != "dashboard.url"
    ]  # an address, which is logged
    secrets += [link.partition("token=")[2] for link in secrets if "token=" in link]
    assert len(secrets) >= 5, "three links with their tokens, and the page's"
    for name in cluster.commands:
        text = cluster.log(name)
        assert text and not any(secret in text for secret in secrets), name
