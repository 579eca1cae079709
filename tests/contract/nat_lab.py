"""A small internet in network namespaces: public hosts, and hosts each behind a NAT router of its own.

    lab = NatLab(public=("hub", "learner"), private=("left", "right"))    # as a context manager
    lab.command("left", ["python", ...])                                  # argv that runs there

Every host hangs on the namespace `wan` by a veth pair of its own; a private host hangs on a router that masquerades
what goes out (nftables) and drops whatever comes in unasked, as a home router does. Guarantees: nothing of it is left
when the context ends; names carry the process ID, so that several labs live side by side. `reason_unavailable` says
why a machine cannot have one.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType


class NatKind(enum.StrEnum):
    """What stands between a host and the internet. All but SYMMETRIC keep a connection's source port where it is free.

    FULL_CONE: whoever is outside reaches a port that the host has dialled from; ADDRESS_RESTRICTED: whoever it dialled from
    there, from any port; PORT_RESTRICTED: the very end that it dialled. FIREWALL translates nothing. CGNAT: two routers, one
    behind the other, and no UDP.
    """

    FULL_CONE = "full cone"
    ADDRESS_RESTRICTED = "address-restricted"
    PORT_RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"
    CGNAT = "CGNAT"
    FIREWALL = "firewall"


class Families(enum.Enum):
    IPV4 = 4
    IPV6 = 6
    BOTH = 0

    @property
    def has_4(self) -> bool:
        return self is not Families.IPV6

    @property
    def has_6(self) -> bool:
        return self is not Families.IPV4


_RULES = """
table ip nat {{
  {learnt}
  chain in {{ type nat hook prerouting priority -100; {inward} }}
  chain out {{ type nat hook postrouting priority 100; oifname "uplink" masquerade{mode}; }}
}}
table ip guard {{
  chain input {{ type filter hook input priority 0; iifname "uplink" ct state != {{ established, related }} drop; }}
  chain forward {{
    type filter hook forward priority 0;
    {learning}
    ct status dnat accept
    iifname "uplink" ct state != {{ established, related }} drop;
    {more}
  }}
}}
"""
_FIREWALL = """
table inet guard {
  chain input {
    type filter hook input priority 0;
    meta l4proto ipv6-icmp accept
    iifname "uplink" ct state != { established, related } drop;
  }
}
"""
_KEYS = {
    NatKind.FULL_CONE: ("inet_service", "tcp sport", "tcp dport"),
    NatKind.ADDRESS_RESTRICTED: ("ipv4_addr . inet_service", "ip daddr . tcp sport", "ip saddr . tcp dport"),
}


def _rules(kind: NatKind, host: str) -> str:
    """Of a router of this kind before the host at that address."""
    learnt = inward = learning = ""
    if kind in _KEYS:
        key, going, coming = _KEYS[kind]
        learnt = f"set open {{ type {key}; flags dynamic,timeout; timeout 120s; }}"
        # What goes out is seen after the set's table was made; sets are of one table, so the rule is in it.
        learnt += f"""
          chain learn {{ type filter hook forward priority -10; iifname "lan" tcp dport 1-65535 add @open {{ {going} }}; }}"""
        inward = f'iifname "uplink" {coming} @open dnat to {host};'
    mode = " random" if kind is NatKind.SYMMETRIC else ""
    more = "meta l4proto udp drop" if kind is NatKind.CGNAT else ""
    return _RULES.format(learnt=learnt, inward=inward, mode=mode, learning=learning, more=more)


def _run(*argv: str, text: str | None = None) -> None:
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


def reason_unavailable() -> str:
    """Why no lab can be made here; empty when one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with NatLab(public=(), private=("probe",)):
            return ""
    except OSError as error:
        return f"this kernel offers no namespaces with NAT: {error}"


class NatLab:
    """`is_symmetric`: the routers give every connection a random port, which no hole punch can foresee. `kinds`: of single
    private hosts, and of public ones that a firewall shields. `families`: IPv4 where nothing else is said."""

    def __init__(
        self,
        public: Sequence[str],
        private: Sequence[str],
        *,
        is_symmetric: bool = False,
        kinds: Mapping[str, NatKind] | None = None,
        families: Mapping[str, Families] | None = None,
    ) -> None:
        self._prefix = f"e2-{os.getpid()}-"
        self._namespaces: list[str] = []
        self._public, self._private = tuple(public), tuple(private)
        self._usual = NatKind.SYMMETRIC if is_symmetric else NatKind.PORT_RESTRICTED
        self._kinds, self._families = kinds or {}, families or {}
        self.addresses: dict[str, str] = {}
        self.addresses_6: dict[str, str] = {}

    def __enter__(self) -> NatLab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name in self._namespaces:
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", self._prefix + name)
        self._namespaces.clear()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._prefix + host, *argv]

    def address(self, host: str, towards: str = "") -> str:
        """Of a family that `towards` has as well."""
        is_4 = host in self.addresses and (not towards or towards in self.addresses)
        return self.addresses[host] if is_4 else self.addresses_6[host]

    def map_port(self, host: str, port: int, own_port: int) -> str:
        """What arrives at `port` of the host's router goes on to its `own_port`; returns the public address."""
        number = (*self._public, *self._private).index(host)
        rules = f"""
        table ip mapped {{
          chain in {{ type nat hook prerouting priority -100;
                     iifname "uplink" tcp dport {port} dnat to {self.addresses[host]}:{own_port}; }}
        }}
        """
        _run(*self.command(f"{host}-nat", ["nft", "-f", "-"]), text=rules)
        return f"10.90.{number}.2:{port}"

    def _build(self) -> None:
        self._namespace("wan")
        self._forwards("wan")
        for number, host in enumerate(self._public):
            self._namespace(host)
            families = self._families.get(host, Families.IPV4)
            if families.has_4:
                self.addresses[host] = self._attach(host, "wan", f"10.90.{number}", f"d{number}")
            else:
                self._cable(host, "wan", f"d{number}")
            if families.has_6:
                self.addresses_6[host] = self._attach_6(host, f"2001:db8:{number + 1}", f"d{number}")
            if self._kinds.get(host) is NatKind.FIREWALL:
                _run(*self.command(host, ["nft", "-f", "-"]), text=_FIREWALL)
        for number, host in enumerate(self._private, start=len(self._public)):
            kind, router, beyond = self._kinds.get(host, self._usual), f"{host}-nat", "wan"
            self._namespace(router)
            self._namespace(host)
            network, device = f"10.90.{number}", f"d{number}"
            if kind is NatKind.CGNAT:
                beyond = f"{host}-cgn"
                self._namespace(beyond)
                self._attach(beyond, "wan", network, device)
                self._route(beyond, kind, f"100.64.{number}.2")
                network, device = f"100.64.{number}", "lan"
            self._attach(router, beyond, network, device)
            self.addresses[host] = self._attach(host, router, f"192.168.{number}", "lan")
            self._route(router, kind, self.addresses[host])

    def _forwards(self, name: str) -> None:
        for option in ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"):
            _run(*self.command(name, ["sysctl", "-qw", option]))

    def _route(self, router: str, kind: NatKind, inner: str) -> None:
        self._forwards(router)
        _run(*self.command(router, ["nft", "-f", "-"]), text=_rules(kind, inner))

    def _namespace(self, name: str) -> None:
        _run("ip", "netns", "add", self._prefix + name)
        self._namespaces.append(name)
        self._ip(name, "link", "set", "lo", "up")

    def _attach(self, host: str, gateway: str, network: str, device: str) -> str:
        """A cable from `host` (device `uplink`) to `gateway` (device `device`); returns the host's address."""
        self._cable(host, gateway, device)
        self._ip(gateway, "addr", "add", f"{network}.1/24", "dev", device)
        self._ip(host, "addr", "add", f"{network}.2/24", "dev", "uplink")
        self._ip(host, "route", "add", "default", "via", f"{network}.1")
        return f"{network}.2"

    def _attach_6(self, host: str, network: str, device: str) -> str:
        """The same cable to the internet for IPv6."""
        self._ip("wan", "addr", "add", f"{network}::1/64", "dev", device, "nodad")
        self._ip(host, "addr", "add", f"{network}::2/64", "dev", "uplink", "nodad")
        self._ip(host, "-6", "route", "add", "default", "via", f"{network}::1")
        return f"[{network}::2]"

    def _cable(self, host: str, gateway: str, device: str) -> None:
        self._ip(gateway, "link", "add", device, "type", "veth", "peer", "name", "uplink", "netns", self._prefix + host)
        self._ip(gateway, "link", "set", device, "up")
        self._ip(host, "link", "set", "uplink", "up")

    def _ip(self, namespace: str, *argv: str) -> None:
        _run("ip", "-n", self._prefix + namespace, *argv)
