"""Storms: everything holds, every field that is to be said is said, and the trace is the same under any hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.sim.storm import stormy_world

LIST = Path(__file__).with_name("said.txt")
ROOT = Path(__file__).resolve().parents[3]
SEEDS = (9, 27, 22)
"""9 has a long outage of the learner. Of those that say what it does not say, 27 and 22 take least time."""
MORE = (6, 23, 4, 2, 130, 88)
"""88 has the longest stand of these: nine steps in 287 s."""


def storm(seed: int) -> tuple[set[str], str]:
    """What was said in a world where everything held, and the digest of its trace."""
    world, until_s = stormy_world(seed)
    outcome = world.run(until_s)
    told = "\n".join([f"make sim SEED={seed}", *outcome.events[-40:], outcome.failure])
    assert not outcome.failure, told
    assert outcome.steps > 3 and outcome.version > 2
    assert set(outcome.checks) == {1, 2, 3, 4, 5, 6, 7}, "every invariant was looked at"
    assert outcome.faults["questions answered"], "no evaluation outlived the storm"
    return world.observer.said, outcome.digest


def said() -> tuple[set[str], str]:
    fields, digest = set[str](), ""
    for seed in SEEDS:
        of_storm, digest = storm(seed)
        fields |= of_storm
    return fields, digest


def test_everything_holds_in_storms_all_is_said_and_another_hash_seed_gives_the_same_trace() -> None:
    fields, digest = said()
    assert not set(LIST.read_text().split()) - fields
    command = [sys.executable, "-m", "echo2.sim.storm", "--seed", str(SEEDS[-1]), "--count", "1"]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1].endswith(f"trace {digest}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", MORE)
def test_everything_holds_through_more_storms(seed: int) -> None:
    storm(seed)


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(said()[0])) + "\n")
