"""Worlds with faults, by a schedule drawn from the seed: `python -m echo2.sim.storm --seed N` runs one and prints its events.

`--count M` runs M seeds from N on and prints one line each and a table of what happened. The exit code is 1 when something that
must hold did not. Guarantees: same seed, same faults. Every fault ends, except that a preempted machine stays away and a new one
replaces it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable

from echo2.base.rng import derived_rng
from echo2.sim.liars import OF_STORMS, Liar, Lie
from echo2.sim.machine import Process
from echo2.sim.scenario import STORM_S, PlannedFault, Scenario, long_outage, storm
from echo2.sim.world import World, WorldOutcome
from echo2.worker.worker import WorkerDaemon

LONG_STORM_S = 250.0  # long enough that workers retry a stalled artifact while the learner is still away
NOTICE_S = 2.0  # scaled down as a storm is: clouds give 30 s to 2 min
MACHINES_MAX = 7  # worlds take seconds of computing in proportion to it


class Storm:
    """Applies the planned faults to a world. A fault's method has its name, and returns False if it cannot be applied now."""

    def __init__(self, world: World, planned: list[PlannedFault], until_s: float = STORM_S) -> None:
        self.world, self.until_s = world, until_s
        self.rng: random.Random = derived_rng(world.scenario.seed, "storm")
        self._undo: list[Callable[[], None]] = []
        for fault in planned:
            world.after(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        world.after(until_s, self._heal)

    # ---- bookkeeping

    def _strike(self, planned: PlannedFault) -> None:
        whom = planned.whom
        if whom not in self.world.machines or whom in self.world.gone:
            if not self.world.workers:
                return
            whom = self.rng.choice(self.world.workers)
        strike: Callable[[str, float], bool] = getattr(self, planned.fault.name.lower())
        if strike(whom, planned.for_s):
            self.world.faults[planned.fault.value] += 1
            self.world.events.tell(whom, f"FAULT {planned.fault.value} ({planned.for_s:.1f} s)")

    def _for(self, seconds: float, undo: Callable[[], None]) -> None:
        """Undoes a fault after `seconds`, or when the storm ends if that is earlier."""
        is_done = False

        def once() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                undo()

        self._undo.append(once)
        self.world.after(seconds, once)

    def _heal(self) -> None:
        for undo in self._undo:
            undo()
        self.world.events.tell("faults", "stop")

    def _others(self, whom: str) -> list[str]:
        return [name for name in ("coordinator", "learner", *self.world.workers) if name != whom]

    def _is_worker(self, whom: str) -> bool:
        return whom in self.world.traits

    # ---- processes

    def kill(self, whom: str, seconds: float) -> bool:
        if not self.world.kill(whom):
            return False
        self._for(seconds, lambda: self.world.start(whom))
        return True

    def lose_disk(self, whom: str, seconds: float) -> bool:
        if not self._is_worker(whom) or not self.kill(whom, seconds):
            return False
        self.world.machines[whom].disk.wipe()
        return True

    def power_cut(self, whom: str, seconds: float) -> bool:
        if not self.kill(whom, seconds):
            return False
        self.world.machines[whom].disk.power_cut(self.rng)
        return True

    def _process(self, whom: str) -> Process | None:
        process = self.world.machines[whom].process
        return process if process is not None and not process.has_ended else None

    def freeze(self, whom: str, seconds: float) -> bool:
        process = self._process(whom)
        if process is None or process.is_frozen:
            return False
        self.world.wires.freeze(process)
        self._for(seconds, process.thaw)
        return True

    def preempt(self, whom: str, seconds: float) -> bool:
        """Takes the machine away at once; rents another one after `seconds`."""
        if not self._is_worker(whom) or len(self.world.workers) < 2:
            return False
        self.world.take(whom)
        self._for(seconds, self._rent)
        return True

    def preempt_notice(self, whom: str, seconds: float) -> bool:
        daemon, process = self.world.daemons.get(whom), self._process(whom)
        if not isinstance(daemon, WorkerDaemon) or process is None or len(self.world.workers) < 2:
            return False
        process.context.copy().run(daemon.stop, "preemption: the cloud takes the machine")
        self.world.gone.add(whom)
        if self.world.cloud is not None:
            self.world.cloud.is_told(whom)
        self.world.after(NOTICE_S + 1.0, lambda: self.world.take(whom))
        self._for(seconds, self._rent)
        return True

    def join(self, whom: str, seconds: float) -> bool:
        if len(self.world.workers) >= MACHINES_MAX:
            return False
        self._rent()
        return True

    def _rent(self) -> None:
        self.world.start(self.world.add_worker())

    # ---- the network

    def partition(self, whom: str, seconds: float) -> bool:
        return self._block(whom, seconds, both_ways=True)

    def one_way(self, whom: str, seconds: float) -> bool:
        return self._block(whom, seconds, both_ways=False)

    def _block(self, whom: str, seconds: float, *, both_ways: bool) -> bool:
        wires, others = self.world.wires, self._others(whom)
        for other in self.rng.sample(others, self.rng.randint(1, len(others))):
            for ends in ((whom, other), (other, whom))[: 1 + both_ways]:
                wires.block(*ends)
                self._for(seconds, lambda ends=ends: wires.unblock(*ends))  # type: ignore[misc]
        return True

    def cut(self, whom: str, seconds: float) -> bool:
        return self.world.wires.cut(whom, self.rng.choice(self._others(whom))) > 0

    def clog(self, whom: str, seconds: float) -> bool:
        link = self.world.machines[whom].link
        link.clog = self.rng.choice((0.3, 0.05, 0.01))
        link.clogged_until = min(self.world.loop.time() + seconds, self.until_s)
        return True

    def loss(self, whom: str, seconds: float) -> bool:
        return self._set(self.world.wires, seconds, "loss", self.rng.choice((0.02, 0.1, 0.3)), 0.0)

    def _set(self, thing: object, seconds: float, name: str, value: float, usual: float) -> bool:
        setattr(thing, name, value)
        self._for(seconds, lambda: setattr(thing, name, usual))
        return True

    # ---- disks, clocks, engines

    def disk_full(self, whom: str, seconds: float) -> bool:
        return self._set(self.world.machines[whom].disk, seconds, "is_full", True, False)

    def bit_rot(self, whom: str, seconds: float) -> bool:
        pattern = f"{'worker' if self._is_worker(whom) else 'run'}/chunks/*.artifact"  # the coordinator has none
        if self.world.machines[whom].disk.rot(self.rng, pattern) is None:
            return False
        node = self.world.node_of(whom)
        if node is not None:
            for key in node.library.entries:
                node.library.recent.drop(key)  # so that the chunk is read from the disk again
        return True

    def slow(self, whom: str, seconds: float) -> bool:
        return self._engine_fault(whom, seconds, "slowdown", self.rng.choice((3.0, 20.0)), 1.0)

    def swap_refused(self, whom: str, seconds: float) -> bool:
        return self._engine_fault(whom, seconds, "refused", self.rng.choice((0.2, 0.6)), 0.0)

    def swap_wrong(self, whom: str, seconds: float) -> bool:
        return self._engine_fault(whom, seconds, "wrong", self.rng.choice((0.2, 0.6)), 0.0)

    def _engine_fault(self, whom: str, seconds: float, name: str, value: float, usual: float) -> bool:
        return self._is_worker(whom) and self._set(self.world.traits[whom].faults, seconds, name, value, usual)

    def clock_jump(self, whom: str, seconds: float) -> bool:
        """Sets the machine's wall clock off by up to 4 s in either direction, for good."""
        self.world.machines[whom].clock_offset_s = self.rng.uniform(-4.0, 4.0)
        return True

    def drift(self, whom: str, seconds: float) -> bool:
        """Makes the machine's clock run up to 2 % fast or slow. Kills the process, because only the next one may see the jump."""
        if not self.kill(whom, seconds):
            return False
        self.world.machines[whom].drift = self.rng.uniform(0.98, 1.02)
        return True


def malice_of(seed: int) -> Lie | None:
    """The kind of malicious worker of a seed; None in three of five seeds."""
    rng = derived_rng(seed, "malice")
    return rng.choice(OF_STORMS) if rng.random() < 0.4 else None


def stormy_world(seed: int) -> tuple[World, float]:
    """The world of a seed with its storm, and the time when the storm ends."""
    world = World(Scenario.of(seed))
    workers, malice = len(world.workers), malice_of(seed)
    if malice is not None:
        link = world.machines[world.add_worker(Liar(malice, derived_rng(seed, "liar")))].link
        link.up, link.down = 2 * link.up, 2 * link.down  # with a better link it relays more chunks
    outage = long_outage(seed, workers)
    until_s = LONG_STORM_S if outage else STORM_S
    Storm(world, storm(seed, workers) + outage, until_s)
    return world, until_s


def outcome_of(seed: int) -> WorldOutcome:
    """Runs one seed from start to end."""
    world, storm_until_s = stormy_world(seed)
    return world.run(storm_until_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="echo2.sim.storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="ends with the first seed that fails")
    options = parser.parse_args(arguments)
    faults, failed = Counter[str](), 0
    for seed in range(options.seed, options.seed + options.count):
        outcome = outcome_of(seed)
        faults += outcome.faults
        failed += bool(outcome.failure)
        if options.count == 1:
            print("\n".join(outcome.events))
        verdict = outcome.failure or "everything held"
        print(
            f"seed {seed}: {verdict}; {outcome.steps} steps, {outcome.virtual_s:.0f} virtual s, trace {outcome.digest}",
            flush=True,
        )
        if outcome.failure and options.stop:
            break
    if options.count > 1:
        for name, number in sorted(faults.items()):
            print(f"{number:8d}  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
