"""Rollouts that lie, against the real learner: choices between completions are found by the numbers of the lease, what cannot be
so is refused at once and its sender banned, and the run goes on with the honest worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import base_model, run_config  # noqa: F401

RUN_WITHIN_S = 150


@pytest.mark.parametrize(
    ("liar", "text"),
    [
        (
            "tests.redteam.choosing_worker",
            "is banned: audit: its tokens are not those that the random numbers of its leases pick",
        ),
        pytest.param(  # what refuses it has tests of its own (tests/unit/learner/test_plausible.py)
            "tests.redteam.forging_worker", "of its reports could not be true", marks=pytest.mark.soak
        ),
    ],
    ids=["chooses", "forges raw numbers"],
)
def test_a_worker_that_lies_is_banned_and_the_run_goes_on(
    tmp_path: Path,
    run_config: str,  # noqa: F811
    liar: str,
    text: str,
) -> None:
    config = run_config.replace("steps = 30", "steps = 9")
    with Cluster(tmp_path, config, workers=2) as cluster:
        cluster.commands["w1"] = [liar, *cluster.commands["w1"][1:]]
        cluster.start_all()
        assert cluster.processes["w1"].wait(RUN_WITHIN_S) == 4, cluster.log("w1")[-2000:]
        assert text in cluster.log("w1")
        del cluster.processes["w1"]
        assert cluster.wait("learner", RUN_WITHIN_S) == 0
        last = cluster.metrics()[-1]
        assert last["step"] == 9 and last["ratio/max"] < 20.1
        assert cluster.wait("w0", RUN_WITHIN_S) == 0, "the honest one worked until the run had finished"
