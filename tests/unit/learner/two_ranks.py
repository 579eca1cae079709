"""One rank of two over gloo: `-m tests.unit.learner.two_ranks COMMAND DENSE MOE FOLDER`.

`paths`: every way in which ranks train (SCENARIOS) in one start, because torch takes seconds to load; rank 0 leaves in FOLDER what
came of each. The second rank is as on another machine: it has a run folder and models of its own. `daemon`: a whole run; `failing`:
one whose second rank cannot code its rows.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from echo2.base.errors import ConfigError, EchoError
from echo2.base.ids import Step, Version
from echo2.learner.audit import Habits, Passage, examine, passage_of
from echo2.learner.options import LearnerLimits, LearnerOptions
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import new_team
from echo2.learner.training import loading, model as model_module, shards as sharded
from echo2.learner.training.ranks import DistributedRanks, Ranks, own_part, ranks_of_environment
from echo2.learner.training.team import Team
from echo2.weights import DeltaHeader, HostWeights
from echo2.weights.fingerprint import key_of_run
from tests.unit.learner.fleet import options_for
from tests.unit.learner.made import group_of, random_groups, rollout_of
from tests.unit.weights.models import KEY

STEPS = 2
RANK = int(os.environ.get("RANK", "0"))
SCENARIOS = ("float32", "lora", "qlora", "bf16_as_on_gpu", "copies", "copies_as_on_gpu", "moe")
"""`copies`: each rank has a copy of its own. `as_on_gpu`: parameters and gradients are bf16, as a CPU has to be made to do; bf16 in
float32 tensors is what `daemon` trains."""


def options_of(scenario: str, dense: Path, moe: Path, folder: Path) -> LearnerOptions:
    dtype = {"float32": "float32", "moe": "float32", "qlora": "nf4"}.get(scenario, "bfloat16")
    copies = 2 if scenario.startswith("copies") else 1
    return options_for(
        folder, moe if scenario == "moe" else dense, learner={"replicas": copies, "token_budget": 40},
        staleness={"bound": 4, "kappa": 2},
        model={"weights_dtype": dtype, "lora_rank": 2 if scenario.endswith("lora") else 0},
    )  # fmt: skip


def team_of(scenario: str, options: LearnerOptions, ranks: Ranks) -> Team:
    original = model_module._computes_in_bf16
    if scenario.endswith("as_on_gpu"):
        model_module._computes_in_bf16 = lambda *_: True
    try:
        return new_team(options, ranks)
    finally:
        model_module._computes_in_bf16 = original


def batch(step: int) -> Batch:
    return Batch(Step(step), random_groups(step, count=4 + step))


def passages() -> list[Passage]:
    """Three rollouts of version STEPS, and one over a change of versions whose engine kept its cache."""
    found = []
    for number, spans in enumerate([[(STEPS, 5)], [(STEPS, 9)], [(STEPS, 7)], [(STEPS, 4), (STEPS + 1, 4)]]):
        tokens = [10 + (7 * number + 3 * n) % 20 for n in range(sum(length for _, length in spans))]
        group = group_of((5, 6, 7), [rollout_of(tokens, spans=spans)], stop_token_ids=(1,))
        found.append(passage_of(group, 0, lambda peer: Habits(True, True)))
    return found


def scored(team: Team) -> tuple[list[float], float]:
    """The numbers of all passages under their versions, from what was published on both sides of a step; and what the step
    behind them gives."""
    scorer = team.scorer(4, Version(STEPS))
    scorer.keep(Version(STEPS), team.snapshot())
    team.step(batch(STEPS))
    scorer.keep(Version(STEPS + 1), team.snapshot())
    with scorer.turn():
        found = examine(passages(), scorer)
    numbers = [number for each in found for one in each for number in one.exact.logprobs.tolist()]
    result = team.step(batch(STEPS + 1)).metrics
    assert result is not None
    return numbers, result["loss"]


def watch_loading() -> list[int]:
    """How many elements of the model this rank holds, each time that it has read one more tensor of it."""
    held: list[int] = []
    original = loading.Skeleton._tensor

    def watched(skeleton: loading.Skeleton, name: str) -> torch.Tensor:
        tensor = original(skeleton, name)
        own = (own_part(p) for p in skeleton.hf_model.parameters() if not p.is_meta)
        held.append(tensor.numel() + sum(p.numel() for p in own))
        return tensor

    loading.Skeleton._tensor = watched  # type: ignore[method-assign]
    return held


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


def lead(team: Team, ranks: DistributedRanks, folder: Path, loaded_elements: list[int]) -> dict[str, Any]:
    """Some steps; the versions before and after them, coded by each rank's own rows; a checkpoint, taken back."""
    before = team.snapshot()
    met = count_meetings(ranks)
    results = [team.step(batch(step)) for step in range(STEPS)]
    meetings = list(met)
    after = team.snapshot()
    policy = team.whole(after, Version(STEPS))
    whole = DeltaHeader(target_version=Version(0), fingerprint_key=KEY)
    keyframe = b"".join(team.coder.encode(None, before, whole))
    delta = replace(
        whole, target_version=Version(STEPS), parent_version=Version(0),
        parent_fingerprint=team.coder.fingerprint(Version(0), before, KEY),
    )  # fmt: skip
    containers = {"keyframe": keyframe, "delta": b"".join(team.coder.encode(before, after, delta))}
    store = CheckpointStore(folder / "checkpoints", LearnerLimits(free_bytes_min=0))
    store.save(team.take(store, after, Version(STEPS), {"journal_from": 0}))
    again = team.step(batch(STEPS))
    team.load_newest(store)
    repeated = team.step(batch(STEPS))
    moved = {name: tensor + 1 for name, tensor in policy.items()}
    rows = team.hold(Version(STEPS + 1), moved)
    is_held = all(torch.equal(t, moved[n]) for n, t in team.whole(rows, Version(STEPS + 1)).items())
    team.coder.forget_before(Version(STEPS))
    team.load_newest(store)
    numbers, behind = ([], 0.0) if team.model.adapter else scored(team)
    team.stop()
    return {
        "steps": [{**result.metrics, "grad_norm": result.grad_norm} for result in results if result.metrics],
        "whole": policy,
        "dtypes": {str(parameter.dtype) for parameter in team.model.parameters},
        "left_to_chance": any(module.training for module in team.model.hf_model.modules()),
        "met": meetings,
        "microbatches": [len(part.share) for step in range(STEPS) for part in team.trainer._parts(batch(step))],
        "held": is_held and all(isinstance(tensor, DTensor) for tensor in rows.values()),
        "again": again.metrics["loss"] if again.metrics else None,
        "repeated": repeated.metrics["loss"] if repeated.metrics else None,
        "scored": numbers,
        "behind": behind,
        "loaded_elements": loaded_elements,
        "moment_elements": sum(own_part(s["exp_avg"]).numel() for s in team.trainer.optimiser.state.values()),
        **containers,
    }


def refused(options: LearnerOptions, ranks: DistributedRanks) -> str:
    """What a start is refused with whose second rank was told another budget."""
    learner = options.config.learner
    learner = learner.model_copy(update={"token_budget": learner.token_budget + ranks.rank})
    try:
        new_team(replace(options, config=options.config.model_copy(update={"learner": learner})), ranks)
    except ConfigError as error:
        return str(error)
    return ""


def paths(dense: Path, moe: Path, folder: Path) -> None:
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
    ranks = DistributedRanks()
    own = folder / "elsewhere" if RANK else folder
    told = refused(options_of("moe", dense, moe, own), ranks)
    assert told, "on every rank"
    copies, loaded = DistributedRanks(2), watch_loading()
    for scenario in SCENARIOS:
        options = options_of(scenario, dense, moe, own / scenario)
        given = copies if options.config.learner.replicas > 1 else ranks
        loaded.clear()
        team = team_of(scenario, options, given)
        if RANK:
            team.follow()
        else:
            found = lead(team, given, folder / scenario, list(loaded))
            torch.save({**found, "refused": told}, folder / f"{scenario}.pt")
    dist.destroy_process_group()


# ---- a whole run


def count_gathered() -> list[str]:
    """Whole tensors that this rank takes part in gathering from now on, by shape."""
    gathered: list[str] = []
    full_tensor = DTensor.full_tensor

    def counted(tensor: DTensor, **arguments: Any) -> torch.Tensor:
        if tensor.ndim:  # a norm of gradients has none
            gathered.append(str(tuple(tensor.shape)))
        return full_tensor(tensor, **arguments)

    DTensor.full_tensor = counted
    return gathered


def obey(options: LearnerOptions, folder: Path, fails_at: int | None) -> None:
    """The second rank to its end; `fails_at`: the version of which it cannot code its rows."""
    gathered, original = count_gathered(), sharded.section_blocks

    def broken(parent: Any, target: Any, header: Any, *rest: Any) -> Any:
        if header.target_version == fails_at:
            raise OSError("a row cannot be read")
        return original(parent, target, header, *rest)

    sharded.section_blocks = broken
    team = new_team(options, ranks_of_environment())
    team.follow()
    ((newest, weights),) = team._held._held.items()
    held = weights.values()
    assert all(isinstance(tensor, DTensor) for tensor in held)
    said = {"gathered": gathered, "newest": newest, "own_elements": sum(own_part(t).numel() for t in held)}
    (folder / "rank1.json").write_text(json.dumps(said))


def serve(options: LearnerOptions, folder: Path) -> None:
    """The first rank: a whole run; what its fleet held at the end, or at a failure, goes to files."""
    from tests.unit.learner.fleet import Run

    gathered, run, kept = count_gathered(), Run(options), folder / "held.pt"
    if kept.exists():
        version, tensors = torch.load(kept)
        run.follower.host = HostWeights.from_tensors(tensors, Version(version), key_of_run(options.config.run.name))
    try:
        summary = asyncio.run(run.finish())
    except EchoError as error:
        (folder / "error").write_text(f"{type(error).__name__}: {error}")
        torch.save((int(run.follower.host.version or 0), run.follower.host.tensors()), kept)
        raise
    merged = HostWeights.empty()
    if (-1, 0) in run.follower.kept:
        for parent, version in ((-1, 0), (0, 4), (4, 6)):
            run.follower.apply(merged, parent, version)
    said = {
        "fingerprint": summary.fingerprint,
        "followed": f"{run.follower.host.fingerprint():016x}",
        "merged": f"{merged.fingerprint():016x}",
        "steps": summary.steps,
        "versions": run.follower.versions,
        "merged_to": sorted(run.follower.merged),
        "gathered": gathered,
    }
    (folder / "summary.json").write_text(json.dumps(said))


def main() -> None:
    command, dense, moe, folder = sys.argv[1], *map(Path, sys.argv[2:5])
    torch.set_num_threads(1)
    options = options_of("bf16", dense, moe, folder)
    if command == "paths":
        paths(dense, moe, folder)
    elif RANK:
        obey(options, folder, fails_at=4 if command == "failing" else None)
    else:
        serve(options, folder)


if __name__ == "__main__":
    main()
