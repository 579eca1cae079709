"""The Python API for teams that keep their own trainer: weights out, rollouts in.

    with echo2.Run("run.toml", "@runs/NAME/links/learner.link") as run:
        publisher, rollouts = echo2.Publisher(run), echo2.Rollouts(run)
        publisher.publish(run.resume_step, echo2.published_tensors(model))
        for batch in rollouts:
            train(model, batch)                                     # yours
            publisher.publish(batch.step + 1, echo2.published_tensors(model))

The process takes the learner's place in the run: prompts, rewards, the staleness rule, the journal, publication and the
ledger are those of `echo-learner`; loss, optimiser and their checkpoints are yours. Under torchrun every rank makes the
same calls with its own part of the weights (DTensors of any parallelism); rank 0 is the run's learner. Guarantees: every
batch respects the staleness bound; no rollout is delivered twice, except that after a restart the batches since the last
checkpoint come again, in order. Waits for: rollouts, in `Rollouts`; `Run.waits_for` says what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from echo2.base.errors import ConfigError, Unreachable
from echo2.cli.learner import learner_options
from echo2.cli.options import config_of, require_extra
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import STEPS_MAX
from echo2.learner.learner import LearnerDaemon
from echo2.learner.own_trainer import DeclaredModel, OwnTrainer, OwnTrainerFollower, TrainerLeft
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.prompts import check_rewards_of
from echo2.learner.startup import prepare_with
from echo2.learner.training.ranks import ranks_of_environment
from echo2.tasks.registry import is_environment
from echo2.tasks.task import TaskSpec
from echo2.trust.tls import calls_have_ended
from echo2.weights.elements import published_tensors  # noqa: F401 - part of the API

CLOSE_WITHIN_S = 60.0  # workers fetch a last version in seconds; docs/own-trainer.md promises a minute


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout. `logprobs`: per token of `token_ids`, in nats, recorded at sampling; at temperature 1 those of the raw
    model, else of the sampling distribution. `versions`: the version that sampled each token. `group`: number of the prompt
    within its batch."""

    group: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B rows of L positions: prompt, then completion, padded on the right; rewards and groups by row. `token_ids_BL` int64;
    `is_sampled_BL` bool marks what the policy sampled; `logprobs_BL` float32, 0 elsewhere; `versions_BL` int64, -1 elsewhere;
    `rewards_B` float32; `groups_B` int64."""

    token_ids_BL: Tensor
    is_sampled_BL: Tensor
    logprobs_BL: Tensor
    versions_BL: Tensor
    rewards_B: Tensor
    groups_B: Tensor


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The samples of one step, to train on after `step` complete optimiser steps. Samples of one prompt are adjacent."""

    step: int
    samples: tuple[Sample, ...]

    def padded(self, pad_token_id: int = 0, device: torch.device | str = "cpu") -> PaddedBatch:
        """Returns the batch as padded tensors on `device`."""
        shape = (len(self.samples), max(len(s.prompt_token_ids) + len(s.token_ids) for s in self.samples))
        token_ids, sampled = torch.full(shape, pad_token_id), torch.zeros(shape, dtype=torch.bool)
        logprobs, versions = torch.zeros(shape), torch.full(shape, -1)
        for row, sample in enumerate(self.samples):
            begin = len(sample.prompt_token_ids)
            end = begin + len(sample.token_ids)
            token_ids[row, :end] = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
            sampled[row, begin:end] = True
            logprobs[row, begin:end] = torch.tensor(sample.logprobs)
            versions[row, begin:end] = torch.tensor(sample.versions)
        rewards = torch.tensor([sample.reward for sample in self.samples])
        groups = torch.tensor([sample.group for sample in self.samples])
        arrays = (token_ids, sampled, logprobs, versions, rewards, groups)
        return PaddedBatch(*(tensor.to(device) for tensor in arrays))


class Run:
    """Makes this process the learner of a run. `link`: the learner's join link, or @FILE; needed on the first start. `config`:
    a TOML file, or a resolved config. `folder`: keeps identity, journal and checkpoints (default: as in `echo-learner`).
    Nothing starts before the first `Publisher.publish`. Raises `ConfigError` for a bad option."""

    def __init__(self, config: str | Path | RunConfig, link: str = "", *, folder: str | Path | None = None) -> None:
        require_extra("learner", "echo2.Run")
        resolved = config if isinstance(config, RunConfig) else config_of([Path(config)], None, [])
        _check(resolved)
        place = Path(folder) if folder else Path(resolved.run.folder) / resolved.run.name / "learner"
        self.options = learner_options(_without_evaluations(resolved), link, place)
        model, ranks = DeclaredModel(resolved.model.path, resolved.model.weights_dtype), ranks_of_environment()
        self._daemon: LearnerDaemon | None = None
        self._told_step = 0
        self.trainer: OwnTrainer | OwnTrainerFollower
        if ranks.is_leader:
            self.options = check_rewards_of(self.options)
            self.trainer = trainer = OwnTrainer(model, ranks)
            self._daemon = LearnerDaemon(self.options, make_prepared=lambda o, f: prepare_with(trainer, o, f))
            ranks.tell({"resume_step": self.resume_step})
        else:
            self.trainer = OwnTrainerFollower(model, ranks)
            self._told_step = int(ranks.hear()[0]["resume_step"])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self.is_started = False

    @property
    def resume_step(self) -> int:
        """The step of the newest checkpoint: load your own checkpoint of that step, then call `publish(resume_step, …)`."""
        if self._daemon is None:
            return self._told_step
        store = CheckpointStore(self.options.folder / "checkpoints", self.options.limits, is_owner=False)
        return int(store.newest() or 0)

    @property
    def checkpoint_every_steps(self) -> int:
        """Steps between checkpoints; the last step has one, too."""
        return self.options.config.learner.checkpoint_every_steps

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether the run takes a checkpoint at this step, as at the last one: write your own to disk before you ask for the next
        batch or leave. The run's is written after it. Steps that come again after a restart have none."""
        return self.is_last_step or self.trainer.is_kept

    @property
    def is_last_step(self) -> bool:
        return self.step >= self.options.config.learner.steps

    @property
    def step(self) -> int:
        """Number of complete optimiser steps."""
        return self.trainer.step_count

    @property
    def waits_for(self) -> str:
        """What the run waits for; empty while it works, and on ranks other than 0."""
        return self._daemon.waits_for[0] if self._daemon is not None else ""

    def start(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Joins the run with the weights of step `step`. The first `publish` calls it."""
        self.trainer.begin(step, tensors)
        self.is_started = True
        if self._daemon is not None:
            self._thread = threading.Thread(target=self._serve, name="echo2", daemon=True)
            self._thread.start()
            # Before Python waits for the threads of executors: the learner's waits for this trainer.
            threading._register_atexit(_left_at_exit, weakref.ref(self))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leaves the run. Steps trained so far are on disk; a batch not trained on is delivered again at the next start. After
        the last step, waits until workers could fetch the last version. Raises the error that ended the run, unless it was
        raised before, and `Unreachable`, which names what it waits for, if the run's side has not ended within CLOSE_WITHIN_S.
        (If another error is already leaving a `with` block, both become warnings.)"""
        if (trouble := self._leave()) is not None:
            raise trouble

    def _leave(self) -> BaseException | None:
        """Leaves the run; returns the error to raise, or None."""
        if self._daemon is None or isinstance(self.trainer, OwnTrainerFollower):
            self.trainer.end()
            return None
        self.trainer.saved()
        if not self.is_last_step:
            self.trainer.end()
            if self._loop is not None and self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        thread.join(CLOSE_WITHIN_S)
        if not thread.is_alive():
            return self.trainer.untold_failure()
        waits_for, since_s = self._daemon.waits_for
        config = self.options.config
        return Unreachable(
            f"run {config.run.name} at step {self.step} of {config.learner.steps}: expected its learner's side to end "
            f"within {CLOSE_WITHIN_S:.0f} s of close, but it waits for {waits_for or 'nothing that it could name'} since "
            f"{since_s:.0f} s; it goes on until this process ends"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._daemon is None:
            return  # rank 0 may wait for this rank in a collective: torchrun ends both once it sees that one has failed
        elif (trouble := self._leave()) is not None:
            warnings.warn(f"{type(trouble).__name__}: {trouble}", RuntimeWarning, stacklevel=2)

    def _serve(self) -> None:
        assert self._daemon is not None and isinstance(self.trainer, OwnTrainer), "rank 0 alone serves"
        daemon, failure = self._daemon, None

        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            try:
                await daemon.run()
            finally:
                await calls_have_ended()

        try:
            asyncio.run(serve())
        except (TrainerLeft, asyncio.CancelledError):
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's thread, by next_batch or hand_in
            failure = error
        self.trainer.end(failure)
        with contextlib.suppress(RuntimeError):  # gloo's, of a rank that has gone
            self.trainer.stop()  # of a run that did not end by itself nobody has told the other ranks


def _left_at_exit(asked: weakref.ref[Run]) -> None:
    """A process that ends without `close` leaves its run all the same. Forks of it have no such thread."""
    run = asked()
    if run is not None and run._thread is not None and run._thread.is_alive() and (trouble := run._leave()) is not None:
        print(f"{type(trouble).__name__}: {trouble}", file=sys.stderr)


def _check(config: RunConfig) -> None:
    """Raises ConfigError for what only the learner's own trainer does."""
    learner, rank, tasks = config.learner, config.model.lora_rank, config.task.asked
    if not config.model.path:
        raise ConfigError("model.path: expected a model folder or hub id, for configuration and tokenizer, got nothing")
    if config.agent.is_on or any(is_environment(TaskSpec(*task)) for task in tasks) or rank:
        raise ConfigError(
            "a trainer of one's own: expected a task of one completion, no agent and whole weights (model.lora_rank 0), got "
            f"{', '.join(name for name, _ in tasks)} and rank {rank}"
        )
    if config.sft.path or learner.teacher:
        raise ConfigError("sft.path, learner.teacher: expected none with a trainer of one's own, whose loss is its own")
    if learner.replicas != 1:
        raise ConfigError(
            "learner.replicas: expected 1 with a trainer of one's own, whose engine spreads its weights itself, got "
            f"{learner.replicas}"
        )


def _without_evaluations(config: RunConfig) -> RunConfig:
    """The trainer evaluates by itself, and checkpoints after a fixed number of steps."""
    every = config.learner.checkpoint_every_steps or STEPS_MAX
    mixture = {name: entry.model_copy(update={"eval_prompts": 0}) for name, entry in config.task.mixture.items()}
    task = config.task.model_copy(update={"eval_prompts": 0, "eval_sets": {}, "mixture": mixture})
    learner = config.learner.model_copy(update={"checkpoint_every_steps": every})
    return config.model_copy(update={"task": task, "learner": learner})


class Publisher:
    """Publishes the weights of a `Run`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def publish(self, step: int, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> bool:
        """Reports that `step` optimiser steps are complete, and hands over the weights after them. `named_tensors`: all
        parameters by their Hugging Face names, any float dtype, any device, rounded to the run's published dtype; and the
        model's persistent float buffers (a router's correction bias), which keep their dtype. `published_tensors(model)` gives
        both. Call it once before the first batch and after each batch. Copies the tensors only if a version is due, which the
        coordinator's plan or `staleness.kappa` decides; returns whether it did. You may change the tensors as soon as it
        returns. Raises `ConfigError` for tensors other than the model's or with NaN, `StateError` for a step out of order, and
        the error that ended the run, if any."""
        try:
            tensors = dict(named_tensors)
        except (TypeError, ValueError):
            raise ConfigError(
                f"publish: expected tensors by name, such as echo2.published_tensors(model), got {type(named_tensors).__name__}"
            ) from None
        if not self.run.is_started:
            self.run.start(step, tensors)
            return True
        return self.run.trainer.hand_in(step, tensors)


class Rollouts:
    """The batches of a `Run`, in order, until its last step. Waits until a batch is complete."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self

    def __next__(self) -> TrainingBatch:
        if not self.run.is_started:
            raise ConfigError("rollouts: expected Publisher.publish first, for workers need weights to sample from")
        batch = None if self.run.is_last_step else self.run.trainer.next_batch()
        if batch is None:
            self.run.trainer.saved()
            raise StopIteration
        samples = []
        for number, group in enumerate(batch.groups):
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                versions = tuple(int(span.version) for span in rollout.version_spans for _ in range(span.count))
                prompt = group.spec.prompt_token_ids
                numbers = group.spec.sampling.trained_logprobs(rollout.logprobs, rollout.raw_logprobs)
                samples.append(Sample(number, prompt, rollout.token_ids, numbers, versions, reward))
        return TrainingBatch(int(batch.step), tuple(samples))
