"""One rank of two over gloo: `-m tests.unit.learner.rank_paths RANK DENSE MOE FOLDER`. Each scenario trains and publishes by rows.

Rank 0 leaves in FOLDER, by scenario: metrics of each step, whole weights, and the containers that the ranks coded together.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from echo2.base.errors import ConfigError
from echo2.base.ids import Step, Version
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import new_team
from echo2.learner.training import model as model_module
from echo2.learner.training.ranks import DistributedRanks, Ranks, whole
from echo2.learner.training.shards import HeldVersions, ShardFollower, ShardLeader
from echo2.learner.training.team import Team
from echo2.weights.container import DeltaHeader, join_frames
from tests.unit.learner.fleet import options_for
from tests.unit.learner.test_trainer import random_groups

STEPS, KEY = 2, 7
SCENARIOS = ("bf16", "bf16_as_on_gpu", "copies", "copies_as_on_gpu", "moe")
"""`copies`: each rank has a copy of its own. `as_on_gpu`: parameters and gradients are bf16, as a CPU has to be made to do."""


def options_of(scenario: str, dense: Path, moe: Path, folder: Path) -> LearnerOptions:
    options = options_for(folder, moe if scenario == "moe" else dense, staleness={"bound": 4})
    dtype = "float32" if scenario == "moe" else "bfloat16"
    copies = 2 if scenario.startswith("copies") else 1
    return replace(options, trainer=replace(options.trainer, weights_dtype=dtype, token_budget=40, replicas=copies))


def team_of(scenario: str, options: LearnerOptions, ranks: Ranks) -> Team:
    original = model_module._computes_in_bf16
    if scenario.endswith("as_on_gpu"):
        model_module._computes_in_bf16 = lambda *_: True
    try:
        return new_team(options, ranks)
    finally:
        model_module._computes_in_bf16 = original


def count_meetings(ranks: DistributedRanks) -> list[int]:
    """Sizes of what this rank adds up with the other copies from now on."""
    mesh, met, original = ranks.mesh("cpu"), [], dist.all_reduce
    assert mesh is not None
    group = mesh.get_group("replica") if ranks.replicas > 1 else None

    def counted(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if group is not None and named.get("group") == group:
            met.append(tensor.numel())
        return original(tensor, *rest, **named)

    dist.all_reduce = counted
    return met


def batch(step: int) -> Batch:
    return Batch(Step(step), random_groups(step, count=4 + step))


def trained(team: Team, ranks: DistributedRanks) -> dict[str, Any]:
    """On all ranks alike: `STEPS` steps; the versions before and after them, coded by each rank's own rows."""
    group, held = ranks.encoders, HeldVersions()
    assert group is not None
    held.keep(Version(0), team.model.snapshot())
    met = count_meetings(ranks)
    results = [team.trainer.step(batch(step)) for step in range(STEPS)]
    held.keep(Version(1), team.model.snapshot())
    before, after = held.of(Version(0)), held.of(Version(1))
    assert all(isinstance(tensor, DTensor) for tensor in after.values())
    containers: dict[str, bytes] = {}
    if ranks.is_leader:
        leader = ShardLeader(group, ranks.shards)
        keyframe = DeltaHeader(target_version=Version(0), fingerprint_key=KEY)
        containers["keyframe"] = join_frames(leader.keyframe(before, keyframe))
        delta = DeltaHeader(
            target_version=Version(1), parent_version=Version(0), fingerprint_key=KEY,
            parent_fingerprint=leader.fingerprint(Version(0), before, KEY),
        )  # fmt: skip
        containers["delta"] = join_frames(leader.delta(before, after, delta))
        leader.stop()
    else:
        ShardFollower(group, held).serve()
    dtypes = {str(parameter.dtype) for parameter in team.model.parameters}
    return {
        "steps": [{**asdict(result.metrics), "grad_norm": result.grad_norm} for result in results if result.metrics],
        "whole": {name: whole(tensor) for name, tensor in after.items()},
        "dtypes": dtypes,
        "met": met,
        "microbatches": [len(part.own) for step in range(STEPS) for part in team.trainer._parts(batch(step))],
        **containers,
    }


def refused(options: LearnerOptions, ranks: DistributedRanks) -> str:
    """What a start is refused with whose second rank was told another budget."""
    budget = options.trainer.token_budget + ranks.rank
    try:
        new_team(replace(options, trainer=replace(options.trainer, token_budget=budget)), ranks)
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    rank, dense, moe, folder = int(sys.argv[1]), *map(Path, sys.argv[2:5])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    ranks = DistributedRanks()
    told = refused(options_of("moe", dense, moe, folder), ranks)
    assert told, "on every rank"
    copies = DistributedRanks(2)
    for scenario in SCENARIOS:
        options = options_of(scenario, dense, moe, folder)
        given = copies if options.trainer.replicas > 1 else ranks
        found = trained(team_of(scenario, options, given), given)
        if ranks.is_leader:
            torch.save({**found, "refused": told}, folder / f"{scenario}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
