"""What a node loads before it has a NAT to cross: 60 MB of libp2p are worth a NAT alone."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAT = ROOT / "echo2" / "broadcast" / "nat"
HEAVY = {"libp2p", "trio", "multiaddr"}
BEHIND = {NAT / f"{name}.py" for name in ("access", "host", "libp2p", "relay")}
LOADED_LATE = {f"echo2.broadcast.nat.{path.stem}" for path in BEHIND}


def loaded_by(path: Path) -> set[str]:
    """The modules that are loaded with it: what it imports at its top level."""
    return {
        name
        for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }  # fmt: skip


def test_a_node_without_a_nat_to_cross_loads_no_libp2p() -> None:
    for path in (ROOT / "echo2").rglob("*.py"):
        if not re.search(r"libp2p|trio|multiaddr|broadcast\.nat", path.read_text()):
            continue
        loaded = loaded_by(path)
        is_heavy = bool({name.partition(".")[0] for name in loaded} & HEAVY or loaded & LOADED_LATE)
        assert not is_heavy or path in BEHIND, f"{path} loads libp2p with itself"
    assert all({name.partition(".")[0] for name in loaded_by(path)} & HEAVY for path in BEHIND)
