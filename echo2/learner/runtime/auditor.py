"""The audit at work: some groups of each batch are scored again under the versions that they name, beside the training.

Guarantees: training never waits for it: what does not fit the queue is left out and counted; a worker is accused once,
on the event loop; an audit that fails is told (`on_failure`). Waits for: batches (`consider`), in a thread of its own.
Leaves to others: the verdict (learner/suspicion), banning and dropping (`on_accused`).

Looked at are the tokens of a rollout's first version: a worker that keeps its KV cache across swaps is honest, and its
later tokens still belong to no version exactly. Rollouts of several turns are left out. Costs the host memory of
`versions_max` - 1 more snapshots and a float32 copy of the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo2.base.ids import PeerId, Version
from echo2.base.rollout import SamplingParams
from echo2.learner.audit import Piece, copies, examined, is_chosen, pieces_of
from echo2.learner.batcher import Batch, TrainGroup
from echo2.learner.episodes import NOBODY
from echo2.learner.runtime.snapshots import KeptSnapshots, SnapshotScorer
from echo2.learner.suspicion import Accusation, Suspicion, SuspicionConfig

QUEUE_GROUPS_MAX = 8
VERSIONS_KEPT = 3
WORKERS_MAX = 16_384
_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class AuditCounts:
    """Since the process began."""

    tokens: int = 0
    groups: int = 0
    skipped: int = 0  # chosen, but the queue was full
    accused: int = 0


class Auditor:
    """`share` of the groups are looked at. All methods belong to the event loop's thread."""

    def __init__(self, model_config: Any, share: float, sampling: SamplingParams, seed: int) -> None:
        self.counts = AuditCounts()
        self.accused: dict[PeerId, Accusation] = {}
        self.on_accused: Callable[[PeerId, Accusation], None] = lambda peer_id, accusation: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._model_config = model_config
        self._share, self._sampling, self._seed = share, sampling, seed
        self._is_raw = sampling.top_p < 1.0 or sampling.top_k > 0
        self._snapshots = KeptSnapshots(VERSIONS_KEPT)
        self._config = SuspicionConfig()
        self._suspicions: dict[PeerId, Suspicion] = {}
        self._excused: set[PeerId] = set()
        self._scorer: SnapshotScorer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._looking: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        return self._share > 0

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` of a version that was published; never changed in place."""
        if self.is_on:
            self._snapshots.keep(version, tensors)

    def consider(self, batch: Batch, now: float) -> None:
        """Takes what is to be audited of a batch that was drawn. Returns at once."""
        for group in batch.groups:
            if group.insertions and any(group.insertions):
                continue
            workers = {sent.peer_id for senders in group.senders for sent in senders} - {NOBODY} - self.accused.keys()
            seen = min((self._of(peer_id, now).tokens for peer_id in workers), default=0)
            if not workers or not is_chosen(self._seed, group.spec.group_id, self._share, seen):
                continue
            if len(self._looking) >= QUEUE_GROUPS_MAX:
                self.counts.skipped += 1
                continue
            task = asyncio.get_running_loop().create_task(self._look_at(group, now))
            self._looking.add(task)
            task.add_done_callback(self._looked)

    async def _look_at(self, group: TrainGroup, now: float) -> None:
        pieces = [
            piece
            for rollout, senders in zip(group.rollouts, group.senders, strict=True)
            for piece in pieces_of(
                rollout, [(sent.peer_id, sent.token_count) for sent in senders], first_span_only=True
            )
        ]
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, group, pieces)
        self.counts.groups += 1
        for evidence in found:
            self.counts.tokens += len(evidence.claimed)
            self._of(evidence.piece.worker, now).observe(evidence)
        for worker in {evidence.piece.worker for evidence in found}:
            own = [e for e in found if e.piece.worker == worker and _is_whole(e.piece)]
            likelihood = copies([e.piece.rollout for e in own], [e.exact.logprobs for e in own])
            self._of(worker, now).observe_copies(likelihood)
            self._judge(worker)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.on_failure(error)

    def _score(self, group: TrainGroup, pieces: list[Piece]) -> list[Any]:
        """In the audit's thread."""
        if self._scorer is None:
            self._scorer = self._make_scorer()
        self._scorer.prompts = {group.spec.group_id: group.spec.prompt_token_ids}
        return examined(pieces, self._snapshots.versions, self._scorer, self._is_raw)

    def _make_scorer(self) -> SnapshotScorer:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self._model_config, dtype=torch.float32)
        temperature = 1.0 if self._is_raw else self._sampling.temperature
        return SnapshotScorer(model, self._snapshots, temperature, self._sampling.stop_token_ids)

    def _of(self, peer_id: PeerId, now: float) -> Suspicion:
        if peer_id not in self._suspicions and len(self._suspicions) >= WORKERS_MAX:
            del self._suspicions[next(iter(self._suspicions))]
        suspicion = self._suspicions.setdefault(peer_id, Suspicion(self._config, now, peer_id in self._excused))
        suspicion.expire(now)
        return suspicion

    def _judge(self, worker: PeerId) -> None:
        suspicion = self._suspicions.get(worker)
        accusation = suspicion.accusation if suspicion is not None else None
        if accusation is not None and worker not in self.accused:
            self.accused[worker] = accusation
            self.counts.accused += 1
            _log.warning("audit of %s: %s", worker, accusation.text)
            self.on_accused(worker, accusation)

    def release(self, worker: PeerId) -> None:
        """The operator takes it back: it is watched from the start. A finding of noise alone is not made again."""
        accusation = self.accused.pop(worker, None)
        self._suspicions.pop(worker, None)
        if accusation is not None and not accusation.is_certain:
            self._excused.add(worker)

    def close(self) -> None:
        """What is still looked at is given up."""
        for task in list(self._looking):
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_whole(piece: Piece) -> bool:
    """Whether it is all of its rollout: only whole completions can be compared."""
    return piece.start == 0 and piece.stop == len(piece.rollout.token_ids)
