"""A user's own trainer instead of ours: the learner hands it batches and takes its weights.

Guarantees: batches are handed out one at a time, in order, each once it is on disk; after a restart the batches recorded since
the last checkpoint are handed out again; weights are copied in the user's thread, so the trainer may change its tensors as soon
as `hand_in` returns; if either side ends or fails, the other is woken. Waits for: the user's thread, in `step`; the learner, in
`next_batch`. Leaves to others: the loss, the optimiser and their checkpoints (the user), everything else (daemon, loop).
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
    """The user's trainer ended before the run's last step; the next start hands out the untrained batches again."""


class DeclaredModel:
    """Describes to workers a model whose weights the user's trainer holds. `path`: its Hugging Face folder or id.

    Loads the configuration and the table of tensors, but no weights. Raises `ConfigError` if there is no configuration.
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
            generation_config = None  # then the model's config names the stop tokens
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
        """FLOPs of forward and backward pass, assuming that all parameters are trained."""
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
        """Raises `ConfigError` unless `tensors` have the model's names and shapes."""
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
        """Copies the weights to host memory in the published dtype."""
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
    """Hands batches and weights between two threads: the user's, which calls `begin`, `next_batch` and `hand_in`, and the
    learner's trainer thread."""

    starts_from_base = False  # at a start the user may give the weights of a later step

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
        self._is_waiting = False  # the user's thread is in `next_batch`, so `_live` does not change
        self._failure: BaseException | None = None
        self._is_failure_told = False
        self._is_over = False

    @property
    def trainer(self) -> LentTrainer:
        return self

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the published weights; the rest is in the user's own checkpoint."""
        return self.model.snapshot_bytes

    # ---- the user's thread

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies the user's tensors in published form. Call it only while they do not change."""
        return self.model.copy_of(tensors)

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Sets the initial weights, which are those after `step` steps."""
        weights = self.copied(tensors)
        with self._changed:
            self.step_count, self._weights, self._live = step, weights, tensors
            self._changed.notify_all()

    def next_batch(self) -> Batch | None:
        """Waits for the batch to train on; None once the run is over. Raises `StateError` if the previous batch was not handed in,
        or the learner's failure."""
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
        """Reports that the batch was trained on and `step` steps are complete. Returns whether the weights were copied for
        publication. Raises `StateError` for any other step."""
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
        """Marks the run as over or failed and wakes both sides."""
        with self._changed:
            self._failure = self._failure or failure
            self._is_over = True
            self._changed.notify_all()

    def untold_failure(self) -> BaseException | None:
        """Returns the failure that ended the run if it has not been raised yet; at most once."""
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
        """Takes a checkpoint of ledger and published weights; the user's own checkpoint of this step has masters and optimiser."""
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
        """Waits until this step's weights are copied, or can be copied because the user's thread waits; returns whether they are
        copied."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._weights is not None or self._is_waiting)
            return self._weights is not None

    def scorer(self, versions_max: int, newest: Version) -> VersionScorer:
        """A scorer with its own copy of the model, since the trained one is the user's."""
        return scorer_of(self.model.config, versions_max)

    def stop(self) -> None:
        pass
