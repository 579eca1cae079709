"""The stock SDK of Tinker, in a process of its own, trains a run of real daemons: unless it is installed here, this is skipped."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import ROOT, Cluster, environment_of, small_run
from tests.patience import WAIT_S

pytest.importorskip("tinker", reason="needs Tinker's SDK: pip install '.[tinker]'")


def client_of(cluster: Cluster, model: Path, what: str) -> dict[str, Any]:
    """What the SDK's process says in its last line, once the gateway answers."""
    folder = cluster.run_folder / "learner"

    def door() -> tuple[str, str]:
        return (folder / "gateway.url").read_text().strip(), (folder / "gateway.key").read_text().strip()

    def is_up() -> bool:
        try:
            url, key = door()
            headers = {"x-api-key": f"tml-{key}"}
            return httpx.get(f"{url}/api/v1/healthz", headers=headers, trust_env=False).status_code == 200
        except (OSError, httpx.HTTPError):
            return False

    cluster.wait_until(is_up, "the gateway")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/e2e/tinker_client.py"), *door(), str(model), what],
        env={**environment_of(cluster.folder), "TINKER_TELEMETRY": "0"},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.extras
def test_the_stock_sdk_teaches_reinforces_saves_and_goes_on_after_a_kill(tmp_path: Path, base_model: Path) -> None:
    config = small_run(tmp_path, base_model).replace("[model]", '[model]\nweights_dtype = "float32"')
    config += "[staleness]\nbound = 1\n"
    with Cluster(tmp_path, config) as cluster:
        cluster.commands["learner"][1:2] = ["serve", "--trains"]
        cluster.start_all()
        first = client_of(cluster, base_model, "first")
        losses = first["losses"]
        assert losses[-1] < 0.3 * losses[0]
        assert first["scored"] < losses[-1] and first["base"] == pytest.approx(losses[0], rel=1e-3)
        taken, foreign, loss, step, image = first["refusals"]
        assert "one training client a run" in taken and "the run's model.path, got 'Qwen/Qwen3-8B'" in foreign
        assert "loss_fn: expected one of cross_entropy" in loss and "no step is made" in step and "loss_fn" in step
        assert "images and sound are not trained on" in image
        teacher = first["teacher"]
        assert teacher["after"] == teacher["before"] != teacher["newest"], "a name stands for one version's weights"
        sampled, scored = teacher["gone"]
        assert "which workers may hold" in sampled and "expected one with a name" in scored

        cluster.kill("learner")
        cluster.start("learner")
        second = client_of(cluster, base_model, first["saved"])
        assert second["losses"][0] < losses[-1], "it goes on from what was saved, a step later"
        rewards = second["rewards"]
        assert rewards[0] < 0.4 and sum(rewards[-2:]) / 2 > 0.7, rewards
