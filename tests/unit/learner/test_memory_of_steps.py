"""What the sizing rule tells of a learner's memory, against the memory of a learner's pieces in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT, environment_of


def test_two_steps_with_publishing_and_a_checkpoint_take_what_the_sizing_rule_tells(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are the Linux kernel's")
    command = [sys.executable, "-m", "tests.unit.learner.memory_of_steps", str(tmp_path)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment_of(tmp_path), cwd=ROOT, timeout=120
    )
    found = json.loads(done.stdout.splitlines()[-1])
    # Some 15 MB of libraries' own are not counted, of 500 MB; a copy of masters and moments would be 12 bytes a parameter.
    off = found["peak"] - found["told"]
    assert abs(off) < 0.1 * found["told"], f"told {found['told']}, measured {found['peak']}"
