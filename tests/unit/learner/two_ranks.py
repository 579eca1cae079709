"""One rank of a small learner; torchrun starts two of them: `-m tests.unit.learner.two_ranks COMMAND MODEL FOLDER DTYPE`.

DTYPE may end in `-lora`, and in `-copies` for two copies of the weights, of which each is spread over half of the ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from echo2.base.errors import EchoError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import Habits, Passage, examined, passage_of
from echo2.learner.options import LearnerLimits, LearnerOptions
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.groups import Batch, SentTokens, TrainGroup
from echo2.learner.startup import follow, new_team
from echo2.learner.training import loading
from echo2.learner.training import shards as sharded
from echo2.learner.training.ranks import own_part, ranks_of_environment
from echo2.learner.training.team import Team
from echo2.weights import HostWeights
from echo2.weights.fingerprint import key_of_run
from tests.unit.learner.fleet import options_for
from tests.unit.learner.test_trainer import random_groups

STEPS = 3
RANK = int(os.environ.get("RANK", "0"))


def options_of(model: Path, folder: Path, weights_dtype: str) -> LearnerOptions:
    options = options_for(folder, model, staleness={"bound": 4, "kappa": 2})
    dtype, _, more = weights_dtype.partition("-")
    copies = 2 if more == "copies" else 1
    trainer = replace(options.trainer, weights_dtype=dtype, token_budget=40, replicas=copies)
    if more == "lora":
        trainer = replace(trainer, lora_rank=2)
    return replace(options, trainer=trainer)


def batch(step: int) -> Batch:
    return Batch(Step(step), random_groups(step, count=2 + step))


def passages() -> list[Passage]:
    """Three rollouts of version STEPS, and one over a change of versions whose engine kept its cache."""
    found = []
    for number, spans in enumerate([[(STEPS, 5)], [(STEPS, 9)], [(STEPS, 7)], [(STEPS, 4), (STEPS + 1, 4)]]):
        count = sum(length for _, length in spans)
        tokens = tuple(10 + (7 * number + 3 * n) % 20 for n in range(count))
        told = tuple(VersionSpan(Version(version), length) for version, length in spans)
        rollout = Rollout(GroupId("g"), 0, tokens, (-1.0,) * count, (-1.0,) * count, told, FinishReason.STOP)
        spec = GroupSpec(GroupId("g"), (5, 6, 7), 1, SamplingParams(stop_token_ids=(1,)), 0)
        group = TrainGroup(spec, 0, (rollout,), (1.0,), (), ((SentTokens(PeerId("w"), count),),))
        found.append(passage_of(group, 0, lambda peer: Habits(True, True)))
    return found


def scored(team: Team, published: Mapping[str, torch.Tensor]) -> tuple[list[float], float]:
    """The numbers of all passages under their versions, from a step and what was published on both its sides; and what the
    step behind them gives."""
    scorer = team.scorer(4, Version(STEPS))
    scorer.keep(Version(STEPS), published)
    team.step(batch(STEPS))
    scorer.keep(Version(STEPS + 1), team.snapshot())
    with scorer.turn():
        found = examined(passages(), scorer.versions, scorer, scorer.together)
    numbers = [number for each in found for one in each for number in one.exact.logprobs.tolist()]
    result = team.step(batch(STEPS + 1)).metrics
    assert result is not None
    return numbers, result.loss


def lead(team: Team, folder: Path, loaded_elements: list[int]) -> None:
    """Three steps, a checkpoint; what came of them goes to a file."""
    results = [team.step(batch(step)) for step in range(STEPS)]
    taken = team.snapshot()
    policy = team.whole(taken, Version(STEPS))
    store = CheckpointStore(folder / "checkpoints", LearnerLimits(free_bytes_min=0))
    checkpoint = team.take(store, taken, Version(STEPS), {"journal_from": 0})
    store.save(checkpoint)
    again = team.step(batch(STEPS))
    team.load_newest(store)
    repeated = team.step(batch(STEPS))
    after = team.whole(team.snapshot(), Version(STEPS + 1))
    moved = {name: tensor + 1 for name, tensor in after.items()}
    rows = team.hold(Version(STEPS + 1), moved)
    is_held = all(torch.equal(t, moved[n]) for n, t in team.whole(rows, Version(STEPS + 1)).items())
    is_shared_out = all(isinstance(tensor, DTensor) for tensor in rows.values())
    loaded = team.load_newest(store)
    assert loaded is not None
    numbers, behind = ([], 0.0) if team.model.adapter else scored(team, loaded.published)
    team.stop()
    torch.save(
        {
            "steps": [{**asdict(r.metrics), "grad_norm": r.grad_norm, "positions": r.positions} for r in results],
            "policy": policy,
            "after": after,
            "held": is_held and is_shared_out,
            "again": again.metrics.loss,
            "repeated": repeated.metrics.loss,
            "scored": numbers,
            "behind": behind,
            "loaded_elements": loaded_elements,
            "moment_elements": sum(own_part(s["exp_avg"]).numel() for s in team.trainer.optimiser.state.values()),
        },
        folder / "result.pt",
    )


def resume(team: Team, folder: Path) -> None:
    """A later start of all ranks: the step behind the newest checkpoint, as `lead` made it twice."""
    store = CheckpointStore(folder / "checkpoints", LearnerLimits(free_bytes_min=0))
    loaded = team.load_newest(store)
    assert loaded is not None
    result = team.step(batch(STEPS)).metrics
    after = team.whole(team.snapshot(), Version(STEPS + 1))
    team.stop()
    assert result is not None
    torch.save({"step": int(loaded.step), "loss": result.loss, "after": after}, folder / "resumed.pt")


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
    """Another rank than the first, to its end; `fails_at`: the version of which it cannot code its rows."""
    gathered, original = count_gathered(), sharded.section_blocks
    coded: list[int] = []

    def broken(parent: Any, target: Any, header: Any, *rest: Any) -> Any:
        coded.append(header.target_version)
        if header.target_version == fails_at:
            raise OSError("a row cannot be read")
        return original(parent, target, header, *rest)

    sharded.section_blocks = broken
    team = new_team(options, ranks_of_environment(options.trainer.replicas))
    team.follow()
    (newest,) = team._held.versions
    held = team._held.of(newest).values()
    assert all(isinstance(tensor, DTensor) for tensor in held)
    said = {
        "gathered": gathered,
        "newest": newest,
        "coded": coded,
        "own_elements": sum(own_part(tensor).numel() for tensor in held),
    }
    (folder / f"rank{RANK}.json").write_text(json.dumps(said))


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
    command, model, folder, weights_dtype = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    options = options_of(model, folder, weights_dtype)
    torch.set_num_threads(1)
    if command == "steps":
        ranks = ranks_of_environment(options.trainer.replicas)
        if ranks.is_leader:
            loaded = watch_loading()
            lead(new_team(options, ranks), folder, loaded)
        else:
            follow(options, ranks)
    elif command == "resume":
        ranks = ranks_of_environment(options.trainer.replicas)
        if ranks.is_leader:
            resume(new_team(options, ranks), folder)
        else:
            follow(options, ranks)
    elif RANK > 0:
        obey(options, folder, fails_at=4 if command == "failing" else None)
    else:
        serve(options, folder)


if __name__ == "__main__":
    main()
