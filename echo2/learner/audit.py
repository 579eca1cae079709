"""The audit: scores some rollouts of each batch again under the versions that they name, while training continues.

Guarantees: training waits for it at most `TRAINER_SHARE` of the time, a second or one rollout at a time; the rollouts to audit are
drawn after they have arrived, with randomness that no worker can know; a worker is accused once, on the event loop, and on numbers
that the learner computed itself; an audit that fails ends the run. Waits for: batches (`consider`), its threads.

A rollout is scored whole. Every token is scored under the version that its span names, with the KV cache that an honest engine
had there: it prefills again when it takes over a rollout, when a turn begins and, unless its worker says that it keeps the cache,
when the version changes. Costs host memory for each version's changes (training/scoring), and time on the training device.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from echo2.base.ids import PeerId, Version
from echo2.base.rng import rollout_seed, turn_seed, uniforms
from echo2.base.rollout import Rollout, SamplingParams
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import audit_versions
from echo2.learner.bets import Accusation, Bets, Column, Evidence, KindNoise, Piece, TokenScores, bounded_entry
from echo2.learner.rollouts.groups import NOBODY, TrainGroup
from echo2.outside import monotonic, unix_now
from echo2.outside.guard import Tasks

_log = logging.getLogger("echo2.learner")

# ---- what is scored


@dataclass(frozen=True, slots=True)
class Habits:
    """What a worker claims about its engine. `draws_by_seed`: each token is picked by the random number that the lease's seed
    gives for its position. `keeps_cache`: sequences keep their KV cache when the weights change. `kind`: engine and precision."""

    draws_by_seed: bool = False
    keeps_cache: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Passage:
    """A rollout as its engines read it. `token_ids`: all tokens, from prompt, environment and policy. `places`: int64, the
    indices of the sampled tokens in `token_ids`. `uniforms`: float64, the random number that the seed gives for each sampled
    token."""

    rollout: Rollout
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    places: npt.NDArray[np.int64]
    uniforms: Column
    pieces: tuple[Piece, ...]

    @property
    def claimed(self) -> Column:
        return np.asarray(self.sampling.trained_logprobs(self.rollout.logprobs, self.rollout.raw_logprobs))


class Scorer(Protocol):
    """Scores tokens under the published `versions` (ascending) that it keeps. `is_of_trainer`: it uses the model that trains, so
    call it only on the trainer's thread; else it needs its own thread. `keep`, of a snapshot that is never changed in place, may
    be called from a different thread. `turn`: all scoring takes place in it; versions kept at its start stay until its end.
    `score`, with `cached`: keep the KV cache of the one piece that is asked, which continues that of the call before with this
    many tokens (0: it begins one)."""

    @property
    def is_of_trainer(self) -> bool: ...
    @property
    def versions(self) -> list[Version]: ...
    def keep(self, version: Version, tensors: Mapping[str, Any]) -> None: ...
    def turn(self) -> AbstractContextManager[None]: ...
    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]: ...


def passage_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> Passage:
    """Builds the passage of rollout `member` of a training group. Takes milliseconds for a long rollout."""
    rollout = group.rollouts[member]
    insertions = group.insertions[member] if group.insertions else ()
    text, sampled_at = group.text_of(member)
    prompt = group.spec.prompt_token_ids
    seed, starts = (group.spec.sampling.seed, [0, *(item.position for item in insertions), len(rollout.token_ids)])
    seeds = [rollout_seed(seed, rollout.index)]
    seeds += [rollout_seed(turn_seed(seed, rollout.index, turn + 1), 0) for turn in range(len(insertions))]
    turns = zip(seeds, itertools.pairwise(starts), strict=True)
    return Passage(
        rollout, group.spec.sampling, (*prompt, *text), np.asarray(sampled_at, dtype=np.int64) + len(prompt),
        np.concatenate([uniforms(turns_seed, stop - start) for turns_seed, (start, stop) in turns]),
        pieces_of(group, member, habits_of),
    )  # fmt: skip


def pieces_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> tuple[Piece, ...]:
    """Cuts rollout `member` wherever its version, its worker or its turn changes."""
    versions = [(span.count, span.version) for span in group.rollouts[member].version_spans]
    peers = [(sent.token_count, sent.peer_id) for sent in group.senders[member]]
    version_ends, peer_ends = (list(itertools.accumulate(count for count, _ in runs)) for runs in (versions, peers))
    turns = [insertion.position for insertion in (group.insertions[member] if group.insertions else ())]
    end = min(version_ends[-1], peer_ends[-1]) if versions and peers else 0
    cuts = sorted(cut for cut in {*version_ends, *peer_ends, *turns} if 0 < cut < end)
    pieces: list[Piece] = []
    for start, stop in itertools.pairwise([0, *cuts, end] if end else [0]):
        (_, version), (_, peer) = versions[bisect_right(version_ends, start)], peers[bisect_right(peer_ends, start)]
        goes_on = start > 0 and start not in turns and pieces[-1].worker == peer
        keeps = goes_on and habits_of(peer).keeps_cache
        pieces.append(Piece(peer, version, start, stop, keeps, habits_of(peer).draws_by_seed))
    return tuple(pieces)


def examine(passages: Sequence[Passage], scorer: Scorer) -> list[list[Evidence]]:
    """Scores the passages within a turn of `scorer`; returns, for each, the evidence of the pieces whose version it keeps.
    Pieces that continue no cache are scored version by version, so each version is loaded once. A chain of pieces that share a
    cache is scored only if all its versions are kept."""
    versions = scorer.versions
    evidence: list[list[Evidence]] = [[] for _ in passages]
    alone: list[tuple[int, Piece]] = []

    def add(number: int, piece: Piece, exact: TokenScores) -> None:
        span, passage = slice(piece.start, piece.stop), passages[number]
        evidence[number].append(Evidence(piece, passage.claimed[span], exact, passage.uniforms[span]))

    for number, passage in enumerate(passages):
        for chain in _chains(passage.pieces):
            if len(chain) == 1:
                alone += [(number, piece) for piece in chain if piece.version in versions]
            elif all(piece.version in versions for piece in chain):
                cached = 0
                for piece in chain:
                    (exact,) = scorer.score(piece.version, [(passage, piece)], cached)
                    add(number, piece, exact)
                    cached = int(passage.places[piece.stop - 1])
    for version in versions:
        asked = [(number, piece) for number, piece in alone if piece.version == version]
        scored = scorer.score(version, [(passages[number], piece) for number, piece in asked]) if asked else []
        for (number, piece), exact in zip(asked, scored, strict=True):
            add(number, piece, exact)
    return evidence


def _chains(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Splits pieces into chains: a piece, then the pieces that continue its KV cache."""
    chain: list[Piece] = []
    for piece in pieces:
        if chain and not piece.keeps_cache:
            yield chain
            chain = []
        chain.append(piece)
    if chain:
        yield chain


# ---- which rollouts

NEWCOMER_TOKENS = 2048  # all rollouts of a worker are audited until this many of its tokens were drawn
OWN_NOISE_FACTOR = 3.0  # a worker that says it cannot draw by its seeds is audited this many times as often
WAITING_MAX = 256  # passages that wait to be scored; `AuditDraw.add` says which are given up beyond it
WAITING_TOKENS_MAX = 1 << 20  # bounds their memory: 128 rollouts of 8,192 tokens
SEEN_MIN = 64  # a worker's unaudited share is reported once it has this many rollouts


@dataclass(slots=True)
class _Account:
    """One worker's rollouts: `rollouts`, complete ones; `audited`; `tokens` drawn for audit."""

    rollouts: int = 0
    audited: int = 0
    tokens: int = 0

    @property
    def share(self) -> float:
        """Audited share of the rollouts; smoothed, so that among workers without audits the one with most rollouts is first."""
        return (self.audited + 1.0) / (self.rollouts + 1.0)


@dataclass(slots=True)
class AuditDraw:
    """Chooses which rollouts to audit, after they were reported. All of a worker's rollouts are drawn with the same probability.
    The queue is bounded; if it is full, the worker with the largest audited share gives up one of its rollouts, and the one next
    audited is of the worker with the smallest: which of its rollouts is chance, so no worker gains by when it sends what.

    `share`: the share of rollouts to audit, for a worker that draws by its seeds. `rng`: must be unpredictable to workers.
    `given_up`: rollouts drawn but not audited, because the queue was full or their versions are not kept any longer."""

    share: float
    rng: random.Random
    given_up: int = 0
    waiting: list[tuple[PeerId, Passage]] = field(default_factory=list)
    _accounts: dict[PeerId, _Account] = field(default_factory=dict)

    def falls_on(self, worker: PeerId, *, draws_by_seed: bool) -> bool:
        """Counts a complete rollout; returns whether to audit it. If so, the caller `add`s it."""
        account = self._account(worker)
        account.rollouts += 1
        chance = self.share * (1.0 if draws_by_seed else OWN_NOISE_FACTOR)
        return account.tokens < NEWCOMER_TOKENS or self.rng.random() < chance

    def add(self, worker: PeerId, passage: Passage) -> None:
        """Queues a rollout for which `falls_on` returned True, at a random place; drops others while the queue is too long."""
        self._account(worker).tokens += len(passage.places)
        self.waiting.insert(self.rng.randrange(len(self.waiting) + 1), (worker, passage))
        while len(self.waiting) > WAITING_MAX or self.waiting_tokens > WAITING_TOKENS_MAX:
            self.waiting.remove(max(self.waiting, key=lambda drawn: self._account(drawn[0]).share))
            self.given_up += 1

    def take(self, tokens_max: int) -> list[tuple[PeerId, Passage]]:
        """Takes rollouts from the queue: least audited worker first, up to `tokens_max` tokens, at least one rollout."""
        chosen: list[tuple[PeerId, Passage]] = []
        for drawn in sorted(self.waiting, key=lambda drawn: self._account(drawn[0]).share):
            tokens_max -= len(drawn[1].token_ids)
            if chosen and tokens_max < 0:
                break
            chosen.append(drawn)
        self.waiting = [drawn for drawn in self.waiting if not any(drawn is other for other in chosen)]
        return chosen

    def on_audit(self, worker: PeerId, tokens: int) -> None:
        """Counts a rollout as audited if `tokens` of it were scored; with 0 (its versions are not kept), as given up."""
        self._account(worker).audited += tokens > 0
        self.given_up += tokens == 0

    def forget(self, worker: PeerId) -> None:
        """Makes the worker a newcomer, and drops its queued rollouts."""
        self._accounts.pop(worker, None)
        self.waiting = [drawn for drawn in self.waiting if drawn[0] != worker]

    @property
    def waiting_tokens(self) -> int:
        return sum(len(passage.token_ids) for _, passage in self.waiting)

    @property
    def unaudited(self) -> dict[PeerId, float]:
        """Share of each worker's rollouts that was not audited, for workers with at least `SEEN_MIN` rollouts."""
        known = {worker: account for worker, account in self._accounts.items() if account.rollouts >= SEEN_MIN}
        return {worker: 1.0 - account.audited / account.rollouts for worker, account in known.items()}

    def _account(self, worker: PeerId) -> _Account:
        return bounded_entry(self._accounts, worker, _Account)


# ---- the auditor

TURN_TOKENS = 16_384  # tokens scored in one turn of the thread, prompts included; at least one rollout
TRAINER_TURN_S = 1.0
"""Longest turn on the trainer's thread, estimated from the speed of earlier turns; at least one rollout."""
TRAINER_SHARE = 0.1
"""Share of the trainer's thread while there is something to train on. Scoring all that is drawn by default takes half as much: a
forward pass over 12 % of the tokens, while a step takes one and a backward pass of twice its work."""
IDLE_LOOK_S = 0.05  # short beside a step


@dataclass(slots=True)
class AuditCounts:
    """Counts since the process began. `tokens`: scored; `read_tokens`: prompts included; `s`: seconds of scoring."""

    steps: int = 0
    tokens: int = 0
    read_tokens: int = 0
    rollouts: int = 0
    accused: int = 0
    s: float = 0.0


class Workers(Protocol):
    """What is known of the workers, and who is told of a verdict. `habits_of`: what a worker reports about its engine."""

    def habits_of(self, peer_id: PeerId, /) -> Habits: ...
    def accuse(self, peer_id: PeerId, reason: str, /, *, is_certain: bool) -> None: ...


class Auditor:
    """Audits `learner.audit_share` of the rollouts by the scorer given to `begin`, which keeps `versions_max` versions; none if an
    adapter is published. Call all methods on the event loop's thread; times are unix seconds."""

    def __init__(
        self, config: RunConfig, rng: random.Random, workers: Workers, fail: Callable[[BaseException], None]
    ) -> None:
        self.counts = AuditCounts()
        self.draw = AuditDraw(0.0 if config.model.lora_rank else config.learner.audit_share, rng)
        self.accused: dict[PeerId, Accusation] = {}
        self.versions_max = audit_versions(config.staleness.bound)
        self._workers = workers
        self._is_trainer_idle: Callable[[], bool] = lambda: False
        self._trainer_thread: Executor | None = None
        self._bets: dict[PeerId, Bets] = {}
        self._noise = KindNoise()
        self._excused: set[PeerId] = set()
        self._scorer: Scorer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._tasks = Tasks(fail)
        self._is_scoring = False

    @property
    def is_on(self) -> bool:
        return self.draw.share > 0

    def numbers(self) -> Mapping[str, float]:
        return {
            "audit/tokens": self.counts.tokens,
            "audit/rollouts": self.counts.rollouts,
            "audit/s": self.counts.s,
            "audit/waiting_rollouts": len(self.draw.waiting),
            "audit/given_up_rollouts": self.draw.given_up,
            "audit/unaudited_share_max": max(self.draw.unaudited.values(), default=0.0),
            "audit/accused_workers": self.counts.accused,
        }

    def begin(self, scorer: Scorer, trainer_thread: Executor, is_trainer_idle: Callable[[], bool]) -> None:
        """Starts scoring. `trainer_thread`: runs a scorer that uses the trainer's model. `is_trainer_idle`: whether there is
        nothing to train on."""
        self._scorer, self._trainer_thread, self._is_trainer_idle = scorer, trainer_thread, is_trainer_idle

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a published version for scoring; its `tensors` must never change in place. Returns at once."""
        if self._scorer is not None:
            self._tasks.start(self._keep(self._scorer, version, tensors))

    async def _keep(self, scorer: Scorer, version: Version, tensors: Mapping[str, Tensor]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, scorer.keep, version, tensors)

    def consider(self, groups: Sequence[TrainGroup]) -> None:
        """Draws rollouts to audit from groups that were trained on or used in an evaluation. Returns at once."""
        if not self.is_on:
            return
        for group in groups:
            for member, senders in enumerate(group.senders):
                workers = [sent.peer_id for sent in senders if sent.peer_id != NOBODY]
                if not workers or self.accused.keys() & set(workers):
                    continue
                by_seed = all(self._workers.habits_of(worker).draws_by_seed for worker in workers)
                if self.draw.falls_on(workers[-1], draws_by_seed=by_seed):  # first: building a passage is expensive
                    self.draw.add(workers[-1], passage_of(group, member, self._workers.habits_of))
        if self._scorer is not None and not self._is_scoring:
            self._is_scoring = True
            self._tasks.start(self._score_waiting(self._scorer))

    async def _score_waiting(self, scorer: Scorer) -> None:
        """Scores until nothing that was drawn is left."""
        assert self._trainer_thread is not None, "begin comes first"
        thread = self._trainer_thread if scorer.is_of_trainer else self._thread
        try:
            while drawn := self.draw.take(self._turn_tokens(scorer)):
                passages = [passage for _, passage in drawn]
                scored, took_s = await asyncio.get_running_loop().run_in_executor(thread, _score, scorer, passages)
                self.counts.s += took_s
                self.counts.read_tokens += sum(len(passage.token_ids) for passage in passages)
                for (worker, _), evidence in zip(drawn, scored, strict=True):
                    self._weigh(worker, evidence, unix_now())
                if scorer.is_of_trainer:
                    await self._leave_to_training(took_s)
        finally:
            self._is_scoring = False

    def _turn_tokens(self, scorer: Scorer) -> int:
        if not scorer.is_of_trainer:
            return TURN_TOKENS
        return min(TURN_TOKENS, round(TRAINER_TURN_S * self.counts.read_tokens / max(1e-6, self.counts.s)))

    async def _leave_to_training(self, took_s: float) -> None:
        """Leaves the trainer's thread to training until a turn of `took_s` is no more than its share of the time, or there is
        nothing to train on."""
        until = monotonic() + took_s * (1.0 / TRAINER_SHARE - 1.0)
        while not self._is_trainer_idle() and monotonic() < until:
            await asyncio.sleep(min(IDLE_LOOK_S, max(0.0, until - monotonic())))

    def _weigh(self, last: PeerId, pieces: Sequence[Evidence], now: float) -> None:
        """Judges the workers of a rollout, which `last` ended."""
        tokens = sum(len(evidence.claimed) for evidence in pieces)
        self.draw.on_audit(last, tokens)
        self.counts.rollouts += tokens > 0
        self.counts.tokens += tokens
        for evidence in pieces:
            worker = evidence.piece.worker
            kind = self._workers.habits_of(worker).kind
            self._of(worker, now).observe(evidence, kind, self._noise)
            self._noise.observe(worker, kind, evidence.claimed - evidence.exact.logprobs)
        for worker in {evidence.piece.worker for evidence in pieces}:
            accusation = self._of(worker, now).accusation
            if accusation is not None and worker not in self.accused:
                self.accused[worker] = accusation
                self.counts.accused += 1
                _log.warning("audit of %s: %s", worker, accusation.text)
                self._workers.accuse(worker, f"audit: {accusation.text}", is_certain=accusation.is_certain)

    # ---- verdicts

    def _of(self, worker: PeerId, now: float) -> Bets:
        bets = bounded_entry(self._bets, worker, lambda: Bets(now, worker in self._excused))
        self._bets[worker] = bets.of_day(now)
        return self._bets[worker]

    def release(self, worker: PeerId) -> None:
        """Takes a worker back on the operator's order and watches it afresh; an accusation of noise alone is not repeated."""
        accusation = self.accused.pop(worker, None)
        self._bets.pop(worker, None)
        self._noise.forget(worker)
        self.draw.forget(worker)
        if accusation is not None and not accusation.is_certain:
            self._excused.add(worker)

    async def close(self) -> None:
        await self._tasks.end()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _score(scorer: Scorer, passages: Sequence[Passage]) -> tuple[list[list[Evidence]], float]:
    """Returns the evidence of each rollout, and the seconds that took."""
    begun = monotonic()
    with scorer.turn():
        return examine(passages, scorer), monotonic() - begun
