"""One contract for every provider, and what is special to each.

Command: real shell commands, whose cloud is processes of this machine. SkyPilot: its library where it is installed builds the
tasks; the cloud behind it is a double.
"""

import asyncio
import shlex
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, LimitExceeded, ResourceError, Unreachable
from echo2.base.ids import RunId
from echo2.coordinator.money.providers import command
from echo2.coordinator.money.providers.command import CommandProvider, LocalProvider
from echo2.coordinator.money.providers.machine_setup import ManualProvider, running_wheel
from echo2.coordinator.money.providers.skypilot import SkyPilotProvider
from echo2.coordinator.money.provisioner import load_offers, make_provider
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, Provider, machine_prefix
from tests.contract.command_cloud import CommandCloud
from tests.contract.sky_double import ClusterStatus, Sky
from tests.unit.coordinator.test_daemon import options

LINK = "echo2://h:1/peer?token=it's"
RUN = RunId("a-run")
FIRST, SECOND = (f"{machine_prefix(RUN, 'one')}{n}" for n in ("a", "b"))


def _sleeper(link_path: Path, folder: Path, machine_id: str) -> list[str]:
    assert link_path.read_text() == LINK
    assert link_path.stat().st_mode & 0o077 == 0
    return [sys.executable, "-c", "import time; time.sleep(600)"]


def local(folder: Path) -> LocalProvider:
    return LocalProvider(MachineOffer("one", "local", machines_max=2), folder, _sleeper)


def command_offer(cloud: CommandCloud, **settings: str) -> MachineOffer:
    return MachineOffer("one", "command", settings={**cloud.settings, "setup": "exec sleep 600", **settings})


def sky_offer(**settings: str) -> MachineOffer:
    return MachineOffer("one", "skypilot", "A100", 1.2, is_spot=True, settings={"accelerators": "A100:1", **settings})


@pytest.fixture(params=["manual", "local", "command", "skypilot"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    match request.param:
        case "manual":
            yield ManualProvider(MachineOffer("one", "manual"))
        case "local":
            yield local(tmp_path)
        case "command":
            cloud = CommandCloud(tmp_path / "cloud")
            yield CommandProvider(command_offer(cloud), RUN)
            cloud.close()
        case _:
            yield SkyPilotProvider(sky_offer(), RUN, Sky())


async def test_what_is_rented_is_seen_once_however_often_asked_for_until_it_is_given_back(provider: Provider) -> None:
    command = await provider.rent(FIRST, LINK, 1.2)
    assert await provider.rent(FIRST, LINK, 1.2) == command
    await provider.rent(SECOND, LINK, 1.2)
    if isinstance(provider, ManualProvider):
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


async def test_local_machine_has_a_limit_and_a_process_that_ends_by_itself_is_not_seen(tmp_path: Path) -> None:
    short = LocalProvider(MachineOffer("one", "local"), tmp_path, lambda *_: [sys.executable, "-c", "pass"])
    await short.rent(FIRST, LINK, 1.2)
    while await short.observe():
        await asyncio.sleep(0.02)
    await short.release(FIRST)
    busy = local(tmp_path / "busy")
    await busy.rent(FIRST, LINK, 1.2)
    await busy.rent(SECOND, LINK, 1.2)
    with pytest.raises(LimitExceeded, match="2 workers at most"):
        await busy.rent("third", LINK, 1.2)
    for machine_id in (FIRST, SECOND):
        await busy.release(machine_id)


async def test_local_worker_outlives_its_provider_and_the_next_one_can_end_it(tmp_path: Path) -> None:
    before = local(tmp_path)
    await before.rent(FIRST, LINK, 1.2)
    after = local(tmp_path)
    assert set(await after.observe()) == {FIRST}
    pid_file = tmp_path / "one" / FIRST / "process"
    pid, _, started = pid_file.read_text().partition(" ")
    pid_file.write_text(f"{pid} {int(started) + 1}")
    assert await after.observe() == {}, "a stranger with the same pid is not ours"
    pid_file.write_text(f"{pid} {started}")
    chunks = pid_file.with_name("chunks")
    chunks.mkdir()
    await after.release(FIRST)
    assert await after.observe() == {} and not chunks.exists(), (
        "else each one that is given back leaves a model's bytes"
    )
    await before.release(FIRST)  # it still waits for its child


async def test_a_command_gets_the_link_on_its_input_and_its_list_says_how_a_machine_is(tmp_path: Path) -> None:
    cloud = CommandCloud(tmp_path / "cloud")
    try:
        provider = CommandProvider(command_offer(cloud), RUN)
        await provider.rent(FIRST, LINK, 1.2)
        await provider.rent(FIRST, LINK, 1.2)
        assert cloud.started() == [FIRST], "a machine that is listed is not started again"
        assert f"export ECHO2_JOIN_LINK={shlex.quote(LINK)}" in cloud.script(FIRST)
        assert all(LINK not in text for text in cloud.settings.values())
        stranger = cloud.folder / "of-somebody-else"
        stranger.mkdir()
        (stranger / "pid").write_text("0")
        for said, state, notice in (
            ("", MachineState.RUNNING, ""),
            ("starting", MachineState.STARTING, ""),
            ("ENDING the spot price rose", MachineState.ENDING, "the spot price rose"),
        ):
            cloud.say(FIRST, said)
            seen = await CommandProvider(command_offer(cloud), RUN).observe()
            assert {name: (one.state, one.notice) for name, one in seen.items()} == {FIRST: (state, notice)}
        cloud.say(FIRST, "dancing")
        with pytest.raises(ConfigError, match=r"offer one: list: expected one of .* after .*, got 'dancing'"):
            await provider.observe()
        await provider.release(FIRST)
        assert not list((cloud.folder / FIRST).glob("pid")), "it is ended whatever its list says of it"
        for twice in (f"{FIRST}\n{FIRST} ending", f"{FIRST} ending\n{FIRST}"):
            provider = CommandProvider(command_offer(cloud, list=f"echo {shlex.quote(twice)}"), RUN)
            assert (await provider.observe())[FIRST].state is MachineState.RUNNING
        with pytest.raises(Unreachable, match="command list: expected at most 1048576 bytes, got more"):
            await CommandProvider(command_offer(cloud, list="head -c 2000000 /dev/zero"), RUN).observe()
    finally:
        cloud.close()


async def test_commands_that_fail_or_hang_end_with_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = CommandCloud(tmp_path / "cloud")
    offer = command_offer(cloud, start="echo no room >&2; exit 3")
    with pytest.raises(ResourceError, match=f"offer one, command start for {FIRST}: .*got 3: no room"):
        await CommandProvider(offer, RUN).rent(FIRST, LINK, 1.2)
    with pytest.raises(Unreachable, match="offer one, command list: .*got 127"):
        await CommandProvider(command_offer(cloud, list="no-such-program"), RUN).observe()
    monkeypatch.setitem(command.LIMITS_S, "list", 0.2)
    hanging = f"sleep 600 & echo $! > {tmp_path / 'child'}; wait"
    with pytest.raises(Unreachable, match="command list: expected it to end within 0 s"):
        await CommandProvider(command_offer(cloud, list=hanging), RUN).observe()
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        await asyncio.sleep(0.01)


def test_a_machine_gets_echo2_from_the_run_or_from_git_and_never_by_its_name_from_an_index(tmp_path: Path) -> None:
    def scripts(**settings: str) -> tuple[str, str]:
        sky = SkyPilotProvider(sky_offer(**settings), RUN, Sky()).task(FIRST, LINK, 1.2).setup
        given = CommandProvider(MachineOffer("one", "command", settings={**cloud.settings, **settings}), RUN)
        return str(sky), given.script(FIRST, LINK)

    cloud = CommandCloud(tmp_path / "cloud")
    for script in scripts():
        assert running_wheel().sha256 in script and f'"$HOME/{running_wheel().name}[worker]"' in script
    for script in scripts(install="git+https://example.org/echo2@v1", extra="engine"):
        assert "pip install 'echo2[engine] @ git+https://example.org/echo2@v1'" in script
        assert running_wheel().sha256 not in script
    for script in scripts(setup="true"):
        assert "pip install" not in script
    for problem, settings in (
        ("the name echo2 on a package index is not this project's", {"install": "echo2[worker]==0.1.0"}),
        ("extra: expected one of worker, engine", {"extra": "sinks"}),
    ):
        with pytest.raises(ConfigError, match=problem):
            scripts(**settings)


async def test_skypilot_keeps_the_link_off_the_command_and_tells_what_its_cloud_says() -> None:
    sky = Sky()
    provider = SkyPilotProvider(sky_offer(infra="aws/us-east-1"), RUN, sky)
    await provider.rent(FIRST, LINK, 1.2)
    await provider.rent(SECOND, LINK, 2.0)
    assert sky.launched[1].resources.wanted["max_hourly_cost"] == 2.1, "the operator has raised the offer's price"
    await provider.release(SECOND)
    task = sky.launched[0]
    assert LINK not in task.run and task.secrets == {"ECHO2_JOIN_LINK": LINK}
    assert task.resources.wanted == {
        "use_spot": True, "accelerators": "A100:1", "infra": "aws/us-east-1", "max_hourly_cost": 1.26,
    }  # fmt: skip
    sky.clusters["of-somebody-else"] = ClusterStatus.UP
    sky.clusters[FIRST] = ClusterStatus.STOPPED
    assert {name: one.state for name, one in (await provider.observe()).items()} == {FIRST: MachineState.ENDING}
    with pytest.raises(ConfigError, match="that a rented machine can reach, got 127.0.0.1: set coordinator.advertise"):
        await provider.rent(SECOND, "echo2://127.0.0.1:8418/peer?token=a", 1.2)
    sky.is_full = True
    with pytest.raises(ResourceError, match="no A100 in any zone"):
        await provider.rent(SECOND, LINK, 1.2)
    sky.is_away = True
    with pytest.raises(Unreachable, match="does not answer"):
        await provider.observe()


async def test_a_launch_that_takes_long_keeps_no_other_work_of_the_process_waiting() -> None:
    sky, is_launched = Sky(), threading.Event()
    sky.launch = lambda task, cluster_name: lambda: is_launched.wait(5)  # type: ignore[method-assign]
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    renting = asyncio.create_task(SkyPilotProvider(sky_offer(), RUN, sky).rent(FIRST, LINK, 1.2))
    while not any(thread.name.startswith(("skypilot", "ThreadPool")) for thread in threading.enumerate()):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    async with asyncio.timeout(2):
        await asyncio.to_thread(lambda: None)
    is_launched.set()
    await renting


def test_skypilot_takes_the_task_that_we_build() -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    settings = {"infra": "kubernetes", "cpus": "4+", "memory": "16", "disk_size": "100"}
    offer = MachineOffer("one", "skypilot", "", 1.2, is_spot=True, settings=settings)
    task = SkyPilotProvider(offer, RUN).task(FIRST, LINK, 1.2)
    (resources,) = task.resources
    assert (resources.use_spot, resources.cpus, resources.disk_size) == (True, "4+", 100)
    assert "ECHO2_JOIN_LINK" in task.secrets and LINK not in task.run
    for name in ("ClusterDoesNotExist", "ResourcesUnavailableError", "ApiServerConnectionError"):
        assert issubclass(getattr(sky.exceptions, name), Exception)
    assert sky.StatusRefreshMode.AUTO
    with pytest.raises(ConfigError, match="SkyPilot takes no such task"):
        SkyPilotProvider(MachineOffer("one", "skypilot", settings={"infra": "the/moon/x/y/z"}), RUN)


def test_without_its_library_a_provider_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(ConfigError, match="pip install 'skypilot>="):
        SkyPilotProvider(sky_offer(), RUN)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1 to 64 tables"),
        ("x = 1", "1 to 64 tables"),
        ("offer = [", "expected TOML"),
        ("[[offer]]\nname = 'a'", "expected a field 'provider'"),
        ("[[offer]]\nname = 'a'\nprovider = 'moon'", "expected one of manual, local, skypilot, command, got 'moon'"),
        ("[[offer]]\nname = 'A b'\nprovider = 'local'", "expected a name"),
        ("[[offer]]\nname = 'a'\nprovider = 'local'\nusd_per_hour = true", "usd_per_hour: expected"),
        ("[[offer]]\nname = 'a'\nprovider = 'local'\nprice = 1", "got 'price'"),
        ("[[offer]]\nname = 'a'\nprovider = 'command'", "expected what a machine of command costs, or 0, got nothing"),
        ("[[offer]]\nname = 'a'\nprovider = 'local'\n[[offer]]\nname = 'a'\nprovider = 'local'", "'a' twice"),
        ("[[offer]]\nname = 'a'\nprovider = 'manual'\nis_automatic = true", "a person has to"),
    ],
)
def test_offers_that_make_no_sense_are_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "offers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        load_offers(path)


def test_offers_are_read_wrong_settings_named_and_workers_told_where_the_base_checkpoint_is(tmp_path: Path) -> None:
    assert [offer.is_automatic for offer in load_offers(None)] == [False, False]
    with pytest.raises(ConfigError, match=rf"expected a file at no.toml from {Path.cwd()}: No such file"):
        load_offers(Path("no.toml"))
    path = tmp_path / "offers.toml"
    path.write_text(
        "[[offer]]\nname = 'm'\nprovider = 'manual'\n"
        "[[offer]]\nname = 'here'\nprovider = 'local'\nusd_per_hour = 1\nmachines_max = 3\n[offer.settings]\ncolour = 'red'"
    )
    by_hand, offer = load_offers(path)
    assert not by_hand.is_automatic, "nor does the planner wait for a person"
    assert (offer.usd_per_hour, offer.machines_max, offer.is_automatic) == (1, 3, True)
    for wrong, problem in ((offer, "got 'colour'"), (MachineOffer("k", "command"), "'start', it is missing")):
        with pytest.raises(ConfigError, match=problem):
            make_provider(wrong, options(tmp_path))
    manual = make_provider(MachineOffer("m", "manual"), options(tmp_path, model_path="org/base"))
    words = shlex.split(asyncio.run(manual.rent(FIRST, LINK, 1.2)))
    assert words == ["echo-worker", "join", LINK, "--model.path", "org/base"]
    cloud = SkyPilotProvider(sky_offer(arguments="--verbose"), RUN, Sky(), "/models/a base")
    assert "--model.path '/models/a base' --verbose" in cloud.task(FIRST, LINK, 1.2).run
