"""A trainer of the user's own in the place of ours: the learner hands it batches and takes its weights.

Guarantees: a batch is handed out once it is on the disk, one at a time, in order; after a restart the recorded batches
since the last checkpoint are handed out again; weights are copied in the user's thread while the user waits, so the
trainer may change its tensors as soon as `hand_in` returns; whoever waits on either side is woken when the other ends or
fails. Waits for: the user's thread, in `step`; the learner, in `next_batch`. Leaves to others: the loss and the
optimiser, and their checkpoints (the user), everything else (daemon, loop).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import Step, Version
from echo2.learner.batch import Batch
from echo2.learner.runtime.checkpoint import Checkpoint, CheckpointStore, state_of
from echo2.learner.runtime.coding import LocalCoder, VersionCoder
from echo2.learner.runtime.model_facts import config_json_of, digest_of, stop_tokens_of
from echo2.learner.runtime.snapshots import VersionScorer, scorer_of
from echo2.learner.runtime.trainer import StepResult
from echo2.outside import monotonic
from echo2.weights import fingerprint


class TrainerLeft(StateError):
    """The user's trainer ended before the run's last step; what it had not trained on comes again at the next start."""


class DeclaredModel:
    """What workers need to know of a model whose weights the user's trainer holds. `path`: its Hugging Face folder or id.

    Loads configuration and the table of tensors, no weights.
    """

    def __init__(self, path: str, weights_dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        self.path = path
        self.device = torch.device("cpu")
        self.dtype = torch.bfloat16 if weights_dtype == "bfloat16" else torch.float32
        try:
            self.config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {path}: expected its configuration: {error}") from None
        try:
            generation_config = GenerationConfig.from_pretrained(path)
        except OSError:
            generation_config = None  # it has none: the model's config says what ends a completion
        self.stop_token_ids = stop_tokens_of(generation_config, self.config)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(self.config)
        self.shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
        self.vocabulary_size = int(skeleton.get_input_embeddings().weight.shape[0])

    @property
    def parameter_count(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def snapshot_bytes(self) -> int:
        return self.parameter_count * self.dtype.itemsize

    @property
    def context_tokens(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 1 << 20))

    @property
    def flops_per_position(self) -> float:
        """As if all of it were trained."""
        return 6.0 * self.parameter_count

    def check_length(self, tokens: int) -> None:
        limit = self.context_tokens
        if tokens > limit:
            raise ConfigError(
                f"model {self.path}: expected prompt and completion within its context of {limit} tokens, got up to {tokens}"
            )

    def config_json(self) -> bytes:
        return config_json_of(self.config)

    def digest(self) -> str:
        return digest_of(self.config_json(), self.shapes.items(), str(self.dtype).removeprefix("torch."))

    def check_table(self, tensors: Mapping[str, Tensor]) -> None:
        """ConfigError unless they have the model's own names and shapes."""
        missing, odd = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or odd:
            raise ConfigError(
                f"publish: expected the {len(self.shapes)} tensors of {self.path}, "
                + (f"{sorted(missing)[0]} is missing" if missing else f"got {sorted(odd)[0]}, which it does not have")
            )
        for name, shape in self.shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ConfigError(f"publish: expected {name} of shape {shape}, got {tuple(tensors[name].shape)}")

    def copy_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights as they are published: host copies in the published dtype."""
        self.check_table(tensors)
        return {name: tensors[name].detach().to(device="cpu", dtype=self.dtype, copy=True) for name in self.shapes}

    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None:
        """Writes `policy` in Hugging Face layout."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(policy[name])
        model.save_pretrained(folder)


class LentTrainer:
    """The two sides of the hand-over. The user's thread calls `begin`, `next_batch` and `hand_in`."""

    starts_from_base = False  # a start may be given the weights of a later step

    def __init__(self, model: DeclaredModel) -> None:
        self.model = model
        self.coder: VersionCoder = LocalCoder()
        self.step_count = 0
        self._changed = threading.Condition()
        self._batch: Batch | None = None
        self._is_published = False
        self._is_trained = True
        self._weights: dict[str, Tensor] | None = None
        self._live: Mapping[str, Tensor] = {}
        self._is_waiting = False  # the user's thread: nobody changes `_live`
        self._failure: BaseException | None = None
        self._is_failure_told = False
        self._is_over = False

    @property
    def trainer(self) -> LentTrainer:
        return self

    @property
    def checkpoint_bytes(self) -> int:
        """The published weights; the rest is in the user's own checkpoint."""
        return self.model.snapshot_bytes

    # ---- the user's thread

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is published of the user's tensors, while nobody changes them."""
        return self.model.copy_of(tensors)

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """The weights to start with, those of step `step`."""
        weights = self.copied(tensors)
        with self._changed:
            self.step_count, self._weights, self._live = step, weights, tensors
            self._changed.notify_all()

    def next_batch(self) -> Batch | None:
        """The batch to train on; None once the run's last step is done."""
        with self._changed:
            if not self._is_trained:
                raise StateError(
                    f"publish: expected it to be called after step {self.step_count + 1}, before more rollouts"
                )
            self._is_waiting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._failure is not None or self._batch is not None)
            self._is_waiting = False
            self._raise_failure()
            batch, self._batch = self._batch, None
            self._is_trained = batch is None
            return batch

    def hand_in(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Says that the batch was trained on; `step` steps are complete. Returns whether the weights were taken."""
        with self._changed:
            self._raise_failure()
            if self._is_trained or step != self.step_count + 1:
                raise StateError(
                    f"publish: expected step {self.step_count + (0 if self._is_trained else 1)}, got {step}"
                )
            is_published = self._is_published
        weights = self.copied(tensors) if is_published else None
        with self._changed:
            self._weights, self._live, self._is_trained, self.step_count = weights, tensors, True, step
            self._changed.notify_all()
        return is_published

    def end(self, failure: BaseException | None = None) -> None:
        """Wakes both sides: the run is over, or has failed."""
        with self._changed:
            self._failure = self._failure or failure
            self._is_over = True
            self._changed.notify_all()

    def untold_failure(self) -> BaseException | None:
        """What ended the run and was raised nowhere yet; given once."""
        with self._changed:
            failure = None if self._is_failure_told else self._failure
            self._is_failure_told = True
            return failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._is_failure_told = True
            raise self._failure

    # ---- the learner's trainer thread

    def step(self, batch: Batch, is_published: bool = False) -> StepResult:
        began = monotonic()
        with self._changed:
            self._batch, self._is_published = batch, is_published
            wanted = self.step_count + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self.step_count == wanted)
            if self.step_count != wanted:
                raise TrainerLeft(f"step {wanted}: the trainer left before it was done")
        sampled = sum(len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts)
        prompts = sum(len(group.spec.prompt_token_ids) * len(group.rollouts) for group in batch.groups)
        phases = {"train": monotonic() - began}
        return StepResult(wanted, phases, None, None, None, False, prompts + sampled, sampled)

    def snapshot(self) -> dict[str, Tensor]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._weights is not None or self._is_waiting)
            if self._weights is None and not self._is_waiting:
                raise TrainerLeft("the trainer left before it gave its weights")
            if self._weights is None:
                self._weights = self.copied(self._live)
            return self._weights

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]:
        return dict(snapshot)

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        """Ledger and published weights; masters and optimiser are in the user's own checkpoint of this step."""
        step = Step(self.step_count)
        checkpoint = Checkpoint(step, {}, published, version, state_of(state, step, version))
        store.begin(checkpoint)
        return checkpoint

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        newest = Step(store.steps()[-1] if store.steps() else 0)
        self.check_step(newest)
        if not store.steps():
            return None
        checkpoint = store.load(newest, None)
        if int(checkpoint.published_version) == int(newest) and self._weights is not None:
            kept, given = fingerprint(dict(checkpoint.published), 0), fingerprint(self._weights, 0)
            if kept != given:
                raise ConfigError(
                    f"publish: expected the weights that were published as version {newest}, fingerprint {kept:016x}, "
                    f"got others, {given:016x}"
                )
        return checkpoint

    def check_step(self, newest: Step) -> None:
        if self.step_count != newest:
            raise ConfigError(
                f"publish: expected the weights of step {newest}, from which this run goes on, got step {self.step_count}"
            )

    def has_copy(self) -> bool:
        """Waits until the weights of this step were copied, or the user's thread waits and they can be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._weights is not None or self._is_waiting)
            return self._weights is not None

    def scorer(self, versions_max: int, newest: Version) -> VersionScorer:
        """By a copy of the model: the one that trains is the user's."""
        return scorer_of(self.model.config, versions_max)

    def stop(self) -> None:
        pass
