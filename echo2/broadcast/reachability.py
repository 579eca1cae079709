"""How two nodes get a link: direct, reverse, hole-punched or relayed. A pure rule over known facts.

Guarantees: both ends arrive at the same kind; every answer carries its reason, in words for the operator.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from echo2.base.ids import PeerId

RELAYED_NEIGHBOURS = 4  # per side, in the order of peer IDs: a node keeps relayed links to at most twice as many peers


class LinkKind(enum.StrEnum):
    """Kinds of link, best first."""

    DIRECT = "direct"
    REVERSE = "reverse"
    HOLE_PUNCHED = "hole-punched"
    RELAYED = "relayed"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LinkWay:
    """The kind of a link, and the reason for it."""

    kind: LinkKind
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Access:
    """How a node can be reached. `addresses`: any peer can dial them. `lan_addresses`: only peers with the same `public_host`
    can. `relays`: peer IDs of the relays where it has a reservation. `met`: hidden peers to which it has an unrelayed
    connection."""

    addresses: tuple[str, ...] = ()
    lan_addresses: tuple[str, ...] = ()
    public_host: str = ""
    relays: tuple[PeerId, ...] = ()
    met: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rule's answer for an ordered pair: where the first dials the second; no addresses: it waits to be dialled.
    `is_fit_for_trees`: the link is known to work and loads no third party, so trees may use it."""

    way: LinkWay
    addresses: tuple[str, ...] = ()
    is_fit_for_trees: bool = False


def meeting(me: PeerId, ours: Access, other: PeerId, theirs: Access) -> Meeting:
    """How `me` and `other` get a link, and which addresses `me` dials."""
    if theirs.addresses:
        return Meeting(LinkWay(LinkKind.DIRECT, "the peer can be dialled"), theirs.addresses, is_fit_for_trees=True)
    if ours.addresses:
        return Meeting(LinkWay(LinkKind.REVERSE, "the peer cannot be dialled, so it dials us"), is_fit_for_trees=True)
    have_met = other in ours.met and me in theirs.met
    circuits = tuple(circuit_address(relay) for relay in theirs.relays if relay in ours.relays)
    if ours.public_host and ours.public_host == theirs.public_host and (ours.lan_addresses or theirs.lan_addresses):
        way = LinkWay(LinkKind.DIRECT, f"both are behind {ours.public_host} and share its network")
        return Meeting(way, theirs.lan_addresses + circuits, have_met)
    if have_met:
        way = LinkWay(LinkKind.HOLE_PUNCHED, "neither can be dialled; both opened their NAT at once")
        return Meeting(way, circuits, is_fit_for_trees=True)
    if circuits:
        return Meeting(LinkWay(LinkKind.RELAYED, "neither can be dialled, and no hole has been punched"), circuits)
    return Meeting(LinkWay(LinkKind.NONE, "neither can be dialled, and they share no relay"))


def circuit_address(relay: PeerId) -> str:
    """The address of a peer that has a reservation at `relay`."""
    return f"/p2p/{relay}/p2p-circuit"


def relay_of(address: str) -> PeerId | None:
    """The relay that an address goes through; None for host:port."""
    head, circuit, _ = address.partition("/p2p-circuit")
    return PeerId(head.rpartition("/p2p/")[2]) if circuit else None


def is_relayed_neighbour(first: PeerId, second: PeerId, hidden: Sequence[PeerId]) -> bool:
    """Whether two nodes that need a relay keep a link: their positions in the ring of `hidden` peers are close."""
    ring = sorted(hidden)
    if first not in ring or second not in ring:
        return False
    apart = abs(ring.index(first) - ring.index(second))
    return min(apart, len(ring) - apart) <= RELAYED_NEIGHBOURS


NAMED_MAX = 4  # of each kind: two of each IP family
PORT_MIN = 1024  # system services (SSH, mail, DNS) listen below it; they would take many TLS hellos for an attack
PROVEN_S = 900.0  # Lifetime of a proven address. Workers renew the proof every five minutes.
PROVEN_PEERS_MAX = 16_384  # as the largest fleet, some MB
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(slots=True)
class MetAddresses:
    """Addresses at which a dial-back reached workers: the last one of each, for PROVEN_S."""

    _by_peer: OrderedDict[PeerId, tuple[str, float]] = field(default_factory=OrderedDict)

    def note(self, peer_id: PeerId, address: str, now: float) -> None:
        """The peer showed its certificate at `address`, on the host that its own connection comes from."""
        self._by_peer.pop(peer_id, None)
        self._by_peer[peer_id] = (address, now)
        while len(self._by_peer) > PROVEN_PEERS_MAX:
            self._by_peer.popitem(last=False)

    def of(self, peer_id: PeerId, now: float) -> tuple[str, ...]:
        address, at = self._by_peer.get(peer_id, ("", 0.0))
        return (address,) if address and now - at <= PROVEN_S else ()


def dialable(named: Access, seen_from: str, proven: Collection[str] = ()) -> tuple[Access, tuple[str, ...]]:
    """Filters the addresses that peers may be given of a worker seen from this host and reached at `proven`; returns them and the
    rejected ones."""
    ip, met = _ip(seen_from), {_place(address) for address in proven} - {None}
    addresses = tuple(address for address in named.addresses if _is_at(address, ip) or _place(address) in met)[
        :NAMED_MAX
    ]
    is_behind = ip is not None and _ip(named.public_host) == ip
    lan = tuple(address for address in named.lan_addresses if is_behind and _is_within(address, ip))[:NAMED_MAX]
    access = replace(named, addresses=addresses, lan_addresses=lan, public_host=named.public_host if is_behind else "")
    valid = {*addresses, *lan}
    return access, tuple(address for address in (*named.addresses, *named.lan_addresses) if address not in valid)


def is_punchable(host: str, port: int, own_host: str) -> bool:
    """Whether a node that relays see at `own_host` may punch a hole to the address that a hidden peer claims. Never to an
    address more local than our own: a node on the internet never dials into its private network, and one seen in a private
    network never dials its own machine."""
    there = _ip(host)
    if there is None or there.is_link_local or there.is_unspecified or there.is_multicast or port < PORT_MIN:
        return False
    return _closeness(there) <= _closeness(_ip(own_host))


def _closeness(host: _Ip | None) -> int:
    if host is None or host.is_global:
        return 0
    return 2 if host.is_loopback else 1


def _is_at(address: str, ip: _Ip | None) -> bool:
    """Whether the address is on the host itself; the two loopback addresses of `localhost` count as one host."""
    host = _host(address)
    return host is not None and ip is not None and (host == ip or {str(host), str(ip)} == {"127.0.0.1", "::1"})


def _is_within(address: str, ip: _Ip | None) -> bool:
    """Whether it may belong to a private network behind `ip`, and not to the dialling machine itself."""
    host = _host(address)
    if host is None or host.is_loopback or host.is_link_local or host.is_unspecified or host.is_multicast:
        return host is not None and host == ip
    return host == ip or not host.is_global


def _place(address: str) -> tuple[_Ip, int] | None:
    """Parsed host and port of a dialable address, so that spellings compare equal."""
    host = _host(address)
    return None if host is None else (host, int(address.rpartition(":")[2]))


def _host(address: str) -> _Ip | None:
    """The host of `address:port` if the port may be dialled; None otherwise."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and PORT_MIN <= int(port) < 1 << 16):
        return None
    return _ip(host.removeprefix("[").removesuffix("]"))


def _ip(text: str) -> _Ip | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


BLOCK_BYTES = 32 << 10  # 2,048 samples of TRANSFER_BYTES
TRANSFER_BYTES = 64 << 20  # ends on a gigabit link after half a second
TRANSFER_S = 4.0  # slow start is over well before the half of it
DIAL_BACK_S = 4.0  # as PROBE_S of nat/reach
TURN_S = 30.0
"""How long a machine waits for its turn: one transfer at a time, or concurrent ones would distort each other."""
NONCE_BYTES = 16  # 128 bits cannot be guessed
SETTLED_SHARE = 0.5  # the first half may be slow start


@dataclass(slots=True)
class Throughput:
    """Measures the rate of one transfer as its bytes arrive."""

    total_bytes: int = 0
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TRANSFER_BYTES // BLOCK_BYTES + 1))

    def add(self, size_bytes: int, now: float) -> None:
        self.total_bytes += size_bytes
        self._samples.append((now, self.total_bytes))

    def is_enough(self, now: float) -> bool:
        """Whether the transfer has reached TRANSFER_S or TRANSFER_BYTES."""
        return self.total_bytes >= TRANSFER_BYTES or (bool(self._samples) and now - self._samples[0][0] >= TRANSFER_S)

    @property
    def bytes_per_s(self) -> float:
        """0.0 before the second sample."""
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return 0.0
        (began, _), (ended, total) = self._samples[0], self._samples[-1]
        settled_at = began + SETTLED_SHARE * (ended - began)
        at, before = max(sample for sample in self._samples if sample[0] <= settled_at)
        return (total - before) / (ended - at)


@dataclass(frozen=True, slots=True)
class Seen:
    """One connection at both of its ends. `local` None: this end's address is unknown. `dialled_port` 0: dialling back failed."""

    local: tuple[str, int] | None
    observed: tuple[str, int]
    dialled_port: int
    has_relay: bool


def own_reach(view: Seen) -> LinkWay:
    """The best kind of link that two machines such as this one would get to each other."""
    host, port = view.observed
    if view.dialled_port:
        return LinkWay(LinkKind.DIRECT, f"others can dial this machine at {host}, port {view.dialled_port}")
    if view.local is None:
        return LinkWay(
            LinkKind.RELAYED, f"nobody can dial it at {host}; whether holes can be punched cannot be told here"
        )
    if view.local[0] == host:
        hidden = f"nobody can dial it: {host} is its own address, and something filters what comes in"
    else:
        hidden = f"nobody can dial it: it is behind a NAT, {view.local[0]} is seen as {host}"
    if not view.has_relay:
        return LinkWay(LinkKind.NONE, f"{hidden}; the coordinator has no relay where hidden machines meet")
    if view.local[1] == port:
        return LinkWay(LinkKind.HOLE_PUNCHED, f"{hidden}, but ports are kept, so holes can be punched")
    return LinkWay(LinkKind.RELAYED, f"{hidden}, and port {view.local[1]} became {port}, so holes cannot be foreseen")
