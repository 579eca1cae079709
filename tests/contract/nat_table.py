"""The table of docs/networking.md: what stands before a node, and how bytes then go. Run as a module it prints it.

Each cell names the scene that shows it: test_nat_table plays all of them, and holds the page to this table.
"""

from dataclasses import dataclass, field

from tests.contract.nat_lab import Families, NatKind

HEAD = ("| behind | worker, and another that is hidden | learner |", "|---|---|---|")
PUNCHED, RELAYED = "hole-punched: ", "relayed: "
DIALLED = "direct: we dialled it"


@dataclass(frozen=True, slots=True)
class Scene:
    """One cell. `who` is behind `kind`; `way`: how `other` meets it (of a worker), or how workers meet it (of a learner)."""

    who: str
    way: str
    kind: NatKind | None = None
    is_mapped: bool = False
    families: dict[str, Families] = field(default_factory=dict)
    kinds: dict[str, NatKind] = field(default_factory=dict)
    is_soak: bool = True


ALL_6 = dict.fromkeys(("hub", "learner", "left", "right"), Families.IPV6)
MIXED = {"hub": Families.BOTH, "learner": Families.BOTH, "left": Families.IPV6}
WORDS = {PUNCHED: "hole-punched", RELAYED: "byte pipe", DIALLED: "direct"}
LEARNER_HIDDEN = "dials one; the other and rollouts by byte pipe"
ROWS: dict[str, tuple[Scene, Scene]] = {
    "nothing (open port)": (Scene("left", DIALLED), Scene("learner", DIALLED)),
    "a mapped port, `--advertise`": (
        Scene("left", DIALLED, NatKind.SYMMETRIC, is_mapped=True),
        Scene("learner", DIALLED, NatKind.SYMMETRIC, is_mapped=True),
    ),
    "full cone NAT": (Scene("left", PUNCHED, NatKind.FULL_CONE), Scene("learner", RELAYED, NatKind.FULL_CONE)),
    "address-restricted NAT": (
        Scene("left", PUNCHED, NatKind.ADDRESS_RESTRICTED),
        Scene("learner", RELAYED, NatKind.ADDRESS_RESTRICTED),
    ),
    "port-restricted NAT": (
        Scene("left", PUNCHED, NatKind.PORT_RESTRICTED),
        Scene("learner", RELAYED, NatKind.PORT_RESTRICTED, is_soak=False),
    ),
    "symmetric NAT (a random port each)": (
        Scene("left", RELAYED, NatKind.SYMMETRIC),
        Scene("learner", RELAYED, NatKind.SYMMETRIC),
    ),
    "CGNAT: two NATs, no UDP": (Scene("left", PUNCHED, NatKind.CGNAT), Scene("learner", RELAYED, NatKind.CGNAT)),
    "firewall, outgoing only": (Scene("left", PUNCHED, NatKind.FIREWALL), Scene("learner", RELAYED, NatKind.FIREWALL)),
    "firewall, a run of IPv6 alone": (
        Scene("left", PUNCHED, NatKind.FIREWALL, families=ALL_6, kinds={"right": NatKind.FIREWALL}),
        Scene("learner", RELAYED, NatKind.FIREWALL, families=ALL_6, kinds={"left": NatKind.FIREWALL}),
    ),
    "firewall, IPv6 alone; the others have IPv4": (
        Scene("left", RELAYED, NatKind.FIREWALL, families=MIXED),
        Scene("learner", RELAYED, NatKind.FIREWALL, families={"hub": Families.BOTH, "learner": Families.IPV6}),
    ),
}
# Of two families no link is direct: such a learner has byte pipes alone.
APART = "byte pipes carry all of it"


def cell(scene: Scene) -> str:
    if scene.who != "learner":
        return WORDS[scene.way]
    if scene.way == DIALLED:
        return "direct: workers dial it"
    return APART if scene.families.get("learner") is Families.IPV6 and scene.families is not ALL_6 else LEARNER_HIDDEN


def table() -> str:
    rows = [f"| {name} | {cell(worker)} | {cell(learner)} |" for name, (worker, learner) in ROWS.items()]
    return "\n".join((*HEAD, *rows))


if __name__ == "__main__":
    print(table())
