"""One rank of a small learner; torchrun starts two of them: `-m tests.unit.learner.two_ranks COMMAND MODEL FOLDER`."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from echo2.base.ids import Step, Version
from echo2.base.rollout import SamplingParams
from echo2.learner.batcher import Batch
from echo2.learner.runtime.checkpoint import CheckpointStore
from echo2.learner.runtime.options import CheckpointOptions, LearnerOptions
from echo2.learner.runtime.ranks import own_rank, ranks_of_environment
from echo2.learner.runtime.startup import follow, new_team
from echo2.learner.runtime.team import Team
from tests.unit.learner.fleet import options_for
from tests.unit.learner.test_trainer import random_groups

STEPS = 3


def options_of(model: Path, folder: Path, weights_dtype: str) -> LearnerOptions:
    options = options_for(folder, model, staleness_bound=4, kappa=2)
    trainer = replace(options.trainer, weights_dtype=weights_dtype.removesuffix("-lora"), token_budget=40)
    if weights_dtype.endswith("-lora"):
        trainer = replace(trainer, lora_rank=2)
    return replace(options, trainer=trainer)


def batch(step: int) -> Batch:
    return Batch(Step(step), random_groups(step, count=2 + step))


def lead(team: Team, folder: Path) -> None:
    """Three steps, a completion, a checkpoint; what came of them goes to a file."""
    results = [team.step(batch(step)) for step in range(STEPS)]
    policy = team.snapshot()
    sampling = SamplingParams(max_new_tokens=5, stop_token_ids=(1,))
    done = team.complete([[5, 6, 7], [8, 9]], sampling, True, 0)
    store = CheckpointStore(folder / "checkpoints", CheckpointOptions(free_bytes_min=0))
    checkpoint = team.take(store, policy, Version(STEPS), {"journal_from": 0})
    store.save(checkpoint)
    again = team.step(batch(STEPS))
    team.load_newest(store)
    repeated = team.step(batch(STEPS))
    after = team.snapshot()
    team.stop()
    torch.save(
        {
            "steps": [{**asdict(r.metrics), "grad_norm": r.grad_norm, "positions": r.positions} for r in results],
            "policy": policy,
            "after": after,
            "completions": done.token_ids,
            "again": again.metrics.loss,
            "repeated": repeated.metrics.loss,
        },
        folder / "result.pt",
    )


def main() -> None:
    command, model, folder, weights_dtype = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    options = options_of(model, folder, weights_dtype)
    torch.set_num_threads(1)
    if command == "steps":
        ranks = ranks_of_environment()
        if ranks.is_leader:
            lead(new_team(options, ranks), folder)
        else:
            follow(options, ranks)
    elif own_rank() > 0:
        follow(options, ranks_of_environment())
    else:
        from tests.unit.learner.test_daemon import Run

        run = Run(options)
        summary = asyncio.run(run.finish())
        said = {
            "fingerprint": summary.fingerprint,
            "followed": f"{run.follower.host.fingerprint():016x}",
            "steps": summary.steps,
        }
        (folder / "summary.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
