"""What to do next on the page, in a real Chromium: what an action would bring, renting and pausing by its button, the curves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from echo2.base.ids import PeerId
from echo2.coordinator.lease_events import WorkerDelivered
from echo2.coordinator.membership import Activation
from echo2.coordinator.options import PlannerMode
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.e2e.test_dashboard import WAIT_MS, browser, page_of, shoot
from tests.e2e.test_dashboard import pytestmark as needs_browser
from tests.unit.cli.test_plan_live import small_run
from tests.unit.coordinator.test_daemon import Node, options, running

pytestmark = needs_browser

OFFERS = """
[[offer]]
name = "by-hand"
provider = "manual"
gpu = "RTX 4090"
usd_per_hour = 0.40
machines_max = 4
"""
ALONE = 4.0  # rollouts/s, more than the learner of `small_run` needs
RECORD = {"what": "utilisation", "about": "kappa = 1, 1 workers", "at": 1.0, "measured_at": 9.0}
CAME = [
    {**RECORD, "predicted": 0.9, "low": 0.85, "high": 0.95, "measured": 0.88},
    {**RECORD, "predicted": 0.9, "low": 0.85, "high": 0.95, "measured": 0.7},
]


def beat(rate: float) -> pb.Heartbeat:
    return pb.Heartbeat(
        has_version=True, version=0, running_sequences=int(16 * rate), rollouts_per_s=rate, tokens_per_s=1000 * rate,
        rollout_s_mean=16.0, rollout_s_p95=32.0, link=pb.Link(uplink_bytes_per_s=1e7, downlink_bytes_per_s=1e8),
    )  # fmt: skip


@asynccontextmanager
async def beating(daemon: Any, more: tuple[str, ...] = ()) -> AsyncIterator[None]:
    """`small_run` with more workers, that are heard of until the end."""
    learner, *workers = [*await small_run(daemon), *[await _joins(daemon, name) for name in more]]
    report = pb.LearnerReport(step=1, train_s=60.0, trained_rollouts=320, trained_tokens=320_000, utilisation=0.31)

    async def beats() -> None:
        while True:
            await learner.say(report=report)
            for worker, rate in zip(workers, (1.0, ALONE, ALONE), strict=False):
                await worker.say(heartbeat=beat(rate))
            await asyncio.sleep(0.3)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for node in (learner, *workers):
            await node.close()


async def _fits(page: Any) -> None:
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_starved_run_rents_what_the_page_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    offers = tmp_path / "offers.toml"
    offers.write_text(OFFERS)

    async def scene() -> None:
        chosen = options(
            tmp_path / "run",
            plan_interval_s=0.5,
            offers_file=offers,
            usd_per_hour_cap=50.0,
            planner_mode=PlannerMode.ADVISE,
        )
        async with browser() as chromium, running(chosen) as daemon, AsyncExitStack() as stack:
            assert daemon.hub is not None
            daemon.hub.reckoning.track.restore(json.dumps({"records": CAME}))
            async with page_of(chromium, daemon, 1440, "light") as page:
                await page.locator("#next-limits").filter(has_text="Nothing to advise yet").wait_for(timeout=WAIT_MS)
                await stack.enter_async_context(beating(daemon))
                card = page.locator("#next-actions li").first
                await card.get_by_text("Rent 3 x RTX4090").wait_for(timeout=WAIT_MS)
                text = await card.inner_text()
                for told in (
                    "Utilisation",
                    "now ",
                    " to ",
                    "+$1.20/h",
                    "Per million useful tokens",
                    "earlier",
                    "Offer by-hand",
                ):
                    assert told in text, (told, text)
                assert "workers make 1 of the 3" in await page.locator("#next-limits").inner_text()
                curves = page.locator("#curves svg.curve")
                assert (await curves.locator("g.held").count(), await curves.locator("g.missed").count()) == (1, 1)
                assert "1 of 2 within their interval" in await page.locator("#curves").inner_text()
                await shoot(page, "next-1440-light")
                await card.get_by_role("button", name="Carry out").click()
                question = page.locator("#confirm-text").filter(has_text="$1.20/h more")
                await question.filter(has_text="the cap is $50.00/h").wait_for(timeout=WAIT_MS)
                await page.locator("#confirm-go").click()
                await page.locator("#link-command").filter(has_text="echo-worker join").wait_for(timeout=WAIT_MS)
                await page.get_by_role("button", name="Done").click()
                while len(daemon.hub.money.machines) < 3:
                    await asyncio.sleep(0.05)
                assert {one.offer for one in daemon.hub.money.machines.values()} == {"by-hand"}
            async with page_of(chromium, daemon, 390, "dark") as page:
                await page.locator("#next-actions li").first.wait_for(timeout=WAIT_MS)
                await _fits(page)
                await page.locator("#next").scroll_into_view_if_needed()
                await shoot(page, "next-390-dark")

    asyncio.run(asyncio.wait_for(scene(), 120))


async def _joins(daemon: Any, name: str) -> Node:
    """A worker that does alone what the learner of `small_run` needs."""
    worker = await Node.join(daemon, Role.WORKER)
    await worker.hello(name=name, gpu="1 x NVIDIA GeForce RTX 4090", price_usd_per_hour=0.35)
    await worker.call.write(pb.WorkerMessage(heartbeat=beat(ALONE)))
    peer_id = PeerId(worker.credentials.identity.peer_id)
    daemon.hub.book.worth.told([WorkerDelivered(peer_id, 64, 64.0)], daemon.hub.clock.now())
    return worker


def test_a_worker_that_buys_nothing_is_paused_by_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def scene() -> None:
        chosen = options(
            tmp_path / "run", plan_interval_s=0.5, planner_mode=PlannerMode.ADVISE, heartbeat_interval_s=0.1
        )
        async with browser() as chromium, running(chosen) as daemon:
            assert daemon.hub is not None
            members = daemon.hub.membership.members
            async with beating(daemon, ("paris", "rome")), page_of(chromium, daemon, 1440, "light") as page:
                card = page.locator("#next-actions li").filter(has_text="End 2 of 3 workers")
                await card.wait_for(timeout=2 * WAIT_MS)
                assert "\N{MINUS SIGN}$0.70/h" in await card.inner_text()
                await shoot(page, "next-pause-1440-light")
                await card.get_by_role("button", name="Pause").click()
                async with asyncio.timeout(WAIT_MS / 1000):
                    while sum(one.last_activation is Activation.STANDBY for one in members.values()) < 2:
                        await asyncio.sleep(0.05)
                paused = [one for one in members.values() if one.last_activation is Activation.STANDBY]
                assert {one.setting_reason for one in paused} == {"paused: the plan does not need it"}

    asyncio.run(asyncio.wait_for(scene(), 120))
