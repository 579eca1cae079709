"""Hole punching (DCUtR over TCP simultaneous open), with the library's exchange and dials but our own sequence of events.

The library's driver first dials the peer's private addresses for ten seconds, and starts on both sides at once, which
spoils the timing (0.8.1: 19 s until a hole between two Linux NATs; here under one). Guarantees: one attempt per
peer at a time, at most len(PAUSES_S) of them, PAUSES_S apart. Works if the NAT keeps a connection's
source port (most do); if it chooses ports at random, no dial can predict them and the link stays relayed.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import trio
from libp2p import new_host
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.autonat.autonat import AUTONAT_PROTOCOL_ID
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2 import DCUtRProtocol
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL, STOP_PROTOCOL_ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.nat.access import STRANGER_S, AcceptGate, DialGate, ReachabilityService
from echo2.broadcast.nat.reach import HostFacts, HostOptions
from echo2.broadcast.nat.relay import (
    PROTOCOL,
    MemberRelay,
    Members,
    dial_circuit,
    peer_of_stream,
    reserve,
    reset,
    widen,
)
from echo2.broadcast.nat.relay_book import RelayBook, RelayLimits
from echo2.outside.net import EVERY_ADDRESS, listened, listening_socket
from echo2.trust.identity import PeerIdentity
from echo2.trust.tls import Credentials

PAUSES_S = (0.0, 10.0, 60.0)  # NAT entries of a failed try last about a minute
PUNCHED_MAX = 64  # twice the neighbours of a plan
ADDRESSES_MAX = 4  # two private and two public ones
_log = logging.getLogger("echo2.broadcast")


class HolePuncher(DCUtRProtocol):  # type: ignore[misc]  # untyped library
    def __init__(self, host: BasicHost, members: Members, gate: DialGate) -> None:
        super().__init__(host)
        self._gate = gate
        self._members = members
        self._at_work: set[PeerId] = set()

    async def punch(self, peer: PeerId) -> None:
        """Tries to punch a hole until there is a direct connection, the peer is gone, or all attempts have failed."""
        if peer in self._at_work or len(self._at_work) >= PUNCHED_MAX:
            return
        self._at_work.add(peer)
        target = ID.from_base58(peer)
        try:
            if not await self._members.wait_known(peer):
                return
            for number, pause_s in enumerate(PAUSES_S, start=1):
                await trio.sleep(pause_s)
                if not self.host.get_network().connections.get(target):
                    return
                if await self.initiate_hole_punch(target):
                    _log.info("libp2p: punched a hole to %s", peer)
                    return
                _log.info("libp2p: no hole to %s after %d of %d attempts", peer, number, len(PAUSES_S))
        except Exception as error:  # the relayed link stays
            _log.info("libp2p: no hole to %s: %s", peer, str(error) or type(error).__name__)
        finally:
            self._at_work.discard(peer)

    async def _perform_hole_punch(self, peer_id: ID, addrs: list[Multiaddr], as_responder: bool = False) -> bool:
        """Dials at most ADDRESSES_MAX of the addresses that the peer named in this exchange, none named earlier."""
        self.host.get_peerstore().clear_addrs(peer_id)
        allowed = [address for address in addrs if self._gate.lets_through(address)][:ADDRESSES_MAX]
        return bool(await super()._perform_hole_punch(peer_id, allowed, as_responder))

    async def _dial_peer(
        self, peer_id: ID, addr: Multiaddr, source: tuple[str, int] | None = None, as_responder: bool = False
    ) -> None:
        """Dials from the listener of the address's own IP family; the library would take the first listener it finds."""
        if source is not None:
            source = ("::" if "/ip6/" in str(addr) else "0.0.0.0", source[1])
        await super()._dial_peer(peer_id, addr, source, as_responder)

    async def _spam_udp_for_hole_punch(self, *_: Any) -> None:
        """Disabled: only TCP is punched."""

    async def _auto_drive_loop(self) -> None:
        """Disabled: attempts start in `punch`, on one side only."""
        await trio.sleep_forever()

    async def _try_unilateral_upgrade(self, peer_id: ID) -> bool:
        """Disabled: links are relayed only between peers that are known not to be dialable."""
        return False


EXCHANGE = TProtocol("/echo2/exchange/1")
OWN_PROTOCOLS = (PROTOCOL, EXCHANGE, HOP_PROTOCOL, STOP_PROTOCOL_ID, AUTONAT_PROTOCOL_ID)
"""Their handlers check the caller's membership themselves."""
PUNCH_S = 90.0  # as long as the other side tries (PAUSES_S)
RENEW_S = 20.0  # reservations last minutes; a lost relay is noticed within this
JUDGE_S = 300.0  # repeat the check, because networks change
RETRY_S_MIN, RETRY_S_MAX = 0.5, 15.0  # a relay restarts in seconds
CONNECT_S = 8.0  # TCP, noise and yamux over a slow link
RELAYS_MAX = 4  # coordinator and learner, each with two addresses
PEERS_MAX = 2048  # some MB of addresses
CLOSE_S = 2.0  # a good-bye; the other side times out anyway
WAITING_STREAMS_MAX = 16  # more at once come from no honest member
# The library logs each failed dial of a hole punch as an error, and most must fail; what matters is logged here.
logging.getLogger("libp2p").setLevel(logging.CRITICAL)


class P2pHost:
    """Create it anywhere; call `run` and everything else in trio."""

    _host: BasicHost
    _nursery: trio.Nursery
    _autonat: ReachabilityService
    _puncher: HolePuncher

    def __init__(
        self,
        credentials: Credentials,
        options: HostOptions,
        changed: Callable[[HostFacts], object],
        carry: Callable[[Any, PeerIdentity, bool], Awaitable[None]],
    ) -> None:
        """`carry`: serves a stream through a hole, which this side opened or not, until it ends."""
        self.credentials, self.options = credentials, options
        self._changed, self._carry = changed, carry
        self.facts, self.book = HostFacts(), RelayBook(RelayLimits())
        self.port = options.port or _free_port(options.listen_host)
        self._members = Members(credentials, options.is_barred)
        self._gate = DialGate(lambda: self.facts.public_host)
        self.accepted = AcceptGate()
        self._relays: dict[tuple[PeerId, str], trio.CancelScope] = {}
        self._seen_at: dict[PeerId, float] = {}
        self._judged_at: dict[PeerId, float] = {}
        self._waiting: Counter[PeerId] = Counter()  # streams of peers that have not shown their certificate yet

    async def run(self, started: Callable[[], object]) -> None:
        secret = self.credentials.identity.private_bytes()
        # By default the library dials known peers until it has 50 connections, and prunes above 300.
        few = ConnectionConfig(min_connections=0, low_watermark=0, high_watermark=PEERS_MAX, max_connections=PEERS_MAX)
        host = new_host(key_pair=create_new_key_pair(secret), listen_addrs=[], connection_config=few)
        assert isinstance(host, BasicHost)
        self._host = host
        listens = [Multiaddr(f"/{_kind(ip)}/{ip}/tcp/{self.port}") for ip in _hosts(self.options.listen_host)]
        self._autonat = ReachabilityService(
            host, self._members, is_serving=self.options.is_relay, proven=self.options.proven
        )
        relay = MemberRelay(host, self._members, self.book, self.options.is_relay, self._on_circuit)
        self._gate.stand_before(host)
        self.accepted.stand_before(host)
        puncher = self._puncher = HolePuncher(host, self._members, self._gate)
        host.set_stream_handler(PROTOCOL, self._show_membership)
        host.set_stream_handler(EXCHANGE, self._accept)
        try:
            async with host.run(listens), background_trio_service(relay), background_trio_service(puncher):
                await relay.event_started.wait()
                await puncher.event_started.wait()
                # Makes the library's handlers (identify, push, ping, holes) serve only members of the run, as ours do.
                mux = host.get_mux()
                for protocol, handler in list(mux.handlers.items()):
                    if protocol is not None and handler is not None and protocol not in OWN_PROTOCOLS:
                        mux.add_handler(protocol, self._for_members(handler))
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._drop_strangers)
                    started()
        finally:
            self._gate.close()

    async def close(self) -> None:
        """Closes all connections cleanly; whatever still runs after that is cancelled with the thread."""
        with trio.move_on_after(CLOSE_S):
            for peer in list(self._host.get_network().connections):
                await self._host.get_network().close_peer(peer)

    # ---- membership

    def _for_members(self, handler: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def serve(stream: Any) -> None:
            peer = peer_of_stream(stream)
            if self._waiting[peer] >= WAITING_STREAMS_MAX:
                await reset(stream)
                return
            self._waiting[peer] += 1
            try:
                is_member = await self._members.wait_known(peer)
            finally:
                self._waiting[peer] -= 1
                if not self._waiting[peer]:
                    del self._waiting[peer]
            if is_member:
                await handler(stream)
            else:
                await reset(stream)

        return serve

    async def _show_membership(self, stream: Any) -> None:
        try:
            await self._members.introduce(stream, peer_of_stream(stream), is_first=False)
            self.accepted.prove(stream)
            await stream.close()
        except Exception as error:  # a stranger's error must not end the host
            _log.info("libp2p: %s is not admitted: %s", peer_of_stream(stream), error)
            await reset(stream)

    async def _introduce(self, peer: PeerId) -> PeerIdentity:
        """Shows our certificate and checks theirs; repeated each time, because the peer may have restarted and forgotten us."""
        stream = await self._host.new_stream(ID.from_base58(peer), [PROTOCOL])
        try:
            identity = await self._members.introduce(stream, peer, is_first=True)
            self.accepted.prove(stream)
            return identity
        finally:
            await reset(stream)

    async def _drop_strangers(self) -> None:
        while True:
            await trio.sleep(STRANGER_S / 3)
            now = trio.current_time()
            peers = {PeerId(peer.to_base58()) for peer in self._host.get_network().connections}
            self._seen_at = {peer: self._seen_at.get(peer, now) for peer in peers}
            for peer, since in self._seen_at.items():
                if not self._members.is_member(peer) and now - since > STRANGER_S:
                    _log.info("libp2p: %s has shown no certificate of this run within %.0f s", peer, STRANGER_S)
                    await self._close(peer)

    async def _close(self, peer: PeerId) -> None:
        try:
            with trio.move_on_after(2.0):
                await self._host.get_network().close_peer(ID.from_base58(peer))
        except Exception as error:  # already closed
            _log.debug("libp2p: closing %s: %s", peer, error)

    # ---- relays

    async def keep_relays(self, wanted: Mapping[PeerId, str]) -> None:
        """Keeps a reservation at each of these relays, by its address (host:port), and at no other; retries after failures."""
        for key in self._relays.keys() - wanted.items():
            self._relays.pop(key).cancel()
        for peer, address in wanted.items() - self._relays.keys():
            if len(self._relays) < RELAYS_MAX and peer != self.credentials.peer_id:
                scope = self._relays[peer, address] = trio.CancelScope()
                self._nursery.start_soon(self._keep_relay, peer, address, scope)

    async def _keep_relay(self, peer: PeerId, address: str, scope: trio.CancelScope) -> None:
        pause_s, turn, logged = RETRY_S_MIN, 0, ""
        try:
            with scope:
                while not scope.cancel_called:
                    pause_s, turn = min(RETRY_S_MAX, 2 * pause_s), turn + 1
                    try:
                        await self._settle_at(peer, address, turn - 1)
                        pause_s, turn, logged = RETRY_S_MIN, turn - 1, ""
                        await self._stay_at(peer)
                    except Exception as error:  # a relay may fail in any way; it is tried again
                        text = f"relay {peer} at {address}: {str(error) or type(error).__name__}"
                        if text != logged:  # retried forever, but each error is logged only once
                            _log.info("%s", text)
                        logged = text
                        self._without(peer, text)
                    await self._close(peer)
                    await trio.sleep(pause_s)
        finally:
            self._without(peer, "")

    async def _settle_at(self, peer: PeerId, address: str, turn: int) -> None:
        with trio.fail_after(CONNECT_S):
            relay = await _multiaddr_of(address, self.options.listen_host, turn)
            info = PeerInfo(ID.from_base58(peer), [relay])
            self._gate.know_relay(relay)
            await self._host.connect(info)
            await self._introduce(peer)
            await reserve(self._host, peer)
        self._judged_at.pop(peer, None)  # this connection may come from another address than the one before
        self._change(replace(self.facts, relays=(*(r for r in self.facts.relays if r != peer), peer), trouble=""))
        await self._judge(peer)

    async def _stay_at(self, peer: PeerId) -> None:
        """Renews the reservation; raises when it is lost. A failed renewal is also how a vanished relay is noticed."""
        next_at = trio.current_time() + RENEW_S
        while self._host.get_network().connections.get(ID.from_base58(peer)):
            await trio.sleep(0.5)
            if trio.current_time() >= next_at:
                await reserve(self._host, peer)
                next_at = trio.current_time() + RENEW_S
                await self._judge(peer)
        raise Unreachable("the connection ended")

    async def _judge(self, server: PeerId) -> None:
        """Finds out where others see us, and whether they can dial our port there. Every relay is asked, but a recent verdict
        of the coordinator's relay takes precedence, because peers are told what that one has seen."""
        is_fresh = self._is_judged_by(server)
        host = "" if is_fresh or not self.options.own_port else await self._observed_host()
        if not host:
            return
        try:
            verdict = await self._autonat.is_reachable(server, host, self.options.own_port)
        except Exception as error:  # asked again at the next renewal
            _log.info(
                "libp2p: %s did not say whether we can be reached: %s", server, str(error) or type(error).__name__
            )
            return
        if verdict is None:
            return
        self._judged_at[server] = trio.current_time()
        coordinator = self.credentials.coordinator_peer_id
        if server != coordinator and self._is_judged_by(coordinator):
            return
        self._change(replace(self.facts, public_host=host, is_reachable=verdict))

    def _is_judged_by(self, server: PeerId) -> bool:
        return trio.current_time() - self._judged_at.get(server, -JUDGE_S) < JUDGE_S

    async def _observed_host(self) -> str:
        """The address from which relays see our connections come (libp2p identify); empty if unknown."""
        manager = self._host._observed_addr_manager
        with trio.move_on_after(CONNECT_S):
            while manager is not None:
                for address in manager.addrs(min_observers=1):
                    for kind in ("ip4", "ip6"):
                        if f"/{kind}/" in str(address):
                            return str(address.value_for_protocol(kind))
                await trio.sleep(0.1)
        return ""

    def _without(self, relay: PeerId, trouble: str) -> None:
        left = tuple(other for other in self.facts.relays if other != relay)
        self._change(replace(self.facts, relays=left, trouble=trouble))

    def _change(self, facts: HostFacts) -> None:
        if facts != self.facts:
            self.facts = facts
            self._changed(facts)

    # ---- hidden peers

    def _on_circuit(self, peer: PeerId) -> None:
        """Starts the hole punch: by the DCUtR spec, the side that accepted the circuit does."""
        self._nursery.start_soon(self._puncher.punch, peer)

    async def punch(self, peer: PeerId, relay: PeerId) -> None:
        """Meets the peer on a circuit of a relay until there is a hole, and passes a stream over that to `carry`. The
        peer, which accepts the circuit, begins to punch. Unreachable where PUNCH_S pass."""
        try:
            if not self._unrelayed(peer):
                if relay not in self.facts.relays:
                    raise Unreachable(f"no reservation at relay {relay} ({self.facts.trouble or 'not yet'})")
                await self._close(peer)  # a circuit through a vanished relay may still look open
                await dial_circuit(self._host, relay, peer)
                await self._introduce(peer)
            with trio.fail_after(PUNCH_S):
                while not self._unrelayed(peer):
                    if not self._host.get_network().connections.get(ID.from_base58(peer)):
                        raise Unreachable("the circuit ended")
                    await trio.sleep(0.05)
            with trio.fail_after(CONNECT_S):
                identity = await self._introduce(peer)
                while _is_over_circuit(stream := await self._host.new_stream(ID.from_base58(peer), [EXCHANGE])):
                    await reset(stream)
                    await trio.sleep(0.5)
                await widen(stream)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._close(peer)
            raise
        self._nursery.start_soon(self._carry, stream, identity, True)

    def _unrelayed(self, peer: PeerId) -> bool:
        connections = self._host.get_network().connections.get(ID.from_base58(peer), [])
        return any(connection.get_connection_type() is ConnectionType.DIRECT for connection in connections)

    async def _accept(self, stream: Any) -> None:
        peer = peer_of_stream(stream)
        identity = self._members.identity_of(peer)
        if identity is None or _is_over_circuit(stream):
            why = "but has shown no certificate of this run" if identity is None else "over a circuit, not a byte pipe"
            _log.info("libp2p: %s requests an exchange %s", peer, why)
            await reset(stream)
            return
        await widen(stream)
        await self._carry(stream, identity, False)


def _is_over_circuit(stream: Any) -> bool:
    return any("/p2p-circuit" in str(address) for address in stream.muxed_conn.get_transport_addresses())


def _free_port(host: str) -> int:
    """Picks a free port: the library reports the requested port, not the bound one, so 0 is resolved beforehand."""
    with listening_socket(host) as probe:
        probe.bind((listened(host), 0))
        return int(probe.getsockname()[1])


def _hosts(listen_host: str) -> tuple[str, ...]:
    """The hosts to listen on; both families for a wildcard, because hole punches dial from a listener of the peer's family."""
    bare = listened(listen_host)
    return ("0.0.0.0", bare) if bare == EVERY_ADDRESS else (bare,)


def _kind(host: str) -> str:
    return "ip6" if ":" in host else "ip4"


async def _multiaddr_of(address: str, own_host: str = "", turn: int = 0) -> Multiaddr:
    """Resolves a relay's address, preferring families in which this node listens, because that is where it is to be seen. Several
    addresses take turns."""
    host, _, port = address.rpartition(":")
    infos = await trio.socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    if not infos:
        raise Unreachable(f"{address}: expected a host that can be resolved")
    ips = list(dict.fromkeys(str(each[4][0]) for each in infos))
    families = {_kind(each) for each in _hosts(own_host)}
    ips = [ip for ip in ips if _kind(ip) in families] or ips
    ip = ips[turn % len(ips)]
    return Multiaddr(f"/{_kind(ip)}/{ip}/tcp/{port}")
