"""A user's own trainer instead of ours: the learner hands it batches and takes its weights.

On every rank the user's thread calls `begin`, `next_batch` and `hand_in` with that rank's tensors: DTensors of any placement, or
tensors that are whole on each rank; rank 0 gathers them. Guarantees: batches are handed out one at a time, in order, each once it
is on disk, on all ranks; after a restart the batches recorded since the last checkpoint are handed out again; weights are copied
in the user's thread, so the trainer may change its tensors as soon as `hand_in` returns; if either side ends or fails, the other
is woken. Waits for: the user's thread, in `step` and `take`; the learner, in `next_batch`, which ranks above 0 hear through rank 0.
All collectives of the engine's tensors run in the user's threads, so two threads never use one process group at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import Step, Version
from echo2.base.rollout import RoutingShape
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore
from echo2.learner.rollouts.groups import Batch
from echo2.learner.training.loading import (
    as_base_holds,
    check_finite,
    config_json_of,
    digest_of,
    read_config,
    read_ends,
    read_generation_config,
    size_of,
)
from echo2.learner.training.ranks import Ranks, whole
from echo2.learner.training.scoring import VersionScorer
from echo2.learner.training.shards import VersionCoder
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.learner.training.trainer import StepResult
from echo2.outside import monotonic
from echo2.weights import fingerprint
from echo2.weights.elements import published_tensors

_log = logging.getLogger("echo2.learner")

WAIT_TOLD_S = 60.0  # an 8B model with its optimiser, 100 GB, takes minutes to write: no alarm, but no silence either
# How such a table is made, told wherever another came.
_HOW = "a dict of them is echo2.published_tensors(model), where model is unwrapped and adapters are merged"


class TrainerLeft(StateError):
    """The user's trainer ended before the run's last step; the next start hands out the untrained batches again."""


class DeclaredModel:
    """Describes to workers a model whose weights the user's trainer holds. `path`: its Hugging Face folder or id. Loads the
    configuration and the table of tensors, but no weights. Raises `ConfigError` if there is no configuration."""

    routing: RoutingShape | None = None

    def __init__(self, path: str, weights_dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        self.device = torch.device("cpu")
        self.dtype = torch.bfloat16 if weights_dtype == "bfloat16" else torch.float32
        self.config = read_config(path)
        self.stop_token_ids = read_ends(path)
        self.size = size_of(self.config)
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(self.config)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in published_tensors(self.skeleton).items()}
        self.kept = self.shapes.keys() - dict(self.skeleton.named_parameters()).keys()  # as a router's correction bias
        self.vocabulary_size = int(self.skeleton.get_input_embeddings().weight.shape[0])
        self.context_tokens = self.size.context_tokens
        self.parameter_count = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        self.snapshot_bytes = self.parameter_count * self.dtype.itemsize
        self.flops_per_position = 6.0 * self.size.active_parameters  # if all parameters are trained

    def config_json(self) -> bytes:
        return config_json_of(self.config, self.size)

    def digest(self) -> str:
        return digest_of(self.config_json(), self.shapes.items(), str(self.dtype).removeprefix("torch."))

    def check_table(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `ConfigError` unless `tensors` have the model's names and shapes, and a float dtype."""
        missing, odd = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or odd:
            lacks = [f"{min(missing)} is missing"] if missing else []
            lacks += [f"got {min(map(str, odd))}, which it does not have"] if odd else []
            raise ConfigError(
                f"publish: expected the {len(self.shapes)} tensors of {self.path}, {', '.join(lacks)}; {_HOW}"
            )
        for name, shape in self.shapes.items():
            tensor = tensors[name]
            has_values = isinstance(tensor, Tensor) and not tensor.is_meta  # on meta: accelerate keeps them elsewhere
            has_values = has_values and tensor.layout == torch.strided
            if not has_values or tuple(tensor.shape) != shape or not tensor.is_floating_point():
                kinds = (getattr(tensor, "device", ""), type(tensor).__name__, getattr(tensor, "layout", ""))
                got = " ".join(["a", *(str(kind) for kind in kinds if kind)])
                if has_values:
                    got = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ConfigError(f"publish: expected {name} of shape {shape} and a float dtype, got {got}")

    def gathered(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
        """Copies the weights to host memory: parameters in the published dtype, buffers in their own; with several ranks a
        collective that gives rank 0 whole tensors, one after another, and the others nothing."""
        self.check_table(tensors)
        copies: dict[str, Tensor] = {}
        for name in sorted(self.shapes):
            tensor = whole(tensors[name].detach())
            if ranks.is_leader:
                dtype = tensor.dtype if name in self.kept else self.dtype
                try:
                    copies[name] = tensor.to(device="cpu", dtype=dtype, copy=True)
                except RuntimeError as error:  # FSDP1 has taken them back
                    raise ConfigError(
                        f"publish: expected {name} with values to copy, got: {error!s:.200}; {_HOW}"
                    ) from error
        check_finite(copies, "publish")
        return copies

    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None:
        """Writes `policy` in Hugging Face layout, in the base's dtype if that holds it."""
        from transformers import AutoModelForCausalLM

        policy, _ = as_base_holds(self.path, policy, self.dtype)
        model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        with torch.no_grad():
            for name, tensor in published_tensors(model).items():
                tensor.data = policy[name].clone()  # in its own dtype
        model.generation_config = read_generation_config(self.path) or model.generation_config
        model.save_pretrained(folder)


class OwnTrainer:
    """Hands batches and weights between two threads: the user's, which calls `begin`, `next_batch` and `hand_in`, and the
    learner's trainer thread. With several ranks, rank 0's."""

    starts_from_base = False  # at a start the user may give the weights of a later step

    def __init__(self, model: DeclaredModel, ranks: Ranks | None = None) -> None:
        self.model = model
        self.ranks = ranks or Ranks()
        self.coder = VersionCoder()
        self.step_count = 0
        self._asked: SimpleQueue[Batch | None] = SimpleQueue()  # of the user's thread; None: it is over
        # What was asked for is done, with a copy of the weights where one is needed; None: the trainer has left.
        self._answers: SimpleQueue[tuple[dict[str, Tensor] | None] | None] = SimpleQueue()
        self._is_published = self._is_next_kept = False
        self.is_kept = False  # the run takes a checkpoint of this step
        self._is_trained = True
        self._is_saved = threading.Event()  # the user's checkpoint of this step is written, if the user writes one
        self._is_saved.set()
        self._weights: dict[str, Tensor] | None = None
        self._failure: BaseException | None = None
        self._is_failure_told = False
        self._telling = threading.Lock()
        self._is_over_told = False

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the published weights; the rest is in the user's own checkpoint."""
        return self.model.snapshot_bytes

    # ---- the user's thread

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Sets the initial weights, which are those after `step` steps, before the learner starts."""
        self.step_count, self._weights = step, self.model.gathered(tensors, self.ranks)

    def next_batch(self) -> Batch | None:
        """Waits for the batch to train on; None once the run is over. Raises `StateError` if the previous batch was not handed in,
        or the learner's failure."""
        if not self._is_trained:
            raise StateError(f"publish: expected a call after step {self.step_count + 1}, before more rollouts")
        self.saved()
        batch = self._asked.get()
        if batch is None:
            self._asked.put(None)  # for whoever asks again
        self._raise_failure()
        if batch is not None and self.ranks.count > 1:
            self._tell({"is_published": self._is_published, "is_kept": self._is_next_kept}, batch_to_bytes(batch))
            self._raise_failure()  # it may have come before that, and then nobody has heard it
        self._is_trained = batch is None
        return batch

    def hand_in(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Reports that the batch was trained on and `step` steps are complete. Returns whether the weights were copied for
        publication. Raises `StateError` for any other step."""
        if self._is_trained or step != self.step_count + 1:
            self._raise_failure()
            what = "the batch after step {} to be taken first" if self._is_trained else "step {}"
            raise StateError(f"publish: expected {what.format(self.step_count + (not self._is_trained))}, got {step}")
        weights = self.model.gathered(tensors, self.ranks) if self._is_published else None
        self._raise_failure()  # now: the other ranks, who do not know of it yet, wait in that collective
        self._is_trained, self.step_count, self.is_kept = True, step, self._is_next_kept
        self._is_saved.clear()
        self._answers.put((weights,))
        return weights is not None

    def saved(self) -> None:
        """The user asks for the next batch, or leaves: what it keeps of this step is on disk."""
        self._is_saved.set()

    def end(self, failure: BaseException | None = None) -> None:
        self._failure = self._failure or failure
        self.saved()
        self._asked.put(None)
        self._answers.put(None)

    def untold_failure(self) -> BaseException | None:
        """Returns the failure that ended the run if it has not been raised yet; at most once."""
        failure = None if self._is_failure_told else self._failure
        self._is_failure_told = True
        return failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._is_failure_told = True
            raise self._failure

    def _tell(self, head: Mapping[str, Any], payload: bytes = b"") -> None:
        """Tells the other ranks; nothing more once it is over, as the learner's thread may tell them."""
        with self._telling:
            if not self._is_over_told:
                self._is_over_told = "is_over" in head
                self.ranks.tell(head, payload)

    # ---- the learner's trainer thread

    def step(self, batch: Batch, is_published: bool = False, is_kept: bool = False) -> StepResult:
        began, wanted = monotonic(), self.step_count + 1
        self._is_published, self._is_next_kept = is_published, is_kept
        self._asked.put(batch)
        answer = self._answers.get()
        if answer is None:
            self._answers.put(None)  # for whoever asks again
            raise TrainerLeft(f"step {wanted}: the trainer left before it was done")
        self._weights = answer[0]
        sampled = sum(len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts)
        prompts = sum(len(group.spec.prompt_token_ids) * len(group.rollouts) for group in batch.groups)
        phases = {"train": monotonic() - began}
        return StepResult(wanted, phases, None, None, None, False, prompts + sampled, sampled)

    def cross_entropy(self, batch: Batch) -> float:
        raise StateError("a trainer of one's own makes no supervised steps")

    def snapshot(self) -> dict[str, Tensor]:
        """The weights that were copied at `begin` or `hand_in`; the user may have changed its own since."""
        assert self._weights is not None, "asked for before the step"
        return self._weights

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]:
        return dict(snapshot)

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        """The user's own checkpoint of this step has masters and optimiser. It is written first: a kill between the two would
        leave a run that goes on from a step of which the user has nothing."""
        while not self._is_saved.wait(WAIT_TOLD_S):
            _log.info("the checkpoint of step %d waits for your trainer to ask for a batch or leave", self.step_count)
        return take_published(store, Step(self.step_count), published, version, state)

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        """Loads the newest checkpoint. Raises `ConfigError` unless the user began with that step's weights, bit for bit if they
        were published."""
        newest = store.newest()
        if self.step_count != (newest or 0):
            raise ConfigError(
                f"publish: expected the weights of step {newest or 0} (run.resume_step), from which this run goes on, got "
                f"step {self.step_count}"
            )
        if newest is None:
            return None
        checkpoint = store.load(newest, None)
        if int(checkpoint.published_version) == int(newest) and self._weights is not None:
            expected, actual = fingerprint(dict(checkpoint.published), 0), fingerprint(self._weights, 0)
            if expected != actual:
                raise ConfigError(
                    f"publish: expected the weights that were published as version {newest}, fingerprint {expected:016x}, "
                    f"got others, {actual:016x}"
                )
        return checkpoint

    def scorer(self, versions_max: int, newest: Version) -> VersionScorer:
        from transformers import AutoModelForCausalLM

        hf_model = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.float32)
        return VersionScorer(hf_model, versions_max)

    def stop(self) -> None:
        self._tell({"is_over": True})


def take_published(
    store: CheckpointStore, step: Step, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
) -> Checkpoint:
    """Begins a checkpoint of published weights and `state` alone, without masters and optimiser."""
    checkpoint = Checkpoint(step, {}, published, version, state)
    store.begin(checkpoint)
    return checkpoint


class OwnTrainerFollower:
    """The side of every rank above 0; the user's thread makes the same calls as on rank 0. `step_count`: completed steps."""

    def __init__(self, model: DeclaredModel, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.step_count = 0
        self.is_kept = self._is_next_kept = self._is_published = self._is_over = self._has_begun = False

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        self.step_count, self._has_begun = step, True
        self.model.gathered(tensors, self.ranks)

    def next_batch(self) -> Batch | None:
        """Returns the same batch as on rank 0, or None at the end."""
        if self._is_over:
            return None
        head, payload = self.ranks.hear()
        self._is_over = "is_over" in head
        if self._is_over:
            return None
        self._is_published, self._is_next_kept = head["is_published"], head["is_kept"]
        return batch_from_bytes(payload)

    def hand_in(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        if step != self.step_count + 1:
            raise StateError(f"publish: expected step {self.step_count + 1}, got {step}")
        self.step_count, self.is_kept = step, self._is_next_kept
        if self._is_published:
            self.model.gathered(tensors, self.ranks)
        return self._is_published

    def saved(self) -> None:
        """Rank 0 tells the run."""

    def end(self) -> None:
        """Waits until rank 0's learner has ended."""
        if self._has_begun and self.next_batch() is not None:
            raise StateError(f"rank {self.ranks.rank}: expected the trainer to take step {self.step_count}'s batch")
