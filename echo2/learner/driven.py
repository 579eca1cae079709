"""`echo2 serve --trains`: a client of Tinker's API drives this run's trainer, and samples from the versions that it publishes.

    client's examples --> gradients add up --> step --> published --> sampled from by the fleet
                              saved under a name <--'--> begun anew from it

Guarantees: versions only grow, whatever state training goes back to; a version is on disk before its first byte is sent; what was
saved under a name survives every restart, while steps since are lost with the process and the client goes on from what it saved.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.base.ids import Step, Version
from echo2.base.rollout import AdamStep, ClientLoss, Example
from echo2.config.run import AgentSection
from echo2.gateway.tinker import Terms, TinkerApi
from echo2.learner.loop import TrainingLoop
from echo2.learner.options import LearnerLimits, LearnerOptions, RunFolder
from echo2.learner.own_trainer import take_published
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore, put_back, take
from echo2.learner.rollouts.prompts import PromptSource, load_tokenizer
from echo2.learner.serve import HandedIn, NoPrompts, VersionServer
from echo2.learner.startup import Prepared, new_team, prepare_with
from echo2.learner.training.loading import check_finite, load_whole
from echo2.learner.training.model import Policy, PolicyModel, without_adapter
from echo2.learner.training.ranks import Ranks
from echo2.learner.training.scoring import VersionScorer, rows_by_name
from echo2.learner.training.team import Team
from echo2.learner.training.trainer import Trainer

_SAVED = re.compile(r"[0-9a-f]{8,64}:train:[0-9]{1,9}/[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")  # as gateway/tinker names them
_ONE_KEPT = LearnerLimits(checkpoints_kept=1)  # a name stands for the last state saved under it
_ALL_KEPT = LearnerLimits(checkpoints_kept=1 << 30)  # until the operator removes them
_LOSS_OF_SCORES = ClientLoss("cross_entropy")  # its forward pass gives log-probabilities alone


class DrivenTeam(Team):
    """The trainer as a client drives it. `trainer.step_count` is the newest version, not the number of its steps. Call all
    methods on the trainer's thread, except `put` and `take`."""

    def __init__(self, trainer: Trainer, options: LearnerOptions) -> None:
        super().__init__(trainer)
        self._saved = options.folder / "saved"
        self._versions_max = options.config.staleness.bound + 1
        self._scores: VersionScorer | None = None
        self._base: PolicyModel | None = None  # loaded when it is first asked for
        self._named: tuple[int, Mapping[str, Tensor]] = (0, {})  # the named version that was scored last
        # A fresh adapter cannot be read from the model's folder.
        self._adapter = None
        if self.model.adapter is not None:
            self._adapter = {name: master.clone() for name, master in self.model.masters_by_name().items()}
        self.is_changed = False  # since the newest version

    # ---- as the training side of a learner that serves

    def put(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        self.trainer.step_count = int(version)
        self.scorer(0, version).keep(version, weights)

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        """Takes what a restart needs so that versions go on; what the client wants to go on from it has saved."""
        return take_published(store, Step(version), published, version, state)

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        checkpoint = store.load_newest()
        if checkpoint is not None:
            self.is_changed = True  # the trainer has the base, the fleet a later version
            self.trainer.step_count = int(checkpoint.step)
        return checkpoint

    def scorer(self, versions_max: int, newest: Version) -> VersionScorer:
        """The one scorer of audits and clients."""
        self._scores = self._scores or super().scorer(max(versions_max, self._versions_max), newest)
        return self._scores

    # ---- for the client

    def to_publish(self) -> dict[str, Tensor]:
        """A snapshot. ConfigError if it holds NaN or infinity."""
        weights = self.snapshot()
        check_finite(weights, "publish")
        return weights

    def begin(self, saved: str, *, with_optimiser: bool) -> None:
        """Begins anew from a saved state; "": from the base, with a fresh adapter if the run trains one."""
        trainer, version = self.trainer, self.trainer.step_count
        state = self._store(saved).load_newest(trainer) if saved else None
        if saved and state is None:
            raise ConfigError(f"path: expected a state that was saved in this run, got {saved}")
        if trainer.lent is not None:  # a state that is being written borrows the masters
            trainer.lent.keep()
            trainer.lent = None
        trainer.model.forget_gradients()
        trainer.optimiser.state.clear()
        if state is None:
            raw = self._adapter or dict(load_whole(self.model.path, self.model.parameters[0].dtype).named_parameters())
            self.model.load_masters({name: raw[name].detach() for name in self.model.names})
        else:
            put_back(state, trainer)
            if not with_optimiser:
                trainer.optimiser.state.clear()
        trainer.step_count = version
        self.is_changed = self.is_changed or bool(saved) or version > 0

    def optim_step(self, step: AdamStep) -> Mapping[str, float]:
        grad_norm, is_made = self.trainer.optim_step(step)
        self.is_changed |= is_made
        return {"grad_norm": grad_norm, "update_made": float(is_made)}

    def take_to_save(self, saved: str, *, overwrites: bool) -> tuple[CheckpointStore, Checkpoint]:
        store = self._store(saved)
        if store.steps() and not overwrites:
            raise ConfigError(f"name: expected a new one, or overwrite=True, got {saved}, which is there")
        checkpoint = take(self.trainer, {}, Version(0), {"journal_from": 0})
        store.begin(checkpoint)
        return store, checkpoint

    def take_named(self, version: Version) -> tuple[CheckpointStore, Checkpoint]:
        """Takes the newest version, as it trains now, for as long as a client may score by it."""
        store = CheckpointStore(self._saved / "versions", _ALL_KEPT)
        return store, take_published(store, Step(version), self.snapshot(), version, {"journal_from": 0})

    def _store(self, saved: str) -> CheckpointStore:
        if not _SAVED.fullmatch(saved):
            raise ConfigError(f"path: expected CLIENT/weights/NAME, got {saved!r:.120}")
        return CheckpointStore(self._saved / saved, _ONE_KEPT)

    def scored(self, version: Version, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities of all tokens but the first under a version: the base (0), one of the newest, or one with a name."""
        if len(token_ids) == 1:
            return np.zeros(0, np.float32)
        ids = np.array(token_ids, np.int64)
        example = Example(ids[:-1], ids[1:, None], {"weights": np.zeros((len(ids) - 1, 1), np.float32)})
        if version == self.trainer.step_count and not self.is_changed:
            return self._forward(example, self.model.policy)  # what trains is that version: nothing has to be loaded
        if version == 0:
            model = self.model
            if model.adapter is not None:
                with without_adapter(model.hf_model):
                    return self._forward(example, model.policy)
            self._base = self._base or PolicyModel(
                model.path, model.weights_dtype, model.device, 1.0, masters_on_host=None
            )
            return self._forward(example, self._base.policy)
        assert self._scores is not None, "the newest version is kept"
        with self._scores.turn():
            if version in self._scores.versions:
                self._scores.kept.load(version)
            else:
                self._load_named(version)
            return self._forward(example, self.model.policy)

    def _load_named(self, version: Version) -> None:
        if self._named[0] != version:
            store = CheckpointStore(self._saved / "versions", _ALL_KEPT, is_owner=False)  # one may be written meanwhile
            if Step(version) not in store.steps():
                raise ConfigError(
                    f"sampler: expected one with a name, one of the newest {self._versions_max} versions or the base, whose "
                    f"weights are kept, got version {version} of {self.trainer.step_count}"
                )
            self._named = version, store.load(Step(version), None).published
        rows = rows_by_name(self.model.hf_model)
        with torch.no_grad():
            for name, tensor in self._named[1].items():
                rows[name].copy_(tensor)

    def _forward(self, example: Example, policy: Policy) -> np.ndarray:
        logprobs, _ = self.trainer.forward_backward([example], _LOSS_OF_SCORES, is_trained=False, policy=policy)
        return logprobs[0][:, 0].numpy()


class DrivenTrainer:
    """The trainer of a learner that serves, as its client drives it: everything on the trainer's thread, in order. Publishes when
    the client asks."""

    def __init__(self, server: VersionServer) -> None:
        self._server, self._loop = server, server.loop
        self.team: DrivenTeam = server.loop.p.team  # type: ignore[assignment]
        self._publishing = asyncio.Lock()

    @property
    def terms(self) -> Terms:
        config, prompts = self._loop.options.config, self._loop.p.prompts
        return Terms(
            config.model.path, prompts.context_tokens, prompts.vocabulary_size, config.model.lora_rank,
            config.staleness.bound,
        )  # fmt: skip

    async def begin(self, saved: str, *, with_optimiser: bool) -> None:
        await self._loop.in_trainer(lambda: self.team.begin(saved, with_optimiser=with_optimiser))

    async def forward_backward(
        self, examples: Sequence[Example], loss: ClientLoss, *, is_trained: bool
    ) -> tuple[Sequence[np.ndarray], float]:
        def run() -> tuple[Sequence[np.ndarray], float]:
            logprobs, total = self.team.trainer.forward_backward(examples, loss, is_trained=is_trained)
            return [each.numpy() for each in logprobs], total

        return await self._loop.in_trainer(run)

    async def optim_step(self, step: AdamStep) -> Mapping[str, float]:
        return await self._loop.in_trainer(lambda: self.team.optim_step(step))

    async def forget_gradients(self) -> None:
        await self._loop.in_trainer(self.team.model.forget_gradients)

    async def save(self, saved: str, *, overwrites: bool) -> None:
        store, checkpoint = await self._loop.in_trainer(lambda: self.team.take_to_save(saved, overwrites=overwrites))
        await asyncio.to_thread(store.save, checkpoint)

    async def publish_trained(self, *, is_named: bool) -> int:
        """Sends the weights as they are to the fleet, unless it has them; returns their version."""
        async with self._publishing:
            if self.team.is_changed:
                weights = await self._loop.in_trainer(self.team.to_publish)
                version = Version(self.team.trainer.step_count + 1)
                await self._server.hand_in(HandedIn(version, weights))
                self.team.is_changed = False  # the client's next operation waits for this one
            if is_named and self._server.newest_version:
                store, checkpoint = await self._loop.in_trainer(
                    lambda: self.team.take_named(Version(self._server.newest_version))
                )
                await asyncio.to_thread(store.save, checkpoint)
            return self._server.newest_version

    async def prompt_logprobs(self, version: int, token_ids: Sequence[int]) -> np.ndarray:
        return await self._loop.in_trainer(lambda: self.team.scored(Version(version), token_ids))


def driven_server(loop: TrainingLoop, door: AgentSection) -> VersionServer:
    return VersionServer(loop, door, lambda server: TinkerApi(DrivenTrainer(server), server))


def prepare_driven(options: LearnerOptions, folder: RunFolder) -> Prepared:
    """As `prepare`, with the trainer in the state of the base model, and the versions that this run has published."""
    team = DrivenTeam(new_team(options, Ranks()).trainer, options)
    prepared = prepare_with(team, options, folder, PromptSource(load_tokenizer(team.model.path), NoPrompts()))
    team.scorer(0, prepared.schedule.newest).keep(prepared.schedule.newest, prepared.published)
    return prepared
