"""Which of the addresses that a worker names others dial. Pure rules.

An address in a plan makes every peer that is told of it open a connection there, from inside its own network. So what
a worker names counts only where the coordinator has seen the worker itself: at the host that its control stream comes
from, or where its relay has dialled it back and been shown its certificate (a control stream by IPv6 says nothing of the
IPv4 address that its peers can dial).

Guarantees: no hostname, no other host, no port of the system's services, no more than NAMED_MAX; addresses of a
private network go only to peers that are seen behind the same host. Leaves to others: proving that the worker answers
there (a connection ends unless the peer shows the certificate of the identity that was meant).
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
"""Below it listen services of the system (SSH, mail, names), which take a crowd of TLS hellos for an attack."""
PROVEN_S = 900.0
"""Workers ask for another proof every five minutes."""
PROVEN_PEERS_MAX = 16_384
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(slots=True)
class MetAddresses:
    """Where workers were met by a dial back: of each the last place, for PROVEN_S."""

    _by_peer: OrderedDict[PeerId, tuple[str, float]] = field(default_factory=OrderedDict)

    def note(self, peer_id: PeerId, address: str, now: float) -> None:
        """It showed its certificate at `address`, from whose host its own connection comes."""
        self._by_peer.pop(peer_id, None)
        self._by_peer[peer_id] = (address, now)
        while len(self._by_peer) > PROVEN_PEERS_MAX:
            self._by_peer.popitem(last=False)

    def of(self, peer_id: PeerId, now: float) -> tuple[str, ...]:
        address, at = self._by_peer.get(peer_id, ("", 0.0))
        return (address,) if address and now - at <= PROVEN_S else ()


def dialable(named: Access, seen_from: str, proven: Collection[str] = ()) -> tuple[Access, tuple[str, ...]]:
    """What peers may be told of a worker that was seen from this host and met at the `proven` addresses, and what was left
    out."""
    seen, met = _ip(seen_from), {_place(one) for one in proven} - {None}
    addresses = tuple(one for one in named.addresses if _is_at(one, seen) or _place(one) in met)[:NAMED_MAX]
    is_behind = seen is not None and _ip(named.public_host) == seen
    lan = tuple(one for one in named.lan_addresses if is_behind and _is_within(one, seen))[:NAMED_MAX]
    kept = replace(named, addresses=addresses, lan_addresses=lan, public_host=named.public_host if is_behind else "")
    told = {*addresses, *lan}
    return kept, tuple(one for one in (*named.addresses, *named.lan_addresses) if one not in told)


def is_punchable(host: str, port: int, own_host: str) -> bool:
    """Whether a hole may be punched to what a hidden peer says of itself, by a node that relays see at `own_host`.

    Never to a place closer than where we are seen ourselves: from the internet none in our network, from there none in
    our machine.
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
    """Whether it is the very host; of a run on one machine both loopback addresses that `localhost` stands for."""
    host = _host(address)
    return host is not None and seen is not None and (host == seen or {str(host), str(seen)} == {"127.0.0.1", "::1"})


def _is_within(address: str, seen: _Ip | None) -> bool:
    """Whether it can be of a network behind `seen`, and not of the machine that dials."""
    host = _host(address)
    if host is None or host.is_loopback or host.is_link_local or host.is_unspecified or host.is_multicast:
        return host is not None and host == seen
    return host == seen or not host.is_global


def _place(address: str) -> tuple[_Ip, int] | None:
    """Host and port of an address that may be dialled, however it is written."""
    host = _host(address)
    return None if host is None else (host, int(address.rpartition(":")[2]))


def _host(address: str) -> _Ip | None:
    """Of `address:port` where the port may be dialled; None for all else."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and PORT_MIN <= int(port[:6]) < 1 << 16):
        return None
    return _ip(host.removeprefix("[").removesuffix("]"))


def _ip(text: str) -> _Ip | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
