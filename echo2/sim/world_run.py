"""`python -m echo2.sim.world_run --seed N`: one seed of the virtual world, with its events.

`--count M` runs M seeds from N on and prints one line each and a table of what happened. The exit code is 1 when
something that must hold did not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field

from echo2.sim.storm import stormy_world
from echo2.sim.world import WorldOutcome


@dataclass(slots=True)
class Tally:
    """Totals over many seeds."""

    seeds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[int] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(self, outcome: WorldOutcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.virtual_s += outcome.virtual_s
        self.faults += outcome.faults
        self.checks += outcome.checks
        self.restarts += outcome.restarts
        if outcome.failure:
            self.failed.append((outcome.seed, outcome.failure))


def outcome_of(seed: int) -> WorldOutcome:
    """Runs one seed from start to end."""
    world, storm_until_s = stormy_world(seed)
    return world.run(storm_until_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="echo2.sim.world_run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="ends with the first seed that fails")
    given = parser.parse_args(arguments)
    tally = Tally()
    for seed in range(given.seed, given.seed + given.count):
        outcome = outcome_of(seed)
        tally.add(outcome)
        if given.count == 1:
            print("\n".join(outcome.events))
        verdict = outcome.failure or "everything held"
        print(
            f"seed {seed}: {verdict}; {outcome.steps} steps, {outcome.virtual_s:.0f} virtual s, trace {outcome.digest}",
            flush=True,
        )
        if outcome.failure and given.stop:
            break
    if given.count > 1:
        for name, number in sorted(tally.faults.items()):
            print(f"{number:8d}  {name}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
