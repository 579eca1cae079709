"""The coordinator process: opens its state, listens, and runs until it is stopped.

Two ports for nodes: enrolment (TLS whose key the join link pins; the caller has no certificate yet) and services (mutual TLS).
The bound port numbers are saved, so that the same command after a kill listens where nodes look for it. Join links
for a worker, a learner and an operator are written to `folder`/links, readable only by their owner. Guarantees: `run` returns after
`stop`, or raises the error that made it impossible to continue; it leaves nothing listening. Waits for `stop` or for such
an error.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import IO, Protocol

from echo2.base.errors import ConfigError, DiskFull, EchoError, StateError
from echo2.base.hosts import joined
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.runtime.addresses import is_loopback
from echo2.coordinator.membership import OperatorSetting
from echo2.coordinator.options import CoordinatorOptions
from echo2.coordinator.runtime.clock import SteadyUnixClock
from echo2.coordinator.runtime.commands import Commands
from echo2.coordinator.runtime.consolidation import consolidate
from echo2.coordinator.runtime.ending import until_settled
from echo2.coordinator.runtime.enrolment import EnrolmentService, RenewalService
from echo2.coordinator.runtime.experience_file import known
from echo2.coordinator.runtime.hub import Hub
from echo2.coordinator.runtime.learner_door import LearnerDoor
from echo2.coordinator.runtime.operator import OperatorService
from echo2.coordinator.runtime.outlook import OutlookDesk
from echo2.coordinator.runtime.pauses import Pauses, ShortPauses
from echo2.coordinator.runtime.planning import Planning
from echo2.coordinator.runtime.probe import ProbeService
from echo2.coordinator.runtime.providers.offers import MakeProvider, load_offers, make_provider
from echo2.coordinator.runtime.remembering import PREDICTIONS, remember
from echo2.coordinator.runtime.services import CoordinatorService
from echo2.coordinator.runtime.store import SqlStore
from echo2.coordinator.runtime.web.server import OpenedPage
from echo2.coordinator.saved import StateStore, StoreChanges
from echo2.coordinator.tokens import token_hash
from echo2.outside import unix_now
from echo2.outside.guard import noting
from echo2.trust.identity import JoinLink, Role, RunAuthority
from echo2.trust.runtime import tls
from echo2.trust.runtime.enrolling import LOOK_S_MAX, renewal_due_unix_s
from echo2.trust.runtime.port_limits import SERVICES
from echo2.wire.gen.echo2.v1 import coordinator_pb2_grpc, enrolment_pb2_grpc, probe_pb2_grpc

TICK_S = 0.5
CHECKPOINT_S = 2.0
STOP_GRACE_S = 2.0
LINK_LIFETIME_S = 30 * 86_400.0
LINK_ROLES = (Role.WORKER, Role.LEARNER, Role.OPERATOR)
_log = logging.getLogger("echo2.coordinator")


def links_folder(folder: Path) -> Path:
    """The folder of a run's join links: `worker.link`, `learner.link`, `operator.link`."""
    return folder / "links"


class Page(Protocol):
    """The operator's page; `run` serves it until `stop`."""

    address: str
    url: str
    token_file: Path | None

    async def run(self) -> None: ...

    def stop(self) -> None: ...


class PagePort(Protocol):
    """The page's port, bound before anything of the page runs."""

    port: int

    def page(self, commands: Commands, folder: Path, keys: tls.Credentials) -> Page: ...

    def close(self) -> None: ...


class Store(StateStore, Protocol):
    """The state's store, with a `checkpoint` that runs in another thread than the event loop's."""

    def checkpoint(self) -> None: ...


OpenPage = Callable[[str, int], PagePort]
OpenStore = Callable[[str, RunId, Path], Store]


class CoordinatorDaemon:
    """The process. `started`: set once both ports listen; addresses and links are known from then on."""

    def __init__(
        self,
        options: CoordinatorOptions,
        open_page: OpenPage = OpenedPage,
        open_store: OpenStore = SqlStore,
        pauses: Callable[[], Pauses] = ShortPauses,
        provider: MakeProvider = make_provider,
    ) -> None:
        self.options = options
        self._provider = provider
        self._open_page, self._open_store, self._pauses = open_page, open_store, pauses
        self.started = asyncio.Event()
        self.enrol_address = self.services_address = self.dashboard_url = ""
        self.links: dict[str, str] = {}
        self.hub: Hub | None = None
        self._stop = asyncio.Event()
        self._error: EchoError | None = None

    def stop(self) -> None:
        """Asks `run` to return; may be called from a signal handler of the loop."""
        self._stop.set()

    def _failed(self, error: EchoError) -> None:
        self._error = self._error or error
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises PortBusy, StateError, DiskFull or ConfigError if it cannot start or continue."""
        with ExitStack() as files:
            files.enter_context(_locked(self.options.folder / "coordinator"))
            pauses = files.enter_context(self._pauses())
            async with AsyncExitStack() as servers:
                await self._serve(files, servers, pauses)
        if self._error is not None:
            raise self._error

    async def _serve(self, files: ExitStack, servers: AsyncExitStack, pauses: Pauses) -> None:
        options, keys = self.options, self.options.folder / "coordinator"
        offers = load_offers(options.offers_file)
        providers = {
            offer.name: self._provider(offer, options.run_id, options.folder, options.model_path) for offer in offers
        }
        identity = tls.load_or_create_identity(keys)
        authority = tls.load_or_create_authority(keys, identity, options.run_id)
        url = options.database_url or f"sqlite:///{keys / 'state.sqlite'}"
        store = self._open_store(url, options.run_id, keys / "state.mark")
        files.callback(store.close)
        saved = store.load()
        await asyncio.to_thread(known, options.machines_file)  # fails now if the file is invalid
        hub = self.hub = Hub(options, identity, store, saved, SteadyUnixClock(), self._failed)
        ports = saved.meta
        services, enrolment = tls.new_server(SERVICES), tls.new_enrolment_server()
        port = _port(options.port, ports.get("port"))
        own = tls.coordinator_credentials(authority, joined(options.link_host, port))
        port = tls.bind_server(services, joined(options.host, port), tls.server_credentials(own))
        enrol_port = _port(options.enrol_port, ports.get("enrol_port"))
        enrol_credentials = tls.enrolment_server_credentials(authority)
        enrol_port = tls.bind_server(enrolment, joined(options.host, enrol_port), enrol_credentials)
        web_host = options.dashboard_host or options.host
        page_port = self._open_page(web_host, _port(options.dashboard_port, ports.get("dashboard_port")))
        files.callback(page_port.close)
        bound = {"port": port, "enrol_port": enrol_port, "dashboard_port": page_port.port}
        store.write(StoreChanges(meta={name: str(number) for name, number in bound.items()}))
        self.services_address = joined(options.link_host, port)
        self.enrol_address = joined(options.link_host, enrol_port)
        commands = Commands(hub, options.link_host, enrol_port, offers, providers)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorService(hub, commands.rollouts), services)
        coordinator_pb2_grpc.add_OperatorServicer_to_server(OperatorService(commands, OutlookDesk(commands)), services)
        service = EnrolmentService(hub, authority, self.services_address)
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, enrolment)
        probe_pb2_grpc.add_ProbeServicer_to_server(ProbeService(hub), enrolment)
        enrolment_pb2_grpc.add_RenewalServicer_to_server(RenewalService(hub, authority), services)
        relay_port = _port(options.relay_port, ports.get("relay_port"))
        has_relay = not is_loopback(options.link_host)  # a run on one machine needs none
        if has_relay and relay_port:
            hub.relay_address = joined(options.link_host, relay_port)  # for nodes that connect before it listens
        for server in (services, enrolment):
            servers.push_async_callback(server.stop, STOP_GRACE_S)
            await server.start()
        if has_relay:
            hub.relay_address = await self._serve_relay(own, relay_port, store, servers)
        self._write_links(commands)
        dashboard = page_port.page(commands, options.folder, own)
        self.dashboard_url = dashboard.url
        await self._run_until_stopped(
            hub,
            commands,
            dashboard,
            _renew_own(own, authority),
            LearnerDoor(hub, own.authority_pem).run(),
            _tick(hub, pauses),
            _checkpoints(store),
            remember(hub, saved.meta.get(PREDICTIONS, "")),
        )

    def _is_banned(self, peer: PeerId) -> bool:
        """Whether the peer is banned. The relay's thread calls this; it is a single look-up."""
        member = self.hub.membership.members.get(peer) if self.hub is not None else None
        return member is not None and member.setting is OperatorSetting.BANNED

    async def _serve_relay(self, own: tls.Credentials, port: int, store: Store, servers: AsyncExitStack) -> str:
        """Starts the relay through which workers behind NATs find out how they can be reached, and reach each other. Returns its
        address. Loads the library in a thread, because that takes longer than the rest of the start."""
        await asyncio.to_thread(importlib.import_module, "echo2.coordinator.runtime.relay")
        from echo2.coordinator.runtime.relay import serve_relay

        hub, loop = self.hub, asyncio.get_running_loop()
        assert hub is not None, "the relay is the last to serve"

        def proven(peer: PeerId, address: str) -> None:
            loop.call_soon_threadsafe(hub.proven.note, peer, address, hub.clock.now())

        relay = await serve_relay(own, self.options.host, port, self._is_banned, proven)
        servers.push_async_callback(relay.close)
        hub.relay = relay
        store.write(StoreChanges(meta={"relay_port": str(relay.port)}))
        address = joined(self.options.link_host, relay.port)
        _log.info("relay for workers behind NATs at %s", address)
        return address

    async def _run_until_stopped(
        self, hub: Hub, commands: Commands, dashboard: Page, *more: Coroutine[None, None, None]
    ) -> None:
        self.started.set()
        _log.info("listening: enrolment at %s, services at %s", self.enrol_address, self.services_address)
        where = f"; its access token is in {dashboard.token_file}" if dashboard.token_file is not None else ""
        _log.info("dashboard at %s%s", dashboard.address, where)
        serving = asyncio.create_task(dashboard.run())
        running = (Planning(hub).run(), commands.provisioner.run(), self._end_with_the_run(hub), *more)
        tasks = [serving, *(asyncio.create_task(one) for one in running)]
        stopped = asyncio.create_task(_wait(self._stop))
        try:
            await asyncio.wait((*tasks, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            dashboard.stop()
            await asyncio.wait((serving,), timeout=STOP_GRACE_S)
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            hub.close()

    async def _end_with_the_run(self, hub: Hub) -> None:
        """With `exit_when_finished`, stops the coordinator once the run has finished and everything is released."""
        if self.options.exit_when_finished:
            await until_settled(hub)
            _log.info("%s; nothing costs money any more: the coordinator ends", hub.ending.text)
            self._stop.set()
        await asyncio.Event().wait()

    def _write_links(self, commands: Commands) -> None:
        """Writes the join links. Keeps each link's token if it is still valid, with the present address; else makes a new one."""
        folder, now = links_folder(self.options.folder), commands.hub.clock.now()
        for role in LINK_ROLES:
            path = folder / f"{role.value}.link"
            link = _kept_link(path, commands, now)
            if link is None:
                _, link = commands.create_token(role.value, f"{role.value}.link", LINK_LIFETIME_S, 0)
            tls.write_secret(path, (link + "\n").encode())
            self.links[role.value] = link


def _kept_link(path: Path, commands: Commands, now: float) -> str | None:
    if not path.exists():
        return None
    try:
        secret = JoinLink.parse(tls.read_secret(path).decode()).token
    except (ConfigError, UnicodeDecodeError):
        return None
    hashed = token_hash(secret)
    known = any(token.hash == hashed and not token.problem(now) for token in commands.hub.tokens.tokens.values())
    return commands.join_link(secret) if known else None


async def _renew_own(own: tls.Credentials, authority: RunAuthority) -> None:
    """Renews the coordinator's own certificate whenever it is due, until cancelled."""
    while True:
        await asyncio.sleep(min(LOOK_S_MAX, max(0.0, renewal_due_unix_s(own.certificate) - unix_now())))
        if unix_now() >= renewal_due_unix_s(own.certificate):
            fresh = tls.coordinator_credentials(authority, own.coordinator_address)
            own.renew(fresh.tls_key_pem, fresh.certificate)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _tick(hub: Hub, pauses: Pauses) -> None:
    while True:
        await asyncio.sleep(TICK_S / 2)
        pauses.tick()  # between two ticks, so that their pauses do not add up
        await asyncio.sleep(TICK_S / 2)
        with noting("a tick"):  # an error caused by one peer must not stop the ticks for all others
            hub.tick()
            consolidate(hub)


async def _checkpoints(store: Store) -> None:
    """Makes checkpoints in another thread, so that granting a lease does not wait for the disk."""
    while True:
        await asyncio.sleep(CHECKPOINT_S)
        await asyncio.to_thread(store.checkpoint)


def _port(wanted: int, kept: str | None) -> int:
    """The port to bind: the configured one; if that is 0, the one saved by an earlier process, or 0."""
    return wanted or int(kept or 0)


def _locked(folder: Path) -> IO[str]:
    """Locks the folder for this process until the returned file is closed. StateError if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (folder / "lock").open("a+")
    except OSError as error:
        kind = DiskFull if error.errno == 28 else StateError
        raise kind(f"{folder}: expected a folder that can be written, got: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise StateError(f"{folder}: expected it free, but process {holder} runs a coordinator in it") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
