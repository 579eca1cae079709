"""`echo2 serve`: the learner's place in a run for a trainer of another project, which hands in weights and asks for tokens by HTTP.

    weights handed in --> checked, on disk --> published --> newest version
    requests --> leased to workers (rollouts/request_pool) --> answered

Guarantees: a version is on disk before its first byte is sent, and its number only grows, so that a restart goes on with the
newest; weights that are not the model's are refused and change nothing; every answer is audited like any rollout.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.base.ids import Step, Version
from echo2.base.rollout import ROUTING_KEY, RoutingShape
from echo2.config.run import AgentSection
from echo2.gateway.app import GatewayPort
from echo2.gateway.episodes import CallRefused
from echo2.gateway.generate import GenerateApp
from echo2.learner.loop import TrainingLoop
from echo2.learner.metrics import StepTimes
from echo2.learner.options import LearnerOptions, RunFolder
from echo2.learner.own_trainer import DeclaredModel, OwnTrainer
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore
from echo2.learner.rollouts.agents import gateway_key
from echo2.learner.rollouts.groups import Batch
from echo2.learner.rollouts.prompts import PromptSource, load_tokenizer
from echo2.learner.rollouts.request_pool import RequestPool
from echo2.learner.startup import Prepared, prepare_with
from echo2.learner.training.loading import config_json_of, load_whole
from echo2.outside import monotonic, unix_now
from echo2.tasks.rewards import Scored
from echo2.tasks.task import TaskInstance
from echo2.weights.elements import published_tensors
from echo2.weights.routers import Routers

if TYPE_CHECKING:
    from echo2.gateway.tinker import TinkerApi
    from echo2.learner.driven import DrivenTeam

URL_FILE = "gateway.url"  # for programs on this machine, beside the key
_log = logging.getLogger("echo2.learner")


class NoPrompts:
    """The world of a run whose prompts come with the requests."""

    name, size, reward_processes = "requests", None, 0

    def instance(self, index: int) -> TaskInstance:
        raise AssertionError("prompts come with the requests")

    async def answer(self, *_: object, **__: object) -> Scored:
        raise AssertionError("the trainer computes its own rewards")

    def close(self) -> None:
        pass


class ServedModel(DeclaredModel):
    def __init__(self, path: str, weights_dtype: str, *, records_routing: bool) -> None:
        super().__init__(path, weights_dtype)
        if records_routing:
            self.routing = Routers(self.skeleton, f"model {path}").shape

    def config_json(self) -> bytes:
        return config_json_of(self.config, self.size, {ROUTING_KEY: True} if self.routing else None)

    def read(self, folder: str) -> dict[str, Tensor]:
        """Loads the tensors of a model folder, in the published dtype. Raises `ConfigError` unless they are this model's."""
        tensors = published_tensors(load_whole(folder, self.dtype))
        self.check_table(tensors)
        given = {name: tensors[name].detach() for name in sorted(self.shapes)}
        return {name: t if name in self.kept else t.to(self.dtype) for name, t in given.items()}


class ServedWeights(OwnTrainer):
    """The training side without training: holds the newest weights. `step_count` is their version."""

    starts_from_base = True
    model: ServedModel

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self.step_count, self._weights = 0, model.read(model.path)

    def snapshot(self) -> dict[str, Tensor]:
        assert self._weights is not None, "read at the start"
        return self._weights

    def put(self, version: Version, weights: dict[str, Tensor]) -> None:
        self.step_count, self._weights = int(version), weights

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        checkpoint = store.load_newest()
        if checkpoint is not None:
            self.put(checkpoint.published_version, dict(checkpoint.published))
        return checkpoint


@dataclass(frozen=True, slots=True)
class HandedIn:
    """Weights to publish as `version`. `is_begun`: resolved once they are on their way."""

    version: Version
    weights: dict[str, Tensor]
    is_last: bool = False
    is_begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class VersionServer:
    """Publishes what is handed in, where else the loop trains, and answers what trainers ask, at `door`. `make_api`: of
    a client that drives this run's own trainer, on the same port; then no other weights are taken."""

    def __init__(
        self, loop: TrainingLoop, door: AgentSection, make_api: Callable[[VersionServer], TinkerApi] | None = None
    ) -> None:
        assert isinstance(loop.pool, RequestPool), "a learner that serves has no prompts"
        self.loop, self.pool = loop, loop.pool
        self.generate, self.leave = loop.pool.generate, loop.pool.leave
        self.weights: ServedWeights | DrivenTeam = loop.p.team  # type: ignore[assignment]
        loop.steps = sys.maxsize  # until the last version is handed in
        self._handed_in: asyncio.Queue[HandedIn | None] = asyncio.Queue()
        self._publishing = asyncio.Lock()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._began = monotonic()
        self._port = GatewayPort(door.listen, door.tls)
        self._api = None if make_api is None else make_api(self)
        config, folder = loop.options.config, loop.options.folder
        app = GenerateApp(self, config.run.name, loop.p.prompts.context_tokens, gateway_key(folder))
        self._app = app.application(() if self._api is None else self._api.routes())
        (folder / URL_FILE).write_text(self._port.url + "\n")

    def stop(self) -> None:
        self._handed_in.put_nowait(None)

    async def run(self) -> None:
        begin = asyncio.get_running_loop().create_task
        serving, publishing = begin(self._port.run(self._app)), begin(self.loop.run(self._publish_next))
        _log.info("trainers ask %s; their key is in %s", self._port.url, self.loop.options.folder / "gateway.key")
        try:
            await asyncio.wait({serving, publishing}, return_when=asyncio.FIRST_COMPLETED)
            (publishing if publishing.done() else serving).result()
        finally:
            publishing.cancel()
            await self._port.stop(serving)
            self._reading.shutdown(wait=False, cancel_futures=True)
            await asyncio.gather(publishing, return_exceptions=True)
            if self._api is not None:
                await self._api.operations.close()

    async def _publish_next(self) -> bool:
        self.loop.waiting = ("weights", monotonic())
        handed = await self._handed_in.get()
        if handed is None:
            return False
        self.loop.waiting = ("", 0.0)
        self.weights.put(handed.version, handed.weights)
        finished = self.pool.begin_version(handed.version)
        await self.loop.publisher.settled()
        checkpoint = await self.loop.take_checkpoint(handed.weights, handed.version)
        await self.loop.write_checkpoint(checkpoint)
        self.loop.auditor.counts.steps += 1
        await self.loop.publish(handed.weights, StepTimes())
        if handed.is_last:
            self.loop.steps = self.loop.step
        if not handed.is_begun.done():
            handed.is_begun.set_result(None)
        self._write_row(handed.version, Batch(Step(handed.version - 1), tuple(finished)))
        return True

    def _write_row(self, version: Version, batch: Batch) -> None:
        """The interval since the last version: while requests were under way the trainer waited, the rest of it it trained."""
        now = monotonic()
        interval_s, self._began = now - self._began, now
        wait_s = min(interval_s, self.pool.take_busy_s())
        self.loop.utilisation.add(interval_s - wait_s, wait_s)
        self.loop.recent.add(batch)
        tokens, self.pool.sampled_tokens = self.pool.sampled_tokens, 0
        self.loop.write({
            "step": int(version), "unix_s": unix_now(), "step_s": interval_s - wait_s, "phase/wait_s": wait_s,
            "tokens": tokens, "rollouts": batch.rollout_count, "version": int(version),
        })  # fmt: skip
        _log.info("version %d: %d completions, %s tokens since the last", version, batch.rollout_count, f"{tokens:,}")
        self.loop.on_step()

    # ---- what clients ask

    @property
    def newest_version(self) -> int:
        return int(self.pool.groups.published[-1])

    @property
    def routing_shape(self) -> RoutingShape | None:
        return self.loop.p.team.model.routing

    def status(self) -> Mapping[str, object]:
        bound = self.loop.options.config.staleness.bound
        return {
            "newest_version": self.newest_version, "staleness_bound": bound,
            "under_way": self.pool.rollouts_asked, "waits_for": self.pool.waits_for, "is_last": self.loop.is_finished,
        }  # fmt: skip

    async def publish(self, version: int, folder: str, is_last: bool) -> None:
        if not isinstance(self.weights, ServedWeights):
            text = "expected weights of this run's training client alone (serve --trains)"
            raise CallRefused(400, "not_supported", text)
        async with self._publishing:
            newest = int(self.weights.step_count)
            if version <= newest:
                raise CallRefused(
                    409, "version_not_newer", f"version: expected one above {newest}, the newest, got {version}"
                )
            if self.loop.is_finished or self.loop.is_stopped:
                raise CallRefused(410, "run_ended", "this run has had its last version")
            read = self.weights.model.read
            weights = await asyncio.get_running_loop().run_in_executor(self._reading, read, folder)
            await self.hand_in(HandedIn(Version(version), weights, is_last))

    async def hand_in(self, handed: HandedIn) -> None:
        """Returns once the version is on its way."""
        self._handed_in.put_nowait(handed)
        await handed.is_begun


def served_options(options: LearnerOptions, *, trains: bool = False) -> LearnerOptions:
    """The options of a run that is served: no task, no evaluations. `trains`: a client drives this trainer, for which
    log-probabilities are the raw model's. Raises `ConfigError` for what only a trainer of echo2's has."""
    config = options.config
    if config.model.lora_rank and not trains:
        raise ConfigError(
            f"model.lora_rank: expected 0, since a trainer that is served hands in whole weights, got {config.model.lora_rank}"
        )
    if config.agent.harness:
        raise ConfigError(
            f"agent.harness: expected none, since prompts come with the requests of a trainer, got {config.agent.harness}"
        )
    task = type(config.task)(eval_prompts=0)
    learner = config.learner.model_copy(update={"drop_equal_groups": False})
    changed: dict[str, object] = {"task": task, "learner": learner, "agent": AgentSection()}
    if trains:
        changed["sampling"] = config.sampling.model_copy(update={"temperature": 1.0})
    return replace(options, config=config.model_copy(update=changed))


def prepare_served(options: LearnerOptions, folder: RunFolder) -> Prepared:
    """As `prepare`, with the weights of the model's folder, or of the newest version that this run was handed."""
    config = options.config
    model = ServedModel(config.model.path, config.model.weights_dtype, records_routing=config.learner.replay_routing)
    return prepare_with(ServedWeights(model), options, folder, PromptSource(load_tokenizer(model.path), NoPrompts()))
