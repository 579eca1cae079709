"""The coordinator process: opens its state, listens, and runs until it is stopped.

Two ports for nodes: enrolment (TLS whose key the join link pins; the caller has no certificate yet) and services (mutual TLS).
The bound port numbers are saved, so that the same command after a kill listens where nodes look for it. Join links
for a worker, a learner and an operator are written to `folder`/links, readable only by their owner. Guarantees: `run` returns after
`stop`, or raises the error that made it impossible to continue; it leaves nothing listening. Waits for `stop` or for such
an error.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from echo2.base.errors import NO_ROOM, ConfigError, DiskFull, EchoError, PortBusy, StateError
from echo2.base.ids import PeerId, RunId
from echo2.base.units import address_of, is_loopback
from echo2.coordinator.fleet.enrolment import EnrolmentService, ProbeService, RenewalService
from echo2.coordinator.fleet.tokens import ROLES, token_hash
from echo2.coordinator.hub import CoordinatorOptions, Hub
from echo2.coordinator.learner import LearnerReachability
from echo2.coordinator.leases.book import is_quiet, moves, pace_of
from echo2.coordinator.money.providers.machine_setup import SetupService
from echo2.coordinator.money.provisioner import MakeProvider, load_offers, make_provider
from echo2.coordinator.operator import Commands, OperatorService
from echo2.coordinator.planning.service import Planning
from echo2.coordinator.store import SqlStore
from echo2.coordinator.streams import CoordinatorService
from echo2.coordinator.web.page import Dashboard
from echo2.outside import here, unix_now
from echo2.outside.files import hold
from echo2.outside.guard import cancel_all, noting
from echo2.trust import tls
from echo2.trust.enrolment import LOOK_S_MAX, renewal_due_unix_s
from echo2.trust.identity import JoinLink, RunAuthority
from echo2.trust.ports import SERVICES
from echo2.wire.gen.echo2.v1 import coordinator_pb2_grpc, enrolment_pb2_grpc, probe_pb2_grpc

TICK_S = 0.5  # a tenth of the heartbeat interval: a silent worker is noticed about when it is due
SETTLED_LOOK_S = 1.0  # a second more of a process that costs nothing
CHECKPOINT_S = 2.0  # what a power cut may lose
STOP_GRACE_S = 2.0  # for calls under way; nodes come back to the next process
LINK_LIFETIME_S = 30 * 86_400.0  # longer than most runs; where one is not, the file gets a new link in time
SWITCH_S = 0.0005  # after which a computing thread (planning) must let the loop run: a tenth of Python's own
GARBAGE_GROWTH = 1.25  # of memory between two walks through all objects
_log = logging.getLogger("echo2.coordinator")


def links_folder(folder: Path) -> Path:
    """The folder of a run's join links: `worker.link`, `learner.link`, `operator.link`."""
    return folder / "links"


OpenGarbage = Callable[[], AbstractContextManager[Callable[[], None]]]
OpenStore = Callable[[str, RunId, Path], SqlStore]


@contextmanager
def collected_garbage() -> Iterator[Callable[[], None]]:
    """Keeps the interpreter's own pauses short inside the block. The function that it gives is called at each tick. By default
    Python's collector walks all objects every few seconds: with 2,000 workers a third of a second each time, while lease
    requests wait. Here it examines at each tick the objects made since the last one and sets the survivors aside; it walks
    everything when the process's peak memory has grown by a quarter since the last walk, so garbage in cycles adds no more."""

    def peak_kb() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    was_enabled, switch_s, walked_at_kb = gc.isenabled(), sys.getswitchinterval(), peak_kb()

    def collect() -> None:
        nonlocal walked_at_kb
        if is_due := peak_kb() > GARBAGE_GROWTH * walked_at_kb:
            gc.unfreeze()
        gc.collect(2 if is_due else 1)
        gc.freeze()
        walked_at_kb = peak_kb() if is_due else walked_at_kb

    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
        sys.setswitchinterval(switch_s)


class CoordinatorDaemon:
    """The process. `started`: set once both ports listen; addresses and links are known from then on. `has_page`: it serves the
    operator's page."""

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        has_page: bool = True,
        open_store: OpenStore = SqlStore,
        garbage: OpenGarbage = collected_garbage,
        provider: MakeProvider = make_provider,
    ) -> None:
        self.options, self._keys = options, options.folder / "coordinator"
        self._provider = provider
        self._has_page, self._open_store, self._garbage = has_page, open_store, garbage
        self.started = asyncio.Event()
        self.enrol_address = self.services_address = self.dashboard_url = ""
        self.links: dict[str, str] = {}
        self.hub: Hub | None = None
        self._commands: Commands
        self._page: Dashboard | None = None
        self._own: tls.Credentials
        self._authority: RunAuthority
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
        async with AsyncExitStack() as opened:
            opened.callback(os.close, _locked(self._keys))
            collect = opened.enter_context(self._garbage())
            await self._setup(opened)
            await self._serve(collect)
        if self._error is not None:
            raise self._error

    async def _setup(self, opened: AsyncExitStack) -> None:
        """Opens the state, binds all ports and starts the servers; `opened` closes what it opens."""
        options, section = self.options, self.options.config.coordinator
        offers = load_offers(Path(section.offers) if section.offers else None)
        providers = {offer.name: self._provider(offer, options) for offer in offers}
        identity = tls.load_or_create_identity(self._keys)
        authority = self._authority = tls.load_or_create_authority(self._keys, identity, options.run_id)
        url = section.database_url or f"sqlite:///{self._keys / 'state.sqlite'}"
        store = self._open_store(url, options.run_id, self._keys / "state.mark")
        opened.callback(store.close)
        saved = store.load()
        hub = self.hub = Hub(options, identity, store, saved, SteadyUnixClock(), self._failed)
        ports = _Ports(hub, saved.meta, options.takes_free_ports)
        services, enrolment = tls.new_server(SERVICES), tls.new_enrolment_server()
        keys = self._own = tls.coordinator_credentials(authority, address_of(options.link_host, ports.wanted("port")))
        link_keys, enrol_keys = tls.server_credentials(keys), tls.enrolment_server_credentials(authority)
        port = ports.bind("port", lambda at: tls.bind_server(services, address_of(section.host, at), link_keys))
        enrol_port = ports.bind(
            "enrol_port", lambda at: tls.bind_server(enrolment, address_of(section.host, at), enrol_keys)
        )
        if self._has_page:
            ports.bind("dashboard_port", lambda at: self._open_page(opened, at))
        hub.flush_now()
        self.services_address = address_of(options.link_host, port)
        self.enrol_address = address_of(options.link_host, enrol_port)
        commands = self._commands = Commands(hub, options.link_host, enrol_port, offers, providers)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorService(hub), services)
        coordinator_pb2_grpc.add_OperatorServicer_to_server(OperatorService(commands), services)
        enrolment_pb2_grpc.add_RenewalServicer_to_server(RenewalService(hub, authority), services)
        service = EnrolmentService(hub, authority, self.services_address)
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, enrolment)
        enrolment_pb2_grpc.add_SetupServicer_to_server(SetupService(hub), enrolment)
        probe_pb2_grpc.add_ProbeServicer_to_server(ProbeService(hub), enrolment)
        has_relay = not is_loopback(options.link_host)  # a run on one machine needs none
        if has_relay and (relay_port := ports.wanted("relay_port")):
            hub.relay_address = address_of(options.link_host, relay_port)  # for nodes that connect before it listens
        for server in (services, enrolment):
            opened.push_async_callback(server.stop, STOP_GRACE_S)
            await server.start()
        if has_relay:
            await self._serve_relay(ports, opened)
        self._write_links()
        if self._page is not None:
            self._page.set_up(commands, options.folder, keys)
            self.dashboard_url = self._page.url
            tls.write_secret(links_folder(options.folder) / "dashboard.url", f"{self._page.address}\n".encode())

    def _open_page(self, opened: AsyncExitStack, port: int) -> int:
        section = self.options.config.coordinator
        page = self._page = Dashboard(section.dashboard_host or section.host, port)
        opened.callback(page.close)
        return page.port

    async def _serve_relay(self, ports: _Ports, opened: AsyncExitStack) -> None:
        """Starts the relay through which workers behind NATs find out how they can be reached, and reach each other. Loads its
        library in a thread, because that takes longer than the rest of the start."""
        await asyncio.to_thread(importlib.import_module, "echo2.broadcast.nat.reach")
        from echo2.broadcast.nat.reach import HostOptions, Nat

        hub, loop, options = self._running_hub, asyncio.get_running_loop(), self.options

        def proven(peer: PeerId, address: str) -> None:  # in the relay's thread as well
            loop.call_soon_threadsafe(hub.proven.note, peer, address, hub.clock.now())

        host, wanted = options.config.coordinator.host, ports.wanted("relay_port")
        relay = Nat(self._own)
        opened.push_async_callback(relay.close)
        where = HostOptions(host, wanted, is_barred=hub.membership.banned.__contains__, proven=proven)
        try:
            port = await relay.serve(where)
        except PortBusy as error:
            ports.check_others_do("port + 4", error)
            port = await relay.serve(replace(where, port=0))
        ports.save("relay_port", port)
        hub.flush_now()
        hub.relay, hub.relay_address = relay, address_of(options.link_host, port)
        _log.info("relay for workers behind NATs at %s", hub.relay_address)

    async def _serve(self, collect: Callable[[], None]) -> None:
        """Runs everything until `stop` or an error, and leaves nothing running. The page's task is outside the group, which would
        cancel it when a loop fails: its server ends its connections and its port itself."""
        hub, page = self._running_hub, self._page
        self.started.set()
        _log.info("listening: enrolment at %s, services at %s", self.enrol_address, self.services_address)
        if page is not None:
            where = f"; its access token is in {page.token_file}" if page.token_file is not None else ""
            _log.info("dashboard at %s%s", page.address, where)
        serving = asyncio.create_task(page.run() if page is not None else self._stop.wait())
        serving.add_done_callback(lambda _: self.stop())
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(loop)
                    for loop in (
                        Planning(hub).run(), self._commands.provisioner.run(), self._end_with_the_run(hub),
                        self._keep_renewed(), LearnerReachability(hub, self._own.authority_pem).run(),
                        _tick(hub, collect), _checkpoints(hub),
                    )
                ]  # fmt: skip
                await self._stop.wait()
                for task in loops:
                    task.cancel()
        except ExceptionGroup as group:  # the first one says why; others follow from the end
            raise group.exceptions[0] from None
        finally:
            self.stop()
            if page is not None:
                page.stop()
            await asyncio.wait((serving,), timeout=STOP_GRACE_S)
            (outcome,) = await cancel_all((serving,))
            hub.close()
        if isinstance(outcome, Exception):
            raise outcome

    @property
    def _running_hub(self) -> Hub:
        assert self.hub is not None, "setup comes first"
        return self.hub

    async def _end_with_the_run(self, hub: Hub) -> None:
        """With `exit_when_finished`, stops the coordinator once the run has finished and everything is released."""
        if self.options.exit_when_finished:
            while not hub.ending.is_settled:
                await asyncio.sleep(SETTLED_LOOK_S)
            _log.info("%s; nothing that it rented costs money any more: the coordinator ends", hub.ending.text)
            self._stop.set()

    def _write_links(self) -> None:
        """Writes the join links. Keeps each link's token while it is valid, with the present address; else makes a new one."""
        commands = self._commands
        folder, now = links_folder(self.options.folder), commands.hub.clock.now()
        for role in ROLES:
            path = folder / f"{role.value}.link"
            link = _kept_link(self.links.get(role.value), path, commands, now + 2 * LOOK_S_MAX)
            if link is None:
                _, link = commands.create_token(role.value, f"{role.value}.link", LINK_LIFETIME_S, 0)
            if link != self.links.get(role.value):
                tls.write_secret(path, (link + "\n").encode())
                self.links[role.value] = link

    async def _keep_renewed(self) -> None:
        """Renews what the coordinator's nodes and users find, each when it is due, until cancelled: its own certificate, which the
        page shows too, and the join links."""
        keys, page = self._own, self._page
        while True:
            await asyncio.sleep(LOOK_S_MAX)
            with noting("renewing certificate and links"):  # else tried again within an hour
                if unix_now() >= renewal_due_unix_s(keys.certificate):
                    fresh = tls.coordinator_credentials(self._authority, keys.coordinator_address)
                    if page is not None:
                        page.renew(fresh)
                    keys.renew(fresh.tls_key_pem, fresh.certificate)
                self._write_links()


def _kept_link(text: str | None, path: Path, commands: Commands, now: float) -> str | None:
    if text is None and not path.exists():
        return None
    try:
        secret = JoinLink.parse(text or tls.read_secret(path).decode()).token
    except (ConfigError, UnicodeDecodeError):
        return None
    hashed = token_hash(secret)
    known = any(token.hash == hashed and not token.problem(now) for token in commands.hub.tokens.tokens.values())
    return commands.join_link(secret) if known else None


async def _tick(hub: Hub, collect: Callable[[], None]) -> None:
    ended = hub.clock.now()
    while True:
        await asyncio.sleep(TICK_S / 2)
        collect()  # between two ticks, so that their pauses do not add up
        await asyncio.sleep(TICK_S / 2)
        with noting("a tick"):  # an error caused by one peer must not stop the ticks for all others
            began, ended = ended, hub.clock.now()  # so that a tick's own time counts
            hub.stood_still(ended - began)
            hub.tick()
            consolidate(hub)


async def _checkpoints(hub: Hub) -> None:
    """Makes checkpoints in another thread, so that granting a lease does not wait for the disk."""
    while True:
        await asyncio.sleep(CHECKPOINT_S)
        await asyncio.to_thread(hub.state.store.checkpoint)


class _Ports:
    """The ports to bind: the configured ones; for one that is 0, or was taken and may be, that of an earlier process, or any."""

    def __init__(self, hub: Hub, saved: Mapping[str, str], takes_free_ports: bool) -> None:
        self._hub, self._saved, self._takes_free_ports = hub, saved, takes_free_ports

    def wanted(self, name: str) -> int:
        """Machines that joined at a port know no other: it stays the run's, unless the configuration has changed."""
        configured = str(getattr(self._hub.config.coordinator, name))
        port, _, configured_then = self._saved.get(name, "").partition(" for ")
        is_kept = (configured_then or "0") == configured and (configured == "0" or self._takes_free_ports)
        return int((is_kept and port) or configured)

    def bind(self, name: str, bind: Callable[[int], int]) -> int:
        """`bind(port)` binds it and returns the port."""
        try:
            port = bind(self.wanted(name))
        except PortBusy as error:
            self.check_others_do(name, error)
            port = bind(0)
        self.save(name, port)
        return port

    def check_others_do(self, name: str, error: PortBusy) -> None:
        if not self._takes_free_ports:
            ways = "stop what listens there, or choose another; 0 takes a free one"
            raise PortBusy(f"coordinator.{name}: {error}; {ways}") from None

    def save(self, name: str, port: int) -> None:
        """The caller flushes: once all ports are bound, so a start that fails writes nothing."""
        self._hub.state.meta(name, f"{port} for {getattr(self._hub.config.coordinator, name)}")


def _locked(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return hold(folder / "lock", "coordinator")
    except OSError as error:
        kind = DiskFull if error.errno in NO_ROOM else StateError
        raise kind(f"{folder}: expected a folder that can be written, got: {error.strerror}") from None


def consolidate(hub: Hub) -> int:
    """Recalls the leases that would finish faster elsewhere; returns how many."""
    if not is_quiet(hub.book, hub.clock.now()):
        return 0
    members = hub.membership.members
    paces = {peer_id: pace_of(member) for peer_id, member in members.items()}
    names = {peer_id: member.name for peer_id, member in members.items()}
    # Until the new worker has the lease: a report, and its travel.
    hand_over_s = hub.config.coordinator.report_interval + 1.0
    recalls = moves(hub.book, paces, hand_over_s, names)
    for lease_id, to, reason in recalls:
        hub.note("lease", f"group {hub.book.leases[lease_id].group_id} is moved: {reason}")
        hub.handle(hub.book.recall, lease_id, reason, to)
    return len(recalls)


class SteadyUnixClock:
    """Counts a machine's sleep, in which rented machines cost money, and not that its time of day is set."""

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = unix_now() - here().clock.since_boot()

    def now(self) -> float:
        return here().clock.since_boot() + self._offset_s
