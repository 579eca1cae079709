"""One contract for every provider, and what is special to each.

Kubernetes: the official client against a small API server over real HTTP. SkyPilot: its library where it is installed
builds the tasks; the cloud behind it is a double.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import ConfigError, LimitExceeded, NotAllowed, ResourceError, Unreachable
from echo2.base.ids import RunId
from echo2.coordinator.provisioning import MachineOffer, MachineState, Provider, machine_prefix
from echo2.coordinator.runtime.providers import kubernetes as kubernetes_provider
from echo2.coordinator.runtime.providers.kubernetes import KubernetesProvider
from echo2.coordinator.runtime.providers.local import LocalProvider
from echo2.coordinator.runtime.providers.manual import ManualProvider
from echo2.coordinator.runtime.providers.offers import load_offers, make_provider
from echo2.coordinator.runtime.providers.runpod import RunPodProvider
from echo2.coordinator.runtime.providers.skypilot import SkyPilotProvider
from tests.contract.kubernetes_server import Cluster
from tests.contract.runpod_server import KEY, Account
from tests.contract.sky_double import ClusterStatus, Sky

LINK = "echo2://h:1/peer?token=it's"
RUN = RunId("a-run")
FIRST, SECOND = (f"{machine_prefix(RUN, 'one')}{n}" for n in ("a", "b"))


def _sleeper(link_path: Path, folder: Path, machine_id: str) -> list[str]:
    assert link_path.read_text() == LINK
    assert link_path.stat().st_mode & 0o077 == 0
    return [sys.executable, "-c", "import time; time.sleep(600)"]


def local(folder: Path) -> LocalProvider:
    return LocalProvider(MachineOffer("one", "local", machines_max=2), folder, _sleeper)


def cluster_offer(cluster: Cluster, **more: Any) -> MachineOffer:
    return MachineOffer(
        "one", "kubernetes", settings={"deployment": "fleet", "namespace": "rl", "server": cluster.url}, **more
    )


def sky_offer(**settings: str) -> MachineOffer:
    return MachineOffer("one", "skypilot", "A100", 1.2, is_spot=True, settings={"accelerators": "A100:1", **settings})


def pod_offer(account: Account, folder: Path, **settings: str) -> MachineOffer:
    key = folder / "runpod.key"
    key.write_text(KEY)
    told = {"gpu_type": "NVIDIA GeForce RTX 4090", "image": "an/image:1", "key_file": str(key), "server": account.url}
    return MachineOffer("one", "runpod", "RTX4090", 0.34, is_spot=True, settings={**told, **settings})


@pytest.fixture(params=["manual", "local", "kubernetes", "skypilot", "runpod"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    match request.param:
        case "manual":
            yield ManualProvider(MachineOffer("one", "manual"))
        case "local":
            yield local(tmp_path)
        case "kubernetes":
            pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")
            with Cluster("fleet") as cluster:
                yield KubernetesProvider(cluster_offer(cluster))
        case "runpod":
            with Account() as account:
                yield RunPodProvider(pod_offer(account, tmp_path), RUN)
        case _:
            yield SkyPilotProvider(sky_offer(), RUN, Sky())


def play(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, 60))


def test_what_is_rented_is_seen_once_however_often_it_is_asked_for_until_it_is_given_back(provider: Provider) -> None:
    async def scene() -> None:
        command = await provider.rent(FIRST, LINK)
        assert await provider.rent(FIRST, LINK) == command
        await provider.rent(SECOND, LINK)
        if provider.name == "manual":
            assert command == """echo-worker join 'echo2://h:1/peer?token=it'"'"'s'"""
            assert await provider.observe() == {}
        else:
            assert set(await provider.observe()) == {FIRST, SECOND}
            assert {one.state for one in (await provider.observe()).values()} == {MachineState.RUNNING}
        await provider.release(FIRST)
        await provider.release(FIRST)
        assert set(await provider.observe()) <= {SECOND}
        await provider.release(SECOND)
        assert await provider.observe() == {}

    play(scene())


def test_local_machine_has_a_limit_and_a_process_that_ends_by_itself_is_not_seen(tmp_path: Path) -> None:
    async def scene() -> None:
        short = LocalProvider(MachineOffer("one", "local"), tmp_path, lambda *_: [sys.executable, "-c", "pass"])
        await short.rent(FIRST, LINK)
        while await short.observe():
            await asyncio.sleep(0.02)
        await short.release(FIRST)
        busy = local(tmp_path / "busy")
        await busy.rent(FIRST, LINK)
        await busy.rent(SECOND, LINK)
        with pytest.raises(LimitExceeded, match="2 workers at most"):
            await busy.rent("third", LINK)
        for machine_id in (FIRST, SECOND):
            await busy.release(machine_id)

    play(scene())


def test_local_worker_outlives_its_provider_and_the_next_one_can_end_it(tmp_path: Path) -> None:
    async def scene() -> None:
        before = local(tmp_path)
        await before.rent(FIRST, LINK)
        after = local(tmp_path)
        assert set(await after.observe()) == {FIRST}
        pid_file = tmp_path / "one" / FIRST / "process"
        pid, _, started = pid_file.read_text().partition(" ")
        pid_file.write_text(f"{pid} {int(started) + 1}")
        assert await after.observe() == {}, "a stranger with the same pid is not ours"
        pid_file.write_text(f"{pid} {started}")
        await after.release(FIRST)
        assert await after.observe() == {}
        await before.release(FIRST)  # it still waits for its child

    play(scene())


def test_kubernetes_scales_one_deployment_and_takes_away_the_pod_that_was_meant(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")

    async def scene(cluster: Cluster) -> None:
        provider = KubernetesProvider(cluster_offer(cluster, machines_max=3))
        cluster.conflicts_to_come = 2
        for machine_id in ("m-1", "m-2", "m-3"):
            await provider.rent(machine_id, LINK)
        assert cluster.deployment["spec"]["replicas"] == 3
        assert cluster.secrets["fleet-join"]["stringData"] == {"worker.link": LINK}
        with pytest.raises(LimitExceeded, match="3 machines at most"):
            await provider.rent("m-4", LINK)
        await provider.observe()
        labelled = {pod["metadata"]["labels"]["echo2/machine"]: name for name, pod in cluster.pods.items()}
        await provider.release("m-2")
        assert set(cluster.pods) == {labelled["m-1"], labelled["m-3"]}
        evicted = cluster.evict("m-1", "node goes down")
        seen = await provider.observe()
        assert (seen["m-1"].state, seen["m-1"].notice) == (MachineState.ENDING, "node goes down")
        assert seen["m-3"].state is MachineState.RUNNING
        cluster.end(evicted)
        assert {one.state for one in (await provider.observe()).values()} == {MachineState.RUNNING}
        assert set(await KubernetesProvider(cluster_offer(cluster)).observe()) == {"m-1", "m-3"}
        cluster.is_broken = True
        with pytest.raises(Unreachable, match="rl/fleet: 503"):
            await provider.observe()

    with Cluster("fleet") as cluster:
        play(scene(cluster))
    gone = KubernetesProvider(cluster_offer(cluster))
    with pytest.raises(Unreachable, match="rl/fleet"):
        play(gone.observe())
    with Cluster("other") as other:
        with pytest.raises(ConfigError, match="expected this Deployment"):
            play(KubernetesProvider(cluster_offer(other)).observe())


def test_skypilot_keeps_the_link_off_the_command_and_tells_what_its_cloud_says() -> None:
    async def scene() -> None:
        sky = Sky()
        provider = SkyPilotProvider(sky_offer(infra="aws/us-east-1"), RUN, sky)
        await provider.rent(FIRST, LINK)
        task = sky.launched[0]
        assert LINK not in task.run and task.secrets == {"ECHO2_JOIN_LINK": LINK}
        assert task.resources.wanted == {
            "use_spot": True, "accelerators": "A100:1", "infra": "aws/us-east-1", "max_hourly_cost": 1.26,
        }  # fmt: skip
        sky.clusters["of-somebody-else"] = ClusterStatus.UP
        sky.clusters[FIRST] = ClusterStatus.STOPPED
        assert {name: one.state for name, one in (await provider.observe()).items()} == {FIRST: MachineState.ENDING}
        sky.is_full = True
        with pytest.raises(ResourceError, match="no A100 in any zone"):
            await provider.rent(SECOND, LINK)
        sky.is_away = True
        with pytest.raises(Unreachable, match="does not answer"):
            await provider.observe()

    play(scene())


def test_skypilot_takes_the_task_that_we_build() -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    settings = {"infra": "kubernetes", "cpus": "4+", "memory": "16", "disk_size": "100"}
    offer = MachineOffer("one", "skypilot", "", 1.2, is_spot=True, settings=settings)
    task = SkyPilotProvider(offer, RUN).task(FIRST, LINK)
    (resources,) = task.resources
    assert (resources.use_spot, resources.cpus, resources.disk_size) == (True, "4+", 100)
    assert "ECHO2_JOIN_LINK" in task.secrets and LINK not in task.run
    for name in ("ClusterDoesNotExist", "ResourcesUnavailableError", "ApiServerConnectionError"):
        assert issubclass(getattr(sky.exceptions, name), Exception)
    assert sky.StatusRefreshMode.AUTO
    with pytest.raises(ConfigError, match="SkyPilot takes no such task"):
        SkyPilotProvider(MachineOffer("one", "skypilot", settings={"infra": "the/moon/x/y/z"}), RUN)


def test_runpod_is_asked_for_a_pod_without_the_link_on_its_command_and_a_dearer_pod_is_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        with Account() as account:
            provider = RunPodProvider(pod_offer(account, tmp_path, data_centers="EU-CZ-1, EU-RO-1"), RUN, "org/base")
            await provider.rent(FIRST, LINK)
            (asked,) = account.asked
            assert (asked["gpuTypeIds"], asked["gpuCount"], asked["interruptible"]) == (
                ["NVIDIA GeForce RTX 4090"],
                1,
                True,
            )
            assert asked["dataCenterIds"] == ["EU-CZ-1", "EU-RO-1"] and asked["env"] == {"ECHO2_JOIN_LINK": LINK}
            command = asked["dockerStartCmd"][-1]
            assert LINK not in command and "--model.path org/base" in command and "--worker.is_spot true" in command
            account.pods["foreign"] = {"id": "foreign", "name": "of-somebody-else", "desiredStatus": "RUNNING"}
            account.pods["pod0001"]["desiredStatus"] = "EXITED"
            assert {name: one.state for name, one in (await provider.observe()).items()} == {FIRST: MachineState.ENDING}
            account.cost = "0.50"
            with pytest.raises(
                ResourceError, match=r"expected a pod at 0.34 USD/h, RunPod asks 0.5; it is ended again"
            ):
                await provider.rent(SECOND, LINK)
            assert SECOND not in {one["name"] for one in account.pods.values()} and "foreign" in account.pods

    play(scene())


def test_runpod_makes_no_second_pod_after_a_lost_answer_and_its_troubles_have_names(tmp_path: Path) -> None:
    async def scene() -> None:
        with Account() as account, Account() as thief:
            provider = RunPodProvider(pod_offer(account, tmp_path), RUN)
            account.answers_lost = 1
            with pytest.raises(Unreachable):
                await provider.rent(FIRST, LINK)
            await provider.rent(FIRST, LINK)
            assert len(account.asked) == 1
            account.is_full = True
            with pytest.raises(ResourceError, match="no longer any instances"):
                await provider.rent(SECOND, LINK)
            account.redirect = thief.url + "/pods"
            with pytest.raises(Unreachable, match="307"):
                await provider.observe()
            account.redirect = ""
            (tmp_path / "runpod.key").write_text("another")
            other = pod_offer(account, tmp_path)
            (tmp_path / "runpod.key").write_text("another")
            with pytest.raises(NotAllowed, match="401: the key may not do this"):
                await RunPodProvider(other, RUN).observe()

    play(scene())


def test_runpod_takes_no_offer_without_a_price_a_key_or_a_safe_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    settings = {"gpu_type": "L4", "image": "an/image"}
    for offer, problem in (
        (MachineOffer("one", "runpod", settings=settings), "usd_per_hour: expected what a pod may cost"),
        (MachineOffer("one", "runpod", "", 0.4, settings=settings), "expected RunPod's key"),
        (MachineOffer("one", "runpod", "", 0.4, settings={**settings, "server": "http://a.b/v1"}), "https://"),
        (MachineOffer("one", "runpod", "", 0.4, settings={**settings, "cloud": "MOON"}), "SECURE, COMMUNITY"),
        (MachineOffer("one", "runpod", "", 0.4, settings={**settings, "gpu_count": "9"}), "gpu_count: expected 1 to 8"),
        (MachineOffer("one", "runpod", "", 0.4, settings={"gpu_type": "L4"}), "'image', it is missing"),
    ):
        with pytest.raises(ConfigError, match=problem):
            RunPodProvider(offer, RUN)


def test_without_its_library_a_provider_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sky", "kubernetes"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'echo2\[skypilot\]'"):
        SkyPilotProvider(sky_offer(), RUN)
    with pytest.raises(ConfigError, match=r"pip install 'echo2\[kubernetes\]'"):
        kubernetes_provider.KubernetesProvider(MachineOffer("one", "kubernetes", settings={"deployment": "fleet"}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1 to 64 tables"),
        ("x = 1", "1 to 64 tables"),
        ("offer = [", "expected TOML"),
        ("[[offer]]\nname = 'a'", "expected a field 'provider'"),
        (
            "[[offer]]\nname = 'a'\nprovider = 'moon'",
            "expected one of manual, local, skypilot, kubernetes, runpod, got 'moon'",
        ),
        ("[[offer]]\nname = 'A b'\nprovider = 'local'", "expected a name"),
        ("[[offer]]\nname = 'a'\nprovider = 'local'\nusd_per_hour = true", "usd_per_hour: expected"),
        ("[[offer]]\nname = 'a'\nprovider = 'local'\nprice = 1", "got 'price'"),
        ("[[offer]]\nname = 'a'\nprovider = 'local'\n[[offer]]\nname = 'a'\nprovider = 'local'", "'a' twice"),
        ("[[offer]]\nname = 'a'\nprovider = 'manual'\nis_automatic = true", "a person has to"),
    ],
)
def test_offers_that_make_no_sense_are_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "offers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        load_offers(path)


def test_offers_are_read_and_wrong_settings_named(tmp_path: Path) -> None:
    assert [offer.is_automatic for offer in load_offers(None)] == [False, False]
    path = tmp_path / "offers.toml"
    path.write_text(
        "[[offer]]\nname = 'here'\nprovider = 'local'\nusd_per_hour = 1\nmachines_max = 3\n[offer.settings]\ncolour = 'red'"
    )
    (offer,) = load_offers(path)
    assert (offer.usd_per_hour, offer.machines_max, offer.is_automatic) == (1, 3, True)
    with pytest.raises(ConfigError, match="got 'colour'"):
        make_provider(offer, RUN, tmp_path)
    with pytest.raises(ConfigError, match="'deployment', it is missing"):
        make_provider(MachineOffer("k", "kubernetes"), RUN, tmp_path)
    with pytest.raises(ConfigError, match="expected a file at"):
        load_offers(tmp_path / "none.toml")


def test_rented_workers_are_told_where_the_base_checkpoint_is(tmp_path: Path) -> None:
    manual = make_provider(MachineOffer("m", "manual"), RUN, tmp_path, "org/base")
    words = shlex.split(asyncio.run(manual.rent(FIRST, LINK)))
    assert words == ["echo-worker", "join", LINK, "--model.path", "org/base"]
    assert "--model.path" not in asyncio.run(
        make_provider(MachineOffer("m", "manual"), RUN, tmp_path).rent(FIRST, LINK)
    )
    cloud = SkyPilotProvider(sky_offer(arguments="--verbose"), RUN, Sky(), "/models/a base")
    assert "--model.path '/models/a base' --verbose" in cloud.task(FIRST, LINK).run
