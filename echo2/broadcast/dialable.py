"""Which of the addresses that a worker claims other peers may dial. Pure rules.

Every peer that receives an address in a plan connects to it, from inside its own network. So a claimed address counts only
if the coordinator has confirmed its host: the worker's control stream comes from that host, or the coordinator's relay has
dialled the address back and been shown the worker's certificate (an IPv6 control stream says nothing about the IPv4 address
that peers can dial).

Guarantees: no hostnames, no other hosts, no system ports, at most NAMED_MAX addresses; addresses of a
private network go only to peers that are seen behind the same public host. Leaves to others: proving that the worker answers
there (a connection ends unless the peer shows the certificate of the expected identity).
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from echo2.base.ids import PeerId
from echo2.broadcast.reachability import Access

NAMED_MAX = 4
PORT_MIN = 1024
"""System services (SSH, mail, DNS) listen below it; they would take many TLS hellos for an attack."""
PROVEN_S = 900.0
"""Lifetime of a proven address. Workers renew the proof every five minutes."""
PROVEN_PEERS_MAX = 16_384
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
    seen, met = _ip(seen_from), {_place(address) for address in proven} - {None}
    addresses = tuple(address for address in named.addresses if _is_at(address, seen) or _place(address) in met)[
        :NAMED_MAX
    ]
    is_behind = seen is not None and _ip(named.public_host) == seen
    lan = tuple(address for address in named.lan_addresses if is_behind and _is_within(address, seen))[:NAMED_MAX]
    kept = replace(named, addresses=addresses, lan_addresses=lan, public_host=named.public_host if is_behind else "")
    told = {*addresses, *lan}
    return kept, tuple(address for address in (*named.addresses, *named.lan_addresses) if address not in told)


def is_punchable(host: str, port: int, own_host: str) -> bool:
    """Whether a node that relays see at `own_host` may punch a hole to the address that a hidden peer claims.

    Never to an address more local than our own: a node on the internet never dials into its private network, and one seen
    in a private network never dials its own machine.
    """
    there = _ip(host)
    if there is None or there.is_link_local or there.is_unspecified or there.is_multicast or port < PORT_MIN:
        return False
    return _closeness(there) <= _closeness(_ip(own_host))


def _closeness(host: _Ip | None) -> int:
    if host is None or host.is_global:
        return 0
    return 2 if host.is_loopback else 1


def _is_at(address: str, seen: _Ip | None) -> bool:
    """Whether the address is on the host itself; the two loopback addresses of `localhost` count as one host."""
    host = _host(address)
    return host is not None and seen is not None and (host == seen or {str(host), str(seen)} == {"127.0.0.1", "::1"})


def _is_within(address: str, seen: _Ip | None) -> bool:
    """Whether it may belong to a private network behind `seen`, and not to the dialling machine itself."""
    host = _host(address)
    if host is None or host.is_loopback or host.is_link_local or host.is_unspecified or host.is_multicast:
        return host is not None and host == seen
    return host == seen or not host.is_global


def _place(address: str) -> tuple[_Ip, int] | None:
    """Parsed host and port of a dialable address, so that spellings compare equal."""
    host = _host(address)
    return None if host is None else (host, int(address.rpartition(":")[2]))


def _host(address: str) -> _Ip | None:
    """The host of `address:port` if the port may be dialled; None otherwise."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and PORT_MIN <= int(port[:6]) < 1 << 16):
        return None
    return _ip(host.removeprefix("[").removesuffix("]"))


def _ip(text: str) -> _Ip | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
