"""The whole of echo2 on a virtual clock: seeds with faults, replay, and defects put in on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.sim.cluster import Cluster
from echo2.sim.cluster_run import outcome_of
from echo2.sim.fault_plan import STORM_S, Fault, Planned
from echo2.sim.faults import Storm
from echo2.sim.malice import CLAIMS, LATER_KINDS, Malice
from echo2.sim.scene import Sabotage, Scene
from echo2.sim.stall_watch import AGAIN_CAME, AGAIN_TRIED

ROOT = Path(__file__).resolve().parents[3]


def test_a_quiet_cluster_trains_and_everyone_reaches_the_newest_version() -> None:
    outcome = Cluster(Scene.of(1), workers=3).run(faults_until_s=30.0)
    assert not outcome.failure, outcome.failure
    assert outcome.steps >= 6 and outcome.version > 0
    assert set(outcome.checks) == {1, 2, 3, 4, 5, 6, 7}, "every invariant was looked at"
    assert not outcome.restarts


@pytest.mark.parametrize("seed", range(100, 130))
def test_all_invariants_hold_in_a_storm(seed: int) -> None:
    outcome = outcome_of(seed)
    assert not outcome.failure, f"replay it: make sim SEED={seed}\n{outcome.failure}"


# Seeds that showed a defect once. What mends it has a test of its own as well.
FOUND = {
    20418: "the simulator's store dropped the keyframe that leads around a delta which was cut off",
    20366: "by a clock that drifts the simulator's newcomer looked a hair too early and asked for nothing until that stalled",
    8012: "the pool was planned of a worker alone that only told of progress, and was given nothing for that",
    1539: "a worker whose reports were all refused got the leases again and again, and the others nothing",
    2029: "a worker took the renewal of a lease that it had just ended for a new one",
    2066: "the same, as the coordinator came back and took in the lease",
    3379: "a worker that came back was given what its last life had asked for, before that wish was forgotten",
    212: "groups behind closed ones kept their late step and waited for a version that no step could bring",
}


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_failed_once_holds(seed: int) -> None:
    outcome = outcome_of(seed)
    assert not outcome.failure, f"{FOUND[seed]}\n{outcome.failure}"


@pytest.mark.parametrize("seed", [1, 3, 6, 9])
def test_what_rots_at_the_learner_and_is_nowhere_else_holds_nobody_up(seed: int) -> None:
    """Newcomers without a disk need just the chunks that its disk has changed."""
    cluster = Cluster(Scene.of(seed), workers=2)
    planned = []
    for number, at_s in enumerate(range(8, int(STORM_S), 12)):
        kind = (Fault.KILL, Fault.LOSE_DISK)[number % 2]
        planned.append(Planned(at_s, kind, f"w{number % 2}", 9.0))
        planned += [Planned(at_s + 3.0 + 0.3 * times, Fault.BIT_ROT, "learner", 1.0) for times in range(6)]
    Storm(cluster, planned)
    outcome = cluster.run(faults_until_s=STORM_S)
    assert not outcome.failure, outcome.failure
    assert outcome.faults[Fault.BIT_ROT.value] > 30


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("malice", LATER_KINDS, ids=lambda kind: kind.name.lower())
def test_a_worker_that_only_says_that_it_works_holds_nobody_up(seed: int, malice: Malice) -> None:
    outcome = Cluster(Scene.of(seed), workers=3, malice=malice).run(faults_until_s=60.0)
    assert not outcome.failure, outcome.failure


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("malice", CLAIMS, ids=lambda kind: kind.name.lower())
def test_what_workers_say_of_their_own_speed_and_room_takes_no_work_from_others(seed: int, malice: Malice) -> None:
    """Three of them beside two honest ones, which alone would make about as many steps."""

    def steps(liars: int) -> int:
        cluster = Cluster(replace(Scene.of(seed), plan_interval_s=5.0), workers=2)
        for _ in range(liars):
            machine = cluster.machines[cluster.add_worker(malice)]
            machine.slot_count, machine.step_s = 1, 1.0
        outcome = cluster.run(faults_until_s=100.0)
        assert not outcome.failure, outcome.failure
        return outcome.steps

    assert steps(3) >= 0.75 * steps(0)


@pytest.mark.parametrize("seed", [13, 14])
def test_what_has_stopped_coming_in_a_long_outage_is_tried_again(seed: int) -> None:
    outcome = outcome_of(seed)
    assert not outcome.failure, outcome.failure
    assert outcome.faults[AGAIN_TRIED] and outcome.faults[AGAIN_CAME], outcome.faults


def test_a_seed_replays_exactly_in_another_process() -> None:
    here = outcome_of(7)
    found = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-m", "echo2.sim.cluster_run", "--seed", "7", "--count", "1"],
            capture_output=True, text=True, env=environment, cwd=ROOT, check=True, timeout=120,
        )  # fmt: skip
        found.append(result.stdout.rpartition("trace ")[2].strip())
    assert found == [here.digest] * 2
    assert outcome_of(8).digest != here.digest


CANARIES = {  # which invariants may say so first, and the seed to begin with
    Sabotage.BOUND_OFF_BY_ONE: ({1}, 0),
    Sabotage.LEDGER_FORGETS: ({2}, 0),
    Sabotage.ADMITTED_LOST: ({2}, 0),
    Sabotage.NO_FINGERPRINT_CHECK: ({3}, 0),
    Sabotage.TORN_COMMIT: ({4}, 0),
    Sabotage.TORN_JOURNAL: ({5}, 0),
    Sabotage.NO_REDIAL: ({6}, 0),
    Sabotage.HELLO_GAP: ({7}, 0),
    Sabotage.SILENT_WAIT: ({7}, 0),
    Sabotage.BELIEVES_PROGRESS: ({6}, 14),
    Sabotage.SHUNS_THE_HONEST: ({6}, 0),
    Sabotage.STALLED_FOR_GOOD: ({7}, 0),
    Sabotage.STALLED_UNASKED: ({7}, 0),
    Sabotage.LATE_UNSERVED: ({6}, 0),
}
SEEDS_TO_CATCH = 24


@pytest.mark.parametrize("sabotage", CANARIES, ids=lambda s: s.name.lower())
def test_a_defect_put_in_on_purpose_is_caught(sabotage: Sabotage) -> None:
    invariants, first_seed = CANARIES[sabotage]
    for seed in range(first_seed, first_seed + SEEDS_TO_CATCH):
        outcome = outcome_of(seed, sabotage)
        if outcome.failure:
            assert outcome.invariant in invariants, outcome.failure
            return
    raise AssertionError(f"{sabotage.value}: not noticed in {SEEDS_TO_CATCH} seeds")


def test_every_sabotage_has_its_canary() -> None:
    assert set(CANARIES) == set(Sabotage) - {Sabotage.NONE}
