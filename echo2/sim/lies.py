"""Lies about rollouts and offers, by workers of the virtual world that would profit from them.

Guarantees: the worker runs the real daemon; a lie is in the tokens that its engine samples, in the scores or log-probabilities it
reports, or in single messages of its machine. Leaves to others: lies about chunks and progress (malice), detection (the daemons),
what must hold (checkers).
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from echo2.base.ids import GroupId, Version
from echo2.base.rng import derived_seed
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores
from echo2.sim.malice import REPORT, SESSION
from echo2.sim.tiny_model import STOP_TOKEN, VOCABULARY, reward_of
from echo2.sim.tiny_picks import Picks, SeededPicks, group_of, honest_scores, seeded
from echo2.sim.tiny_policy import logprobs_of
from echo2.sim.world_parts import VirtualEngines
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.worker.engine import GenerateRequest
from echo2.worker.runtime.make_engine import Engines

TRIES = 4
HIGH_USD = 1e6
MEMORISED_TOKENS = 12


class Lie(enum.Enum):
    FORGED_NUMBERS = "log-probabilities that it makes up"
    OLDER_TOKENS = "tokens of an older version, with the numbers of the one named"
    BEST_OF = "the best of four completions, by reward"
    OWN_BEST_OF = "the best of four completions, and says that it cannot draw by seeds"
    MEMORISED = "one memorised answer a group, with honest numbers"
    EARLY_LENGTH = "ends for its length after one token"
    HARD_BACK = "hands back every other prompt"
    FALSE_SCORES = "scores of others' rollouts that it makes up"
    SHIELD = "forged log-probabilities, and scores that bear out its mates'"
    LOW_PRICE = "offers itself for nothing"
    HIGH_PRICE = "asks for a million USD an hour"


class ForgedNumbers:
    """Honest tokens, with log-probabilities that make them look less likely than they were."""

    draws_by_seed = True

    def __init__(self, rng: random.Random, mean_nats: float = 0.5) -> None:
        self._rng, self._mean_nats = rng, mean_nats

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        token, logprob = SeededPicks().pick(bits, request, position)
        return token, float(np.float32(logprob - self._rng.expovariate(1.0 / self._mean_nats)))


class OlderTokens:
    """Samples from the first weights it had, and recomputes the log-probabilities under the weights it should use."""

    draws_by_seed = True

    def __init__(self) -> None:
        self._first: int | None = None

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        self._first = bits if self._first is None else self._first
        token, _ = seeded(self._first, group_of(request), request.sampling.seed, position)
        return token, float(logprobs_of(bits, group_of(request), position)[token])


class BestOf:
    """Completes a prompt with four seeds, the lease's first, and submits the completion with the highest reward."""

    def __init__(self, draws_by_seed: bool) -> None:
        self.draws_by_seed = draws_by_seed
        self._chosen: dict[tuple[GroupId, int], int] = {}

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        group_id, seed = group_of(request), request.sampling.seed
        if (group_id, seed) not in self._chosen:
            seeds = [seed, *(derived_seed(seed, "mine", number) for number in range(1, TRIES))]
            self._chosen[group_id, seed] = max(seeds, key=lambda one: self._value(bits, request, one))
        return seeded(bits, group_id, self._chosen[group_id, seed], position)

    @staticmethod
    def _value(bits: int, request: GenerateRequest, seed: int) -> float:
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_new_tokens and STOP_TOKEN not in tokens:
            tokens.append(seeded(bits, group_of(request), seed, len(tokens))[0])
        return reward_of(tuple(tokens))


class Memorised:
    """Submits a memorised answer as the first completion of each group; the others are honest."""

    draws_by_seed = True

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        if not request.request_id.endswith("/0"):
            return SeededPicks().pick(bits, request, position)
        token = STOP_TOKEN if position + 1 >= MEMORISED_TOKENS else VOCABULARY - 1 - position
        return token, float(logprobs_of(bits, group_of(request), position)[token])


class Mates:
    """Shared by colluding workers: the tokens that they reported, with the log-probabilities that they claimed."""

    def __init__(self) -> None:
        self.claims: dict[tuple[GroupId, int, int], float] = {}
        self.shielded = 0

    def claimed(self, request: GenerateRequest, position: int, token: int, logprob: float) -> None:
        self.claims[group_of(request), position, token] = logprob

    def bears_out(self, past: Mapping[Version, int], request: ScoreRequest, stretch: Stretch) -> TokenScores:
        """Honest scores, except that tokens of a mate get exactly the log-probabilities that it claimed."""
        scores = honest_scores(past, request, stretch)
        logprobs = scores.logprobs.copy()
        for number in range(stretch.count):
            token = request.token_ids[stretch.first + number]
            known = self.claims.get((stretch.prefix_key, stretch.position + number, token))
            self.shielded += known is not None
            logprobs[number] = logprobs[number] if known is None else known
        return replace(scores, logprobs=logprobs)


class SharedForgery:
    """Forged log-probabilities that its mates know."""

    draws_by_seed = True

    def __init__(self, rng: random.Random, mates: Mates) -> None:
        self._forged, self._mates = ForgedNumbers(rng, mean_nats=1.0), mates

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        token, logprob = self._forged.pick(bits, request, position)
        self._mates.claimed(request, position, token, logprob)
        return token, logprob


def made_up_scores(past: Mapping[Version, int], request: ScoreRequest, stretch: Stretch) -> TokenScores:
    """Made-up scores of the right shape, computed from the token IDs alone."""
    wild = np.array(
        [derived_seed(token, "score") % 997 / 997 for token in request.token_ids[stretch.first : stretch.stop]]
    )
    return TokenScores(-3.0 * wild, -3.0 * wild, -2.0 + 0.0 * wild, 0.1 * wild, 0.0 * wild, wild, 0.2 * wild)


class LyingWorker:
    """A `Liar` that tells one kind of lie. `mates`: shared by colluding workers."""

    def __init__(self, lie: Lie, rng: random.Random, mates: Mates | None = None) -> None:
        self.lie, self.name, self._rng = lie, lie.value, rng
        self._mates = mates or Mates()
        self._given_back: list[str] = []

    def engines(self, own: Engines) -> Engines:
        if not isinstance(own, VirtualEngines):
            return own
        picks = self._picks()
        own = own.picking(picks) if picks is not None else own
        match self.lie:
            case Lie.FALSE_SCORES:
                return own.saying(made_up_scores)
            case Lie.SHIELD:
                return own.saying(self._mates.bears_out)
            case _:
                return own

    def _picks(self) -> Picks | None:
        match self.lie:
            case Lie.FORGED_NUMBERS:
                return ForgedNumbers(self._rng)
            case Lie.SHIELD:
                return SharedForgery(self._rng, self._mates)
            case Lie.OLDER_TOKENS:
                return OlderTokens()
            case Lie.BEST_OF | Lie.OWN_BEST_OF:
                return BestOf(self.lie is Lie.BEST_OF)
            case Lie.MEMORISED:
                return Memorised()
            case _:
                return None

    # ---- messages

    def says(self, method: str, side: int, data: bytes) -> Sequence[bytes]:
        if (method, side) == (SESSION, 0):
            return self._to_coordinator(coordinator_pb2.WorkerMessage.FromString(data))
        if (method, side) == (REPORT, 0) and self.lie is Lie.EARLY_LENGTH:
            report = ingest_pb2.RolloutReport.FromString(data)
            for segment in report.segments:
                _cut(segment)
            return (report.SerializeToString(),)
        return (data,)

    def _to_coordinator(self, message: coordinator_pb2.WorkerMessage) -> Sequence[bytes]:
        said = [message]
        if message.HasField("hello") and self.lie in (Lie.LOW_PRICE, Lie.HIGH_PRICE):
            message.hello.price_usd_per_hour = HIGH_USD if self.lie is Lie.HIGH_PRICE else 0.0
        while self._given_back:
            back = coordinator_pb2.LeaseEnded.REASON_HANDED_BACK
            ended = coordinator_pb2.LeaseEnded(lease_id=self._given_back.pop(), reason=back)
            said.append(coordinator_pb2.WorkerMessage(lease_ended=ended))
        return [one.SerializeToString() for one in said]

    def hears(self, method: str, side: int, data: bytes) -> bool:
        """Hides from the daemon the leases that the machine hands back at once."""
        if self.lie is not Lie.HARD_BACK or (method, side) != (SESSION, 0):
            return True
        order = coordinator_pb2.WorkerOrder.FromString(data)
        grant = order.lease_grant
        if not order.HasField("lease_grant") or grant.is_renewal or derived_seed(0, grant.ticket.group_id) % 2:
            return True
        self._given_back.append(grant.ticket.lease_id)
        return False


def _cut(segment: rollout_pb2.RolloutSegment) -> None:
    if segment.token_ids and segment.offset == 0:
        del segment.token_ids[1:], segment.logprobs[1:], segment.raw_logprobs[1:], segment.version_spans[1:]
        segment.version_spans[0].count = 1
        segment.finish_reason = rollout_pb2.FINISH_REASON_LENGTH
