"""`echo2 plan --live` and `--history` against a real coordinator: what the operator reads, the market in it, who may ask."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from echo2.base.ids import PeerId
from echo2.cli.main import main
from echo2.cli.operator import OperatorClient
from echo2.cli.plan_live import history_lines, live_lines
from echo2.coordinator.lease_events import WorkerDelivered
from echo2.cost_model.offers import MarketOffer
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import Node, options, play, running
from tests.unit.coordinator.test_sightings import CONFIG

MARKET = [
    MarketOffer("runpod", "4090", "eu-cz-1", "RTX4090", 1, 24.0, 0.34, True),
    MarketOffer("aws", "p5", "us-east-1", "H100", 8, 80.0, 40.0, False),
    MarketOffer("aws", "g4", "us-east-1", "T4", 1, 16.0, 0.5, False),
]


async def small_run(daemon: Any) -> tuple[Node, Node]:
    """A learner that needs 3.2 rollouts/s, and one worker that makes 1."""
    learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
    await learner.hello(
        rollouts_per_step=192, model_config_json=json.dumps(CONFIG).encode(), longest_sequence_tokens=2560, step_limit=400,
        full_snapshot_bytes=10**9, link=pb.Link(uplink_bytes_per_s=1e8, downlink_bytes_per_s=1e8),
    )  # fmt: skip
    await worker.hello(gpu="1 x NVIDIA GeForce RTX 4090", price_usd_per_hour=0.35)
    beat = pb.Heartbeat(
        has_version=True, version=0, running_sequences=16, rollouts_per_s=1.0, tokens_per_s=1000.0, rollout_s_mean=16.0,
        rollout_s_p95=32.0, link=pb.Link(uplink_bytes_per_s=1e7, downlink_bytes_per_s=1e8),
    )  # fmt: skip
    await worker.call.write(pb.WorkerMessage(heartbeat=beat))
    report = pb.LearnerReport(step=1, train_s=60.0, trained_rollouts=320, trained_tokens=320_000, utilisation=0.31)
    await learner.call.write(pb.LearnerMessage(report=report))
    hub = daemon.hub
    hub.book.worth.told([WorkerDelivered(PeerId(worker.credentials.identity.peer_id), 16, 16.0)], hub.clock.now())
    async with asyncio.timeout(30):
        while hub.plan is None:
            await asyncio.sleep(0.1)
    return learner, worker


def test_a_starved_run_is_told_what_to_rent(tmp_path: Path) -> None:
    async def scene() -> None:
        chosen = options(tmp_path / "run", plan_interval_s=0.5, suspect_after_s=30.0, gone_after_s=60.0)
        async with running(chosen) as daemon:
            async with OperatorClient(daemon.links["operator"], tmp_path / "me") as operator:
                early = await operator.outlook(MARKET, "a test", 0.0)
                assert live_lines(early, 0.0)[0].startswith("nothing to advise yet: the run waits for")
                nodes = await small_run(daemon)
                told = await operator.outlook(MARKET, "a test", 5.0)
                without = await operator.outlook(MARKET, "a test", 0.0)
            text = "\n".join(live_lines(told, 5.0))
            assert (
                "the learner trains 31% of the time" in text and "workers make 1 of the 3" in text and "a test" in text
            )
            first = told["actions"][0]
            assert (first["what"], first["kind"], first["count"]) == ("rent", "RTX4090", 3), told["actions"]
            assert "1. rent 3 x RTX4090 spot at runpod in eu-cz-1 at $0.34/h each" in text
            assert "+$1.02/h" in text and "1 machine of this kind was measured" in text and "earlier" in text
            assert first["after"]["utilisation"]["expected"] > 0.9
            prices = [one["actions"][0]["after"]["usd_per_million_tokens"]["expected"] for one in (told, without)]
            assert prices[0] > 1.5 * prices[1], "the learner's machines cost, too"
            assert all(one.get("kind") != "T4" for one in told["actions"])
            assert history_lines(told["history"])[0].startswith("utilisation: nothing to compare yet")
            for node in nodes:
                await node.close()

    play(scene)


def test_a_worker_is_not_told_the_run_s_outlook_nor_an_operator_that_offers_nonsense(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path / "run")) as daemon:
            worker, operator = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.OPERATOR)
            path = "/echo2.v1.Operator/GetOutlook"
            bad = pb.OfferedMachine(provider="p", gpu="L4", gpu_count=99, gpu_memory_gib=24, usd_per_hour=1)
            for node, request, word in (
                (worker, pb.GetOutlookRequest(), "expected the role operator"),
                (operator, pb.GetOutlookRequest(offers=[bad]), "gpu_count"),
                (operator, pb.GetOutlookRequest(offers=[bad] * 600), "offers"),
                (operator, pb.GetOutlookRequest(learner_usd_per_hour=float("nan")), "learner_usd_per_hour"),
            ):
                with pytest.raises(Exception, match=word):
                    await node.channel.unary_unary(path)(request.SerializeToString(), timeout=10)
            for node in (worker, operator):
                await node.close()

    play(scene)


def test_history_says_how_predictions_came_out() -> None:
    row = {"predicted": 0.95, "low": 0.9, "high": 1.0, "measured": 0.88, "about": "kappa = 1, 4 workers"}
    told = {"utilisation": {"count": 1, "open": 0, "error": 0.07, "bias": -0.07, "held": 0, "newest": [row]}}
    lines = history_lines(told)
    assert "off by 7.0% on average" in lines[0] and "0 of 1 within" in lines[0]
    assert lines[1].endswith("came 0.88: outside; kappa = 1, 4 workers")
    assert history_lines({}) == ["nothing was predicted yet"]


def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the run's folder and by its link, as a person types them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))

    async def scene() -> None:
        async with running(options(tmp_path / "run")) as daemon:
            folder = str(tmp_path / "run")
            for command in (
                ["echo2", "plan", "--live", folder, "--learner-usd-per-hour", "20", "--offline"],
                ["echo2", "plan", "--live", daemon.links["operator"], "--json", "--offline"],
                ["echo2", "plan", "--history", folder],
            ):
                assert await asyncio.to_thread(main, command[1:]) == 0, command

    play(scene)
    shown = capsys.readouterr().out
    assert shown.startswith("nothing to advise yet: the run waits for the learner")
    assert '"is_known": false' in shown and "utilisation: nothing to compare yet; 0 predictions are open" in shown
    assert main(["plan", "--live", str(tmp_path / "run"), "--learner-usd-per-hour", "-1"]) != 0
