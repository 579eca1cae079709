"""The operator's page in a real headless Chromium, on a real coordinator with real streams of a simulated fleet.

Screenshots are kept in build/screenshots.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coordinator_load import Ledger, Shape, run_load
from echo2.base.ids import Step
from echo2.cli.report import write_report
from echo2.config.run import StalenessSection
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.coordinator.web.page import METRICS, WORKER_METRICS
from echo2.learner.recent import RecentRollouts, keep
from echo2.learner.rollouts.groups import Batch
from echo2.trust.identity import Identity, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import RUN, Node, options, running
from tests.unit.learner.test_metrics import Letters, group

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
WAIT_MS = 120_000


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright  # most of a second: not for those who only collect

    async with async_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def page_of(chromium: Any, daemon: CoordinatorDaemon, width: int, scheme: str) -> AsyncIterator[Any]:
    """A page that must load nothing from outside and say nothing on the console."""
    context = await chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = await context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    page.on("request", lambda sent: None if sent.url.startswith(daemon.dashboard_url) else troubles.append(sent.url))
    await page.goto(daemon.dashboard_url)
    await page.wait_for_selector("body[data-ready]", timeout=WAIT_MS)
    await page.evaluate(
        "document.querySelectorAll('main details').forEach((one) => { one.open = one.id !== 'metrics'; })"
    )
    yield page
    assert not troubles
    await context.close()


@asynccontextmanager
async def fleet(daemon: CoordinatorDaemon, count: int) -> AsyncIterator[None]:
    shape = Shape(count, groups_per_s=12, work_s=0.6, beat_s=0.5, open_groups=3 * count)
    folder, address = daemon.options.folder, daemon.services_address
    task = asyncio.create_task(run_load(folder, RUN, address, shape, 600, Ledger()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def shoot(page: Any, name: str) -> None:
    """Also measures what a visitor finds: at most two screens of 900 px, or four on a phone, with the details folded."""
    height = await page.evaluate(
        """() => { const open = [...document.querySelectorAll("main details[open]")]; open.forEach((one) => { one.open = false; });
            const height = document.documentElement.scrollHeight; open.forEach((one) => { one.open = true; }); return height; }"""
    )
    screens = 2 if page.viewport_size["width"] == 1440 else 4
    assert height <= screens * page.viewport_size["height"], f"{name}: {height} px"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


async def _empty(chromium: Any, daemon: CoordinatorDaemon) -> None:
    async with page_of(chromium, daemon, 1440, "light") as page:
        texts = "waiting for the learner", "No worker has joined yet", "No step yet", "No plan yet", "No lease is out"
        for text in texts:
            await page.get_by_text(text).first.wait_for(timeout=WAIT_MS)
        await shoot(page, "empty-1440-light")


async def _alive(chromium: Any, daemon: CoordinatorDaemon) -> None:
    async with page_of(chromium, daemon, 1440, "light") as page:
        await page.wait_for_function("() => document.querySelectorAll('#fleet-body tr').length === 6", timeout=WAIT_MS)
        await page.locator("#terms .term").first.wait_for(timeout=WAIT_MS)
        await page.locator("svg.tree").wait_for(timeout=WAIT_MS)
        assert await page.evaluate(BEYOND_TREE) == [], "a number that is cut is another number"
        await page.locator("#what-if-answer .answer").wait_for(timeout=WAIT_MS)
        await page.locator("#reward-chart canvas").wait_for(timeout=WAIT_MS)
        await shoot(page, "live-1440-light")
        assert (await page.locator("#todo-text").text_content()).strip(), "the page says what to do"
        await page.locator("#tiles").get_by_text("predicted ").wait_for(timeout=WAIT_MS)
        series = await page.evaluate("fetch('/api/series').then((answer) => answer.json())")
        told = [one for one in series["predicted"] if one is not None]
        assert all(one > 0.5 for one in told), f"before the first delta plans reckon with whole snapshots: {told}"
        assert await _clipped(page) == []
        numbers = "import('/static/format.js').then((f) => [1.5e6, 0.00424, 12345.6, 0.0005].map((x) => f.number(x)))"
        assert await page.evaluate(numbers) == ["1,500,000", "0.00424", "12,300", "5.00e-4"]
        ordered = "import('/static/format.js').then((f) => [2, null, 10, null].sort((x, y) => f.compare(x, y, true)))"
        assert await page.evaluate(ordered) == [10, 2, None, None], "who has no value comes last"
        await _long_values_fit(page)
        await _shows_totals_budget_and_events_in_short(page)
        await _lists_all_metrics(page)
        await _drains_by_keyboard(page, daemon)
        await _releases_the_quarantined_and_bans(page, daemon)
        await _shows_a_worker_from_near(page)
        await _shows_a_rollout_token_by_token(page)
        await _drains_and_releases_the_selected(page, daemon)
        await _makes_a_token(page, daemon)
    async with page_of(chromium, daemon, 390, "dark") as page:
        await _shows_a_rollout_token_by_token(page)
        await _lists_who_has_not_gone(page, daemon)
        await page.locator("#reward-chart canvas").wait_for(timeout=WAIT_MS)
        await page.locator("#metrics summary").click()
        await page.locator("#metrics-rows tr").first.wait_for(timeout=WAIT_MS)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than 390 px"
        wide = "[...document.querySelectorAll('main .scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
        assert await page.evaluate(f"{wide}.map((e) => e.textContent.slice(0, 80))") == [], "tables that do not fit"
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 18, 24)"
        assert await _clipped(page) == []
        await shoot(page, "live-390-dark")


BEYOND_TREE = """(() => [...document.querySelectorAll("svg.tree text")].filter((one) => {
    one.textContent = one.textContent.replace(/^took .*/, "took 888 ms, predicted 888 ms");
    const box = one.getBBox(); return box.x + box.width > one.ownerSVGElement.viewBox.baseVal.width;
}).map((one) => one.textContent))()"""
LONG = {
    "#tiles .tile:nth-child(1) strong": ("123,456", "/ 1,000,000"), "#tiles .tile:nth-child(5) strong": ("1,234,567", ""),
    "#tiles .tile:nth-child(8) strong": ("$12,345.67", ""),
}  # fmt: skip
"""What a long run shows, by tile."""


async def _long_values_fit(page: Any) -> None:
    """At each width, also just before the tiles are put into fewer columns."""
    before = page.viewport_size
    for width in (390, 721, 768, 1024, 1181, 1280, 1440):
        await page.set_viewport_size({"width": width, "height": 900})
        sizes = await page.evaluate(
            """(long) => { const cut = [], sizes = [];
                for (const [place, [value, unit]] of Object.entries(long)) {
                    const old = document.querySelector(place), one = old.cloneNode(), small = document.createElement("small");
                    small.textContent = unit && " " + unit; one.append(value, small);
                    one.style.setProperty("--letters", value.length + 0.6 * unit.length);
                    old.after(one); old.hidden = true; old.style.display = "none";
                    if (one.scrollWidth > one.clientWidth) cut.push(one.textContent);
                    sizes.push(parseFloat(getComputedStyle(one).fontSize)); one.remove(); old.style.display = ""; }
                return [cut, Math.min(...sizes)]; }""",
            LONG,
        )
        assert sizes[0] == [] and sizes[1] >= 11, f"{width} px: {sizes}"
        assert [one for one in await _clipped(page) if not one.startswith("sub")] == [], f"{width} px"
    await page.set_viewport_size(before)


async def _shows_totals_budget_and_events_in_short(page: Any) -> None:
    totals = await page.locator("#fleet-totals").inner_text()
    for name in ("GPU", "H100", "Provider", "runpod", "Region", "eu-nl", "us-tx", "not known"):
        assert name in totals, f"{name} is not among the totals: {totals}"
    budget = await page.locator("#budget-text").inner_text()
    assert "of $50.00 spent" in budget and "/h" in budget, budget
    assert "broadcast plan" not in await page.locator("#event-list").inner_text()
    texts = await page.locator("#event-list li span:last-child").all_inner_texts()
    assert len([one for one in texts if "(the newest of" in one or "publishing every" in one]) <= 4, texts


async def _shows_a_worker_from_near(page: Any) -> None:
    """Its own words are hostile: they are seen as they are, and do nothing."""
    row = page.locator("#fleet-body tr").filter(has_text="error: <b>learner</b>: no answer for 12 s").first
    await row.locator("td.name button").click()
    dialog = page.locator("#worker-dialog")
    await dialog.wait_for(timeout=WAIT_MS)
    text = await dialog.inner_text()
    assert "<b>learner</b>: no answer for 12 s" in text and await dialog.locator("b").count() == 0
    for fact in ("Joined", "Lost", "Cost", "million useful tokens", "warning", "error"):
        assert fact in text, fact
    await page.screenshot(path=SCREENSHOTS / "worker-1440-light.png")
    await dialog.get_by_role("button", name="Close").click()


async def _shows_a_rollout_token_by_token(page: Any) -> None:
    await page.locator("#rollouts").scroll_into_view_if_needed()
    first = page.locator("#rollouts-body tr").first
    await first.wait_for(timeout=WAIT_MS)
    assert "<img src=x onerror=alert(1)>" in await first.inner_text() and await page.locator("main img").count() == 0
    await first.locator("button").click()
    await page.locator("#rollout-tokens .token").nth(511).wait_for(timeout=WAIT_MS)
    assert "reward 0 · trained on in step" in await page.locator("#rollout-facts").inner_text()
    await page.locator("#rollout-tokens .token").nth(3).hover()
    told = await page.locator("#rollout-token").inner_text()
    assert told.startswith("Token 4 of 600: id 3, log-probability -3 (4.98 %), sampled by version "), told
    await page.locator("#rollout-colour").select_option("version")
    assert await page.locator("#rollout-legend").inner_text()
    await page.locator("#rollout-colour").select_option("worker")
    assert await page.locator("#rollout-legend .kind").all_text_contents() == ["aaaaaaaa", "bbbbbbbb", "unknown"]
    turns = page.locator("#rollout-tokens details.turn")
    assert await turns.count() == 2 and not await turns.first.locator(".said").is_visible(), "folded"
    await turns.first.locator("summary").click()
    assert "<img src=x onerror=alert(1)>" in await turns.first.locator(".said").inner_text()
    assert await _clipped(page) == []
    await page.screenshot(path=SCREENSHOTS / f"rollout-{page.viewport_size['width']}.png")
    await page.get_by_role("button", name="Later tokens").click()
    await page.wait_for_function("() => document.querySelectorAll('.token').length === 88", timeout=WAIT_MS)
    assert await page.get_by_role("button", name="Later tokens").is_disabled()
    await page.locator("#rollout-dialog").get_by_role("button", name="Close").click()


async def _drains_and_releases_the_selected(page: Any, daemon: CoordinatorDaemon) -> None:
    assert daemon.hub is not None
    boxes, bulk = page.locator("#fleet-body td.pick input"), page.locator("#bulk")
    for place in (0, 1):
        await boxes.nth(place).check()
    await bulk.get_by_text("2 selected").wait_for(timeout=WAIT_MS)
    await page.screenshot(path=SCREENSHOTS / "selected-1440-light.png")
    await bulk.get_by_role("button", name="Drain").click()
    await bulk.wait_for(state="hidden", timeout=WAIT_MS)
    settings = [member.setting for member in daemon.hub.membership.members.values()]
    assert settings.count(OperatorSetting.DRAINING) >= 2
    await page.locator("#fleet-gone").uncheck()
    name = await page.locator("#fleet-body td.name button").first.inner_text()
    await boxes.first.check()
    await bulk.get_by_role("button", name="Release…").click()
    await page.locator("#confirm-reason input").first.fill("too dear")
    await page.locator("#confirm-go").click()
    await page.locator("#event-list").get_by_text(f"{name} leaves: too dear").first.wait_for(timeout=WAIT_MS)


async def _lists_who_has_not_gone(page: Any, daemon: CoordinatorDaemon) -> None:
    assert daemon.hub is not None
    until = asyncio.get_running_loop().time() + WAIT_MS / 1000
    while True:
        shown = sorted(await page.locator("#fleet-body td.name button").all_text_contents())
        living = sorted(member.name for member in daemon.hub.membership.living())
        if shown == living:
            break
        assert asyncio.get_running_loop().time() < until, f"shown {shown}, there are {living}"
        await asyncio.sleep(0.2)
    assert len(living) < 6, "one was banned and one released"


async def _clipped(page: Any) -> list[str]:
    """Texts of which a part cannot be seen."""
    found: list[str] = await page.evaluate(
        """() => [...document.querySelectorAll("#fleet-body td span, .tile strong, .tile p, .tile h3, #todo-text, .term span")]
        .filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== "visible")
        .map((e) => e.className + ": " + e.textContent)"""
    )
    return found


async def _lists_all_metrics(page: Any) -> None:
    await page.locator("#metrics summary").click()
    await page.locator("#metrics-rows tr").first.wait_for(timeout=WAIT_MS)
    rows = await page.locator("#metrics-rows th").all_text_contents()
    for text, _ in METRICS.values():
        assert any(row.strip() == text for row in rows), text
    for text, _ in WORKER_METRICS.values():
        assert sum(row.startswith(f"{text} ") and "/" in row for row in rows) == 6, (text, "one for each worker")
    await page.locator("#metrics summary").click()


async def _drains_by_keyboard(page: Any, daemon: CoordinatorDaemon) -> None:
    assert daemon.hub is not None
    button = page.locator("#fleet-body tr").first.get_by_role("button", name="Drain")
    name = await page.locator("#fleet-body td.name button").first.text_content()
    await page.locator("#fleet-filter").focus()
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await button.evaluate("element => element === document.activeElement"):
            break
    await page.keyboard.press("Enter")
    await page.locator("#fleet-body tr").first.get_by_text("draining").wait_for(timeout=WAIT_MS)
    drained = [member for member in daemon.hub.membership.members.values() if member.setting.value == "draining"]
    assert [member.name for member in drained] == [name]


async def _releases_the_quarantined_and_bans(page: Any, daemon: CoordinatorDaemon) -> None:
    """What the audit found stands in the worker's row; the operator lifts it there, or bans a worker there."""
    assert daemon.hub is not None
    member = next(m for m in daemon.hub.membership.members.values() if m.setting is OperatorSetting.AUTOMATIC)
    finding = "audit: its numbers are 0.07 nats off, 0.05 are allowed"
    daemon.hub.accuse(member.peer_id, finding, is_certain=False)
    row = page.locator("#fleet-body tr").filter(has_text=member.name)
    await row.get_by_text("quarantined").first.wait_for(timeout=WAIT_MS)
    assert await row.locator(f'[title*="{finding}"]').count() >= 1, "the finding is nowhere in the row"
    await shoot(page, "quarantined-1440-light")
    await row.get_by_role("button", name=f"Lift quarantine {member.name}").click()
    await row.get_by_role("button", name=f"Ban {member.name}").wait_for(timeout=WAIT_MS)
    assert member.setting is OperatorSetting.AUTOMATIC
    await row.get_by_role("button", name=f"Ban {member.name}").click()
    await page.locator("#confirm-reason input").first.fill("its owner asked for it")
    await page.locator("#confirm-go").click()
    await row.get_by_text("banned").first.wait_for(timeout=WAIT_MS)
    assert (member.setting, member.setting_reason) == (OperatorSetting.BANNED, "its owner asked for it")
    await shoot(page, "banned-1440-light")
    await page.locator("#fleet-gone").check()  # who was banned has gone, and is listed no more once the ban is lifted
    await row.get_by_role("button", name=f"Lift ban {member.name}").click()
    await row.get_by_role("button", name=f"Ban {member.name}").wait_for(timeout=WAIT_MS)
    assert member.setting is OperatorSetting.AUTOMATIC


async def _makes_a_token(page: Any, daemon: CoordinatorDaemon) -> None:
    await page.get_by_role("button", name="New token").click()
    await page.get_by_label("Label").fill("from the page")
    await page.get_by_role("button", name="Create").click()
    await page.locator("#link-command").filter(has_text="echo-worker join 'echo2://").wait_for(timeout=WAIT_MS)
    await page.get_by_role("button", name="Copy").click()
    await page.locator("#link-dialog #toast.on").wait_for(timeout=WAIT_MS)  # elsewhere it is behind, and told to nobody
    await page.get_by_role("button", name="Done").click()
    await page.get_by_role("button", name="Revoke from the page").click()
    await page.locator("#confirm-go").click()
    await page.locator("#token-list").get_by_text("revoked").wait_for(timeout=WAIT_MS)


async def _acts_though_its_word_is_of_the_process_before(page: Any) -> None:
    """An open page after a restart of the coordinator: the first answer is 403, and the operator sees none of it."""
    answers: list[int] = []

    async def answer(route: Any) -> None:
        answers.append(len(answers))
        if len(answers) == 1:
            await route.fulfill(status=403, json={"error": "expected the word of this process"})
        else:
            await route.continue_()

    await page.route("**/api/tokens", answer)
    await page.get_by_role("button", name="New token").click()
    await page.get_by_label("Role").select_option("operator")
    await page.get_by_role("button", name="Create").click()
    await page.locator("#link-command").filter(has_text="echo2 status 'echo2://").wait_for(timeout=WAIT_MS)
    await page.get_by_role("button", name="Done").click()
    assert answers == [0, 1]


async def _says_why_it_is_let_in_no_more(chromium: Any, daemon: CoordinatorDaemon) -> None:
    """A token that has changed, or a cookie that is gone."""
    page, refused = await chromium.new_page(), {"error": "expected the token: open the address"}
    for path in ("stream", "session"):
        await page.route(f"**/api/{path}", lambda route: route.fulfill(status=401, json=refused))
    await page.goto(daemon.dashboard_url)
    await page.locator("#banner").get_by_text("No access any more: expected the token: open").wait_for(timeout=WAIT_MS)
    assert await page.locator("#status").text_content() == "no access"
    await page.close()


async def _rents_and_approves(page: Any, daemon: CoordinatorDaemon) -> None:
    """The operator's way to a machine: rent by hand, then the planner's advice, then give it back."""
    await page.get_by_role("button", name="Rent by-hand").click()
    await page.locator("#confirm-form input").fill("for Ann")
    await page.locator("#confirm-go").click()
    await page.locator("#link-command").filter(has_text="echo-worker join 'echo2://").wait_for(timeout=WAIT_MS)
    await page.get_by_role("button", name="Done").click()
    await page.locator("#journal").get_by_text("for Ann").first.wait_for(timeout=WAIT_MS)
    await page.locator("#approve").wait_for(timeout=WAIT_MS)
    assert await page.locator("#approve").text_content() == "Approve"
    await shoot(page, "machines-1440-light")
    await page.locator("#approve").click()
    await page.locator("#journal").get_by_text("approved by the operator").first.wait_for(timeout=WAIT_MS)
    await page.locator("#machines-body").get_by_role("button", name="Release").first.click()
    await page.locator("#confirm-go").click()
    await page.locator("#machines-body").get_by_text("gone").first.wait_for(timeout=WAIT_MS)


OFFERS = """
[[offer]]
name = "by-hand"
provider = "manual"
gpu = "RTX 4090"
usd_per_hour = 0.34
machines_max = 3
[[offer]]
name = "big-by-hand"
provider = "manual"
gpu = "H100"
usd_per_hour = 2.49
"""


async def test_machines_are_rented_approved_and_given_back_on_the_page(tmp_path: Path) -> None:
    offers = tmp_path / "offers.toml"
    offers.write_text(OFFERS)

    chosen = options(
        tmp_path / "run", plan_interval=0.5, offers=str(offers), planner_mode="approve",
        lease_timeout=60.0, usd_per_hour_cap=50.0,
    )  # fmt: skip
    async with browser() as chromium, running(chosen) as daemon, fleet(daemon, 3):
        await _says_why_it_is_let_in_no_more(chromium, daemon)
        async with page_of(chromium, daemon, 1440, "light") as page:
            await _rents_and_approves(page, daemon)
        async with page_of(chromium, daemon, 390, "dark") as page:
            await page.locator("#machines-body tr").first.wait_for(timeout=WAIT_MS)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            await page.locator("#machines").scroll_into_view_if_needed()
            await page.screenshot(path=SCREENSHOTS / "machines-390-dark.png")


async def test_a_starved_run_says_what_to_do_and_a_finished_one_looks_finished_after_restarts(tmp_path: Path) -> None:
    """Who waits for whom; then no error on the console, nothing that is not so, no worker there."""

    async def starved(daemon: CoordinatorDaemon, chromium: Any, learner: Node) -> None:
        report = pb.LearnerReport(step=3, train_s=1, utilisation=0.1, waits_for="rollouts", waits_since_s=40)

        is_seen = asyncio.Event()

        async def beats() -> None:
            while not is_seen.is_set():  # to cancel a write would end the learner's call
                await learner.say(report=report)
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(beats())
        for width, scheme in ((1440, "light"), (390, "dark")):
            async with page_of(chromium, daemon, width, scheme) as page:
                await page.locator("#status").filter(has_text="learner waits").wait_for(timeout=WAIT_MS)
                await page.locator("#waits").get_by_text("the learner waits for rollouts").wait_for(timeout=WAIT_MS)
                assert "Start a worker" in await page.locator("#todo-text").text_content()
                assert "of $1.00 spent" in await page.locator("#budget-text").text_content()
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                assert await _clipped(page) == []
                await shoot(page, f"starved-{width}-{scheme}")
        is_seen.set()
        await beating

    async def finished(page: Any, name: str) -> None:
        await page.locator("#status").filter(has_text="finished").wait_for(timeout=WAIT_MS)
        text = await page.locator("main").text_content()
        assert "Run a-run is finished after 20 steps. Nothing that the run rented costs money any more;" in text
        assert "learner away" not in text and "Nothing trained yet" not in text and "The run is finished." in text
        seen = await page.locator("main").inner_text()
        assert "yet" not in seen and "What if" not in seen, "nothing is to come any more"
        assert await page.locator("#terms .chip").count() == 0, "no term is met by nobody"
        await shoot(page, name)

    chosen = options(tmp_path, usd_budget=1.0)
    async with browser() as chromium:
        async with running(chosen) as daemon:
            learner = await Node.join(daemon, Role.LEARNER)
            await learner.hello(step_limit=20, step=3)
            await starved(daemon, chromium, learner)
            async with page_of(chromium, daemon, 1440, "light") as page:
                report = pb.LearnerReport(
                    step=20, train_s=1.0, reward_mean=0.75, eval_reward=0.8, lag_histogram=[10, 5], is_finished=True,
                    trained_tokens=15, audit_s=0.5,
                )  # fmt: skip
                await learner.say(report=report)
                cost = page.locator("#audit-cost").filter(has_text="scores 500 ms a step on its own device")
                await cost.wait_for(timeout=WAIT_MS)
                await learner.say(leaving=pb.LearnerLeaving(reason="finished"))
                await learner.call.done_writing()
                await finished(page, "finished-1440-light")
            await learner.close()
        async with running(chosen) as daemon, page_of(chromium, daemon, 390, "dark") as page:
            await finished(page, "restarted-390-dark")


async def test_the_page_shows_and_steers_a_run(tmp_path: Path) -> None:
    async with browser() as chromium:
        async with running(options(tmp_path, plan_interval=0.5, lease_timeout=60.0, usd_budget=50.0)) as daemon:
            await _empty(chromium, daemon)
            async with fleet(daemon, 6):
                await _alive(chromium, daemon)
            context = await chromium.new_context()
            page = await context.new_page()
            await page.goto(daemon.dashboard_url)
            await page.wait_for_selector("body[data-ready]", timeout=WAIT_MS)
            await _acts_though_its_word_is_of_the_process_before(page)
        await page.get_by_role("alert").wait_for(timeout=WAIT_MS)
        assert "does not answer" in await page.get_by_role("alert").text_content()
        await shoot(page, "away-1440-light")


async def test_what_is_shown_ages_and_what_was_not_touched_is_not_changed(tmp_path: Path) -> None:
    async with browser() as chromium, running(options(tmp_path, staleness_bound=0, usd_budget=50.0)) as daemon:
        async with page_of(chromium, daemon, 1440, "light") as page:
            hub = daemon.hub
            hub.tokens.create("x" * 43, "worker", "short", 1.5, 1, hub.clock.now())
            await page.locator("#token-list").get_by_text("expired").wait_for(timeout=8_000)
            await page.locator("#c-budget").fill("60")
            hub.change_settings({"usd_per_hour_cap": 7.0})  # by somebody else
            await page.get_by_role("button", name="Change").click()
            await page.locator("#toast").get_by_text("changed").wait_for(timeout=8_000)
            assert (hub.config.coordinator.usd_budget, hub.config.coordinator.usd_per_hour_cap) == (60.0, 7.0)
            for name, told in (("Stop…", "stopped"), ("Resume", "the run goes on")):
                await page.get_by_role("button", name=name, exact=True).click()
                if told == "stopped":
                    await page.locator("#confirm-go").click()
                await page.locator("#toast").get_by_text(told).wait_for(timeout=8_000)
            assert hub.ending.finish is None
            clock = "import('/static/format.js').then((it) => [0, 3 * 86400].map((ago) => it.clock(Date.now() / 1000 - ago)))"
            today, before = await page.evaluate(clock)
            assert (len(today.split()), len(before.split())) == (1, 3), "of another day with its date"
            hub.config = hub.config.model_copy(update={"staleness": StalenessSection(bound=32)})
            await page.reload()
            await page.wait_for_selector("body[data-ready]", timeout=WAIT_MS)
            assert await page.locator("#w-s").input_value() == "32", "the bound of now"
            await page.evaluate("window.before = true; location.hash = '#1'")
            hub.identity = Identity.generate()  # another run's, at the same address
            await page.wait_for_function("() => !window.before", timeout=8_000)
            await page.wait_for_selector("body[data-ready]", timeout=WAIT_MS)
            await page.evaluate(
                "const Real = EventSource;"
                "window.EventSource = class extends Real { constructor(at) { super(at); window.again = true; } };"
                "let later = Date.now(); Date.now = () => (later += 7000)"  # whatever is heard was heard long ago
            )
            await page.wait_for_function("() => window.again", timeout=8_000)


async def test_the_report_of_a_finished_run_shows_tokens_from_its_file_alone(tmp_path: Path) -> None:
    learner = tmp_path / "learner"
    learner.mkdir()
    recent = RecentRollouts()
    recent.add(Batch(Step(4), (group("g1", 600, count=1),)))
    keep(recent, Letters(), learner)
    status = pb.RunStatus()
    status.workers.add(peer_id="w1", name="berlin")
    write_report(tmp_path, status)
    async with browser() as chromium:
        page, troubles = await chromium.new_page(), list[str]()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(("file:", "data:")) else troubles.append(sent.url))
        await page.goto((tmp_path / "report.html").as_uri())
        for width in (390, 1440):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{width} px"
        await page.click("#rollouts-body button", timeout=WAIT_MS)
        assert "600 tokens, ended by stop · v3 to v4 · sampled on berlin, w2" in await page.inner_text("#rollout-facts")
        await page.focus(".token")
        assert "id 0, log-probability 0 (100.00 %), sampled by version 3 on berlin" in await page.inner_text(
            "#rollout-token"
        )
        await page.click("#rollout-on")
        await page.wait_for_function("document.querySelectorAll('.token').length == 88", timeout=WAIT_MS)
        assert not troubles
