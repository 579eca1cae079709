"""Real processes under kill -9, SIGSTOP, cut links and full disks: what the run's history must say afterwards."""

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import GroupId, Version
from echo2.worker.control import ask
from tests.e2e.chaos import Archive, Chaos, Forwarder, Judged, SmallDisk, judge, nothing_is_lost
from tests.e2e.cluster import Cluster

STALENESS_BOUND = 4
GROUPS_PER_STEP, ROLLOUTS_PER_GROUP = 12, 8


def chaotic_run(
    tmp_path: Path, run_config: str, seed: int, steps: int, mean_gap_s: float, within_s: float
) -> Counter[str]:
    """One run under chaos, judged; returns what was done to it."""
    port = int(re.findall(r"\[learner\]\nport = (\d+)", run_config)[0])
    link = Forwarder(port)
    config = run_config.replace("steps = 30", f'steps = {steps}\nadvertise = "127.0.0.1:{link.port}"')
    config += f"[staleness]\nbound = {STALENESS_BOUND}\n"
    cluster = Cluster(tmp_path, config, workers=2)
    disks = {
        "w0": SmallDisk(cluster.run_folder / "workers" / "w0", "160m"),
        "learner": SmallDisk(cluster.run_folder / "learner", "256m"),
    }
    archive_folder = cluster.run_folder / "learner" / "archive"
    chaos: Chaos | None = None
    try:
        with cluster:
            cluster.start_all()
            archive = Archive(cluster.run_folder / "learner" / "journal", archive_folder)
            chaos = Chaos(cluster, seed, archive, link, disks, mean_gap_s)
            cluster.wait_until(lambda: cluster.step() >= 2, "the first steps", within_s)
            chaos.run(steps, within_s / 2, within_s)
            held = held_bits(cluster, steps)
            assert cluster.wait("learner") == 0, cluster.log("learner")[-3000:]
            archive.look()
            found = judge_run(cluster, archive, steps)
            for version, fingerprint in held:
                assert fingerprint == found.fingerprints[Version(version)], f"version {version} is not the learner's"
            return chaos.counts
    finally:
        if chaos is not None:
            print(json.dumps({**chaos.counts, "optimiser steps": cluster.step()}))
        link.close()
        for disk in disks.values():
            disk.unmount()


def held_bits(cluster: Cluster, steps: int) -> set[tuple[int, str]]:
    """While the finished learner serves its last version: versions and the fingerprints that the workers' engines prove.

    A finished learner waits for the workers that are connected. One that was being started again at that moment keeps what
    it has, if anything; at least one has the last version.
    """
    homes = [cluster.run_folder / "workers" / name for name in cluster.commands if name[0] == "w"]
    held: dict[Path, tuple[int, str] | None] = {}

    def all_there() -> bool:
        is_over = cluster.processes["learner"].poll() is not None
        for home in set(homes) - set(held):
            with contextlib.suppress(Unreachable):  # it has just been started
                answer = asyncio.run(ask(home, "status"))
                version, fingerprint = answer.get("version"), answer.get("fingerprint")
                if version is None and is_over:
                    held[home] = None
                elif fingerprint and (version == steps or is_over):
                    held[home] = (int(version), str(fingerprint))
        return len(held) == len(homes)

    cluster.wait_until(all_there, f"version {steps} on every worker that was there at the end")
    found = {one for one in held.values() if one is not None}
    assert steps in {version for version, _ in found}, f"no worker holds the last version: {found}"
    return found


def judge_run(cluster: Cluster, archive: Archive, steps: int) -> Judged:
    found = judge(archive.records(), STALENESS_BOUND)
    newest = max((cluster.run_folder / "learner" / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    assert state["step"] == steps
    ledger = {GroupId(name): step for name, step in state["groups"]["trained"].items()}
    assert ledger == found.trained, "the ledger and the journal tell different histories"
    open_groups = set(found.sizes) - set(found.trained) - found.dropped
    nothing_is_lost(found, open_groups, steps)
    assert Counter(ledger.values()) == dict.fromkeys(range(steps), GROUPS_PER_STEP)
    assert len(open_groups) <= (STALENESS_BOUND + 1) * GROUPS_PER_STEP, "admitted groups pile up untrained"
    evaluations = {row["step"]: row["eval/reward"] for row in cluster.evaluations()}
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    assert max(evaluations) == steps and last > first + 0.03, f"the reward does not rise: {evaluations}"
    return found


@pytest.mark.soak
def test_long_chaos(tmp_path: Path, run_config: str) -> None:
    """`CHAOS_SEED` and `CHAOS_STEPS` choose, `CHAOS_WITHIN_S` bounds; what was done is printed, also when it fails."""
    seed, steps = int(os.environ.get("CHAOS_SEED", "7")), int(os.environ.get("CHAOS_STEPS", "150"))
    within_s = float(os.environ.get("CHAOS_WITHIN_S", "600"))
    chaotic_run(tmp_path, run_config, seed, steps=steps, mean_gap_s=2.0, within_s=within_s)
