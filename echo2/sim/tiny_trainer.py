"""The trainer of the virtual world, behind the learner's trainer interface: real weights under the real codec, real
checkpoints, a made-up optimiser; and the prompts, tokenizer and task world that go with it.

Guarantees: the weights after a step are a function of the weights before it and of the batch alone; a step takes `train_s`
of virtual time on the trainer's thread. Leaves to others: when to step (learner/loop).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from echo2.base.ids import Step, Version
from echo2.base.rng import derived_rng
from echo2.learner.audit import Scorer
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore, state_of
from echo2.learner.publishing.publisher import LocalCoder, VersionCoder
from echo2.learner.rollouts.groups import Batch
from echo2.learner.rollouts.prompts import PromptSource, TurnAnswer
from echo2.learner.training.loading import digest_of
from echo2.learner.training.trainer import StepResult
from echo2.sim.tiny_model import (
    SHAPES,
    STOP_TOKEN,
    VOCABULARY,
    TinyScorer,
    base_weights,
    copied,
    fingerprint_of,
    reward_of,
    trained,
)
from echo2.sim.virtual_loop import VirtualLoop
from echo2.tasks.rewards import RewardFailure, Scored
from echo2.tasks.task import Reward, TaskInstance

SNAPSHOT_BYTES = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())  # bf16
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": VOCABULARY,
    "intermediate_size": 8, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
MASTERS = "masters|"  # before a name, in a checkpoint's file


class TinyModel:
    path, context_tokens, flops_per_position = "tiny", 512, 1.0
    device = torch.device("cpu")
    parameter_count = SNAPSHOT_BYTES // 2
    vocabulary_size, snapshot_bytes = VOCABULARY, SNAPSHOT_BYTES
    stop_token_ids = (STOP_TOKEN,)
    config: Any = None

    def config_json(self) -> bytes:
        return json.dumps(CONFIG, sort_keys=True).encode()

    def digest(self) -> str:
        return digest_of(self.config_json(), SHAPES.items(), "bfloat16")

    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fingerprint").write_text(f"{fingerprint_of(dict(policy)):x}")


class TinyTrainer:
    """A `TrainingSide`. Calls `told` with each batch and the fingerprint of the resulting weights."""

    starts_from_base = True

    def __init__(self, seed: int, train_s: Callable[[], float], told: Callable[[Batch, int], None]) -> None:
        self.model, self.coder = TinyModel(), cast(VersionCoder, LocalCoder())
        self.step_count = 0
        self._weights = base_weights(seed)
        self._train_s, self._told = train_s, told

    @property
    def trainer(self) -> TinyTrainer:
        return self

    @property
    def checkpoint_bytes(self) -> int:
        return 2 * SNAPSHOT_BYTES

    def step(self, batch: Batch, is_published: bool = False) -> StepResult:
        self._weights = trained(self._weights, batch)
        self.step_count += 1
        self._told(batch, fingerprint_of(self._weights))
        _spend(self._train_s())
        sampled = sum(len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts)
        return StepResult(self.step_count, {"train": self._train_s()}, None, 0.0, 0.0, False, sampled, sampled)

    def cross_entropy(self, batch: Batch) -> float:
        return 0.0

    def snapshot(self) -> dict[str, Tensor]:
        return copied(self._weights)

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]:
        return dict(snapshot)

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        step = Step(self.step_count)
        shards = {f"{MASTERS}{name}": tensor.clone() for name, tensor in self._weights.items()}
        checkpoint = Checkpoint(step, shards, published, version, state_of(state, step, version))
        store.begin(checkpoint)
        return checkpoint

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        checkpoint = store.load_newest()
        if checkpoint is None:
            return None
        self._weights, self.step_count = copied(checkpoint.masters), int(checkpoint.step)
        return checkpoint

    def scorer(self, versions_max: int, newest: Version) -> Scorer:
        return TinyScorer(versions_max)

    def stop(self) -> None:
        pass


def _spend(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "the trainer's thread is the virtual loop's"
    loop.spend(seconds)


class TinyTokenizer:
    """A tokenizer that decodes tokens to their numbers, separated by spaces."""

    chat_template = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + byte % (VOCABULARY - 3) for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(str(token) for token in token_ids)

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer").write_text("numbers")


class TinyWorld:
    """A `World`: each prompt wants up to `turns` completions. The last one is scored; scoring fails at rate `reward_fails`."""

    name, size, reward_processes = "tiny", None, 0

    def __init__(self, seed: int, turns: int, reward_fails: float) -> None:
        self._seed, self._turns, self._fails = seed, turns, reward_fails

    def instance(self, index: int) -> TaskInstance:
        return TaskInstance(index, f"p{index}", "")

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        rng = derived_rng(self._seed, "answer", index, len(turns), sum(turns[-1]))
        await asyncio.sleep(0.01 + 0.2 * rng.random())
        if len(turns) < 1 + index % self._turns and room_tokens > 8:
            return TurnAnswer(None, tuple(3 + rng.randrange(VOCABULARY - 3) for _ in range(4)))
        if rng.random() < self._fails:
            return TurnAnswer(Scored(None, RewardFailure.RAISED, "made up", 0.0))
        return TurnAnswer(Scored(Reward(reward_of(tuple(turns[-1]))), None, "", 0.0))

    def close(self) -> None:
        pass


def tiny_source(seed: int, turns: int, reward_fails: float) -> PromptSource:
    return PromptSource(TinyTokenizer(), TinyWorld(seed, turns, reward_fails))
