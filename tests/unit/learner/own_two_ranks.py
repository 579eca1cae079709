"""One rank of a trainer of the user's own, whose engine is transformers' tensor parallelism; torchrun starts two of them:
`-m tests.unit.learner.own_two_ranks MODEL FOLDER`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from echo2.learner.options import LearnerLimits, LearnerOptions
from echo2.learner.own_trainer import DeclaredModel, OwnTrainer, OwnTrainerFollower
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import prepare_with
from echo2.learner.training.ranks import DistributedRanks, Ranks
from tests.unit.learner.fleet import options_for

STEPS = 4


def options_of(model: Path, folder: Path) -> LearnerOptions:
    bounded, limits = {"bound": 4, "kappa": 2}, LearnerLimits(free_bytes_min=0, linger_s=0.0)
    return options_for(
        folder, model, limits=limits, staleness=bounded, learner={"steps": STEPS}, task={"eval_prompts": 0}
    )


class Engine:
    """The model split over both ranks by its own plan: columns of some matrices, rows of others, the rest on both."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        mesh = init_device_mesh("cpu", (2,))
        self.model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", device_mesh=mesh)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def train(self, batch: Batch) -> None:
        """The log-likelihood of what was rewarded."""
        for group in batch.groups:
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                ids = torch.tensor([[*group.spec.prompt_token_ids, *rollout.token_ids]])
                (self.model(input_ids=ids, labels=ids).loss * (reward + 0.1)).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def loop(self, trainer: OwnTrainer | OwnTrainerFollower) -> None:
        step = trainer.step_count
        while step < STEPS and (batch := trainer.next_batch()) is not None:
            self.train(batch)
            step += 1
            trainer.hand_in(step, self.weights())


def lead(engine: Engine, ranks: Ranks, model: Path, folder: Path) -> None:
    from tests.unit.learner.fleet import Run

    trainer = OwnTrainer(DeclaredModel(str(model), "bfloat16"), ranks)
    made: list[Run] = []
    failures: list[BaseException] = []

    def train() -> None:
        try:
            engine.loop(trainer)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
            trainer.end(error)

    trainer.begin(0, engine.weights())
    thread = threading.Thread(target=train, daemon=True)
    thread.start()

    async def run() -> Any:
        from tests.unit.learner.fleet import FollowerBroadcaster

        follower = FollowerBroadcaster()
        parts = {"make_broadcaster": follower.made, "make_prepared": lambda o, f: prepare_with(trainer, o, f)}
        one = Run(options_of(model, folder), **parts)
        one.follower = follower
        made.append(one)
        return await one.finish()

    summary = asyncio.run(run())
    thread.join()
    if failures:
        raise failures[0]
    layouts = {name: type(tensor.data).__name__ for name, tensor in engine.weights().items()}
    said = {
        "fingerprint": summary.fingerprint,
        "followed": f"{made[0].follower.host.fingerprint():016x}",
        "versions": [list(version) for version in made[0].follower.versions],
        "steps": summary.steps,
        "layouts": layouts,
    }
    (folder / "summary.json").write_text(json.dumps(said))
    torch.save(made[0].follower.host.tensors(), folder / "followed.pt")


def follow(engine: Engine, ranks: Ranks, model: Path, _folder: Path) -> None:
    trainer = OwnTrainerFollower(DeclaredModel(str(model), "bfloat16"), ranks)
    trainer.begin(0, engine.weights())
    engine.loop(trainer)
    trainer.end()


def again(engine: Engine, ranks: Ranks, model: Path, folder: Path) -> None:
    """A later start beside the newest checkpoint: with the weights that it holds, then with other ones, which are refused."""
    from echo2.base.errors import ConfigError
    from echo2.learner.publishing.checkpoint import CheckpointStore

    declared = DeclaredModel(str(model), "bfloat16")
    store = CheckpointStore(folder / "checkpoints", LearnerLimits(), is_owner=False)
    said = []
    for change in (0.0, 1.0):
        with torch.no_grad():
            engine.model.lm_head.weight.add_(change)
        if ranks.is_leader:
            trainer = OwnTrainer(declared, ranks)
            trainer.begin(STEPS, engine.weights())
            try:
                said.append(str(trainer.load_newest(store).step))
            except ConfigError as error:
                said.append(str(error))
            trainer.stop()
            (folder / "again.json").write_text(json.dumps(said))
        else:
            following = OwnTrainerFollower(declared, ranks)
            following.begin(STEPS, engine.weights())
            following.end()


def keep_whole(engine: Engine, ranks: Ranks, path: Path) -> None:
    """What the engine itself says that it holds."""
    full = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().bfloat16()
        for name, tensor in engine.weights().items()
    }
    if ranks.is_leader:
        torch.save(full, path)


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # as an engine of the user's does
    engine, ranks = Engine(model), DistributedRanks()
    keep_whole(engine, ranks, folder / "start.pt")
    (lead if ranks.is_leader else follow)(engine, ranks, model, folder)
    keep_whole(engine, ranks, folder / "trained.pt")
    again(engine, ranks, model, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
