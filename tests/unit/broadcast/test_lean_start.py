"""What a node loads before it has a NAT to cross."""

from __future__ import annotations

import subprocess
import sys


def test_a_node_without_a_nat_to_cross_loads_no_libp2p() -> None:
    modules = "echo2.broadcast.nat.reach, echo2.broadcast.node, echo2.worker.links"
    code = f"import sys, {modules}; print(sorted({{'libp2p', 'trio', 'multiaddr'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "60 MB that only a NAT is worth"
