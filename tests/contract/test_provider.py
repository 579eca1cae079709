"""One contract for every provider that runs here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from echo2.base.errors import LimitExceeded
from echo2.coordinator.provisioning import Provider
from echo2.coordinator.runtime.providers import LocalProvider, ManualProvider
from tests.unit.coordinator.test_daemon import options, play, running

LINK = "echo2://h:1/peer?token=it's"


def _sleeper(link_path: Path, folder: Path) -> list[str]:
    assert link_path.read_text() == LINK
    assert link_path.stat().st_mode & 0o077 == 0
    return [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(params=["manual", "local"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Provider:
    return ManualProvider() if request.param == "manual" else LocalProvider(tmp_path, _sleeper, machines_max=2)


def test_what_is_rented_is_listed_until_it_is_given_back(provider: Provider) -> None:
    async def scene() -> None:
        first, second = await provider.rent("a", LINK), await provider.rent("b", LINK)
        assert [machine.machine_id for machine in provider.machines()] == [first.machine_id, second.machine_id]
        await provider.release(first.machine_id)
        await provider.release(first.machine_id)
        assert [machine.label for machine in provider.machines()] == ["b"]
        await provider.release(second.machine_id)
        assert provider.machines() == []

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_local_machine_has_a_limit_and_a_process_that_ends_by_itself_is_not_listed(tmp_path: Path) -> None:
    async def scene() -> None:
        local = LocalProvider(tmp_path, lambda link, folder: [sys.executable, "-c", "pass"], machines_max=1)
        machine = await local.rent("a", LINK)
        process = local._processes[machine.machine_id][1]
        await process.wait()
        assert local.machines() == []
        busy = LocalProvider(tmp_path, _sleeper, machines_max=1)
        held = await busy.rent("a", LINK)
        with pytest.raises(LimitExceeded, match="1 workers at most"):
            await busy.rent("b", LINK)
        await busy.release(held.machine_id)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_renting_through_the_api_is_journalled_and_its_token_lets_one_peer_in(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            headers = {"x-echo2-csrf": (await web.get("/api/session")).json()["csrf"]}
            body = {"provider": "manual", "label": "for Ann"}
            machine = (await web.post("/api/machines", json=body, headers=headers)).json()
            assert machine["command"].startswith("echo-worker join 'echo2://")
            assert daemon.hub is not None
            token = next(t for t in daemon.hub.tokens.tokens.values() if t.label == "for Ann")
            assert token.use_limit == 1
            assert [paid.action for paid in daemon.hub.keeper.paid] == ["rent from manual"]
            bad = await web.post("/api/machines", json={"provider": "moon"}, headers=headers)
            assert (bad.status_code, "manual, local" in bad.json()["error"]) == (400, True)

    play(scene)
