"""One rank of a trainer of the user's own, whose engine is transformers' tensor parallelism:
`-m tests.unit.learner.own_two_ranks MODEL FOLDER`, twice, in torchrun's environment."""

import asyncio
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from echo2.base.errors import ConfigError
from echo2.learner.options import LearnerLimits
from echo2.learner.own_trainer import DeclaredModel, OwnTrainer, OwnTrainerFollower
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import prepare_with
from echo2.learner.training.ranks import DistributedRanks
from tests.unit.learner.fleet import Run, options_for

STEPS = 4


class Engine:
    """The model split over both ranks by its own plan: columns of some matrices, rows of others, the rest on both."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        mesh = init_device_mesh("cpu", (2,))
        self.model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", device_mesh=mesh)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def whole(self) -> dict[str, torch.Tensor]:
        """What the engine itself says that it holds."""
        tensors = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.weights().items()
        }
        return {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}

    def loop(self, trainer: OwnTrainer | OwnTrainerFollower) -> None:
        """Trains on the log-likelihood of what was rewarded."""
        while trainer.step_count < STEPS and (batch := trainer.next_batch()) is not None:
            self.train(batch)
            trainer.hand_in(trainer.step_count + 1, self.weights())
        trainer.saved()

    def train(self, batch: Batch) -> None:
        for group in batch.groups:
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                ids = torch.tensor([[*group.spec.prompt_token_ids, *rollout.token_ids]])
                (self.model(input_ids=ids, labels=ids).loss * (reward + 0.1)).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def lead(engine: Engine, declared: DeclaredModel, folder: Path) -> dict[str, object]:
    """Rank 0: its engine trains in a thread, beside the learner. Returns what came of the run."""
    limits = LearnerLimits(free_bytes_min=0, linger_s=0.0)
    options = options_for(
        folder, Path(declared.path), limits=limits, staleness={"bound": 4, "kappa": 2}, learner={"steps": STEPS},
        task={"eval_prompts": 0},
    )  # fmt: skip
    trainer = OwnTrainer(declared, DistributedRanks())
    run = Run(options, make_prepared=lambda given, held: prepare_with(trainer, given, held))
    trainer.begin(0, engine.weights())

    def on_end(training: Future[None]) -> None:
        if training.exception() is not None:
            trainer.end(training.exception())

    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(engine.loop, trainer)
        training.add_done_callback(on_end)
        try:
            summary = asyncio.run(run.finish())
        finally:
            trainer.end()
        training.result()
    layouts = {name: type(tensor.data).__name__ for name, tensor in engine.weights().items()}
    return {
        "followed": run.follower.host.tensors(), "steps": summary.steps,
        "versions": run.follower.versions, "layouts": layouts,
    }  # fmt: skip


def again(engine: Engine, declared: DeclaredModel, folder: Path) -> list[str]:
    """A later start beside the newest checkpoint: with the weights that it holds, then with other ones, which are refused."""
    store, ranks, said = (
        CheckpointStore(folder / "checkpoints", LearnerLimits(), is_owner=False),
        DistributedRanks(),
        [],
    )
    for change in (0.0, 1.0):
        with torch.no_grad():
            engine.model.lm_head.weight.add_(change)
        if not ranks.is_leader:
            following = OwnTrainerFollower(declared, ranks)
            following.begin(STEPS, engine.weights())
            following.end()
            continue
        trainer = OwnTrainer(declared, ranks)
        trainer.begin(STEPS, engine.weights())
        try:
            said.append(str(trainer.load_newest(store).step))  # type: ignore[union-attr]
        except ConfigError as error:
            said.append(str(error))
        trainer.stop()
    return said


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # as an engine of the user's does
    engine, declared = Engine(model), DeclaredModel(str(model), "bfloat16")
    found: dict[str, object] = {"start": engine.whole()}
    if dist.get_rank() == 0:
        found |= lead(engine, declared, folder)
    else:
        follower = OwnTrainerFollower(declared, DistributedRanks())
        follower.begin(0, engine.weights())
        engine.loop(follower)
        follower.end()
    found |= {"trained": engine.whole(), "again": again(engine, declared, folder)}
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
