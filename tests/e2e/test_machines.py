"""Real workers through the `local` provider, rented and given back as an operator does, through a kill of the coordinator."""

from __future__ import annotations

import json
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster
from tests.patience import WAIT_S

OFFERS = """
[[offer]]
name = "here"
provider = "local"
usd_per_hour = 3.6
machines_max = 2
[offer.settings]
arguments = "--config {config}"
"""


class Page:
    """The JSON API of the dashboard, as a script of the operator's."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=WAIT_S) as answer:
            return json.load(answer)

    def act(self, path: str, **body: str) -> Any:
        headers = {"x-echo2-csrf": self.get("/api/session")["csrf"], "content-type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.load(answer)

    def machines(self) -> dict[str, Any]:
        return {one["machine_id"]: one for one in self.get("/api/state")["machines"]["machines"]}

    def is_up(self) -> bool:
        try:
            return bool(self.get("/readyz")["status"] == "ready")
        except OSError:
            return False


def test_a_rented_worker_trains_survives_the_coordinator_and_is_given_back(tmp_path: Path, run_config: str) -> None:
    offers, config = tmp_path / "offers.toml", tmp_path / "runs" / "trial" / "run.toml"
    offers.write_text(OFFERS.format(config=config))
    text = run_config.replace(
        "[coordinator]", f'[coordinator]\nplanner_mode = "advise"\noffers = "{offers}"\nusd_per_hour_cap = 8'
    )
    page = Page(tomllib.loads(text)["coordinator"]["dashboard_port"])
    with Cluster(tmp_path, text, workers=0) as cluster:
        cluster.start_all()
        cluster.wait_until(page.is_up, "the page")
        try:
            machine = page.act("/api/machines", offer="here", reason="to see it work")
            machine_id = machine["machine_id"]
            cluster.wait_until(lambda: cluster.step() >= 1, "a step made from the rented worker's rollouts")
            shown = page.machines()[machine_id]
            assert (shown["state"], shown["workers"], shown["price"]) == ("running", [machine_id], 3.6)
            cluster.kill("coordinator")
            cluster.start("coordinator")
            cluster.wait_until(page.is_up, "the page after the kill")
            step = cluster.step()
            cluster.wait_until(lambda: cluster.step() >= step + 2, "steps after the kill")
            shown = page.machines()[machine_id]
            assert (shown["state"], shown["workers"]) == ("running", [machine_id])
        finally:
            for one in [one for one in page.machines().values() if one["state"] != "gone"]:
                page.act("/api/machines/release", machine_id=one["machine_id"], reason="seen")
        state = page.get("/api/state")
        assert page.machines()[machine_id]["state"] == "gone"
        journal = [(one["action"], one["reason"]) for one in state["money"]["journal"] if one["whom"] == machine_id]
        assert journal[0] == ("rent", "to see it work")
        assert ("released", "seen") in journal
        assert 0 < state["money"]["spent"] < 1
        log = tmp_path / "runs" / "trial" / "local-workers" / "here" / machine_id / "worker.log"
        assert "Traceback" not in log.read_text()
