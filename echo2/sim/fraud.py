"""Lies about rollouts and offers, by workers of the virtual world that would profit from them.

Guarantees: the worker runs the real daemon; a lie is in the tokens that its engine samples, in the log-probabilities it reports, or
in single messages of its machine. Leaves to others: lies about chunks and progress (byzantine), detection (the daemons), what must
hold (checkers).
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence

import numpy as np

from echo2.base.ids import GroupId
from echo2.base.rng import derived_seed
from echo2.sim.byzantine import REPORT, SESSION
from echo2.sim.tiny_model import STOP_TOKEN, VOCABULARY, reward_of
from echo2.sim.tiny_policy import SeededSampler, TokenSampler, group_of, logprobs_of, seeded
from echo2.sim.world_parts import VirtualEngines
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.worker.engines.engine import GenerateRequest
from echo2.worker.engines.making import Engines

TRIES = 4  # as the benchmark's best of four
HIGH_USD = 1e6  # within the wire's bound, above any price cap of a scenario
MEMORISED_TOKENS = 12  # within the median length, so that it is not found by its length


class Fraud(enum.Enum):
    FORGED_NUMBERS = "log-probabilities that it makes up"
    OLDER_TOKENS = "tokens of an older version, with the numbers of the one named"
    BEST_OF = "the best of four completions, by reward"
    OWN_BEST_OF = "the best of four completions, and says that it cannot draw by seeds"
    MEMORISED = "one memorised answer a group, with honest numbers"
    EARLY_LENGTH = "ends for its length after one token"
    HARD_BACK = "hands back every other prompt"
    LOW_PRICE = "offers itself for nothing"
    HIGH_PRICE = "asks for a million USD an hour"


class ForgedNumbers:
    """Honest tokens, with log-probabilities that make them look less likely than they were."""

    draws_by_seed = True

    def __init__(self, rng: random.Random, mean_nats: float = 0.5) -> None:
        self._rng, self._mean_nats = rng, mean_nats

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        token, logprob = SeededSampler().pick(bits, request, position)
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


class MemorisedAnswers:
    """Submits a memorised answer as the first completion of each group; the others are honest."""

    draws_by_seed = True

    def pick(self, bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        if not request.request_id.endswith("/0"):
            return SeededSampler().pick(bits, request, position)
        token = STOP_TOKEN if position + 1 >= MEMORISED_TOKENS else VOCABULARY - 1 - position
        return token, float(logprobs_of(bits, group_of(request), position)[token])


class FraudulentWorker:
    """A `ByzantineMachine` that tells one kind of fraud."""

    def __init__(self, fraud: Fraud, rng: random.Random) -> None:
        self.fraud, self.name, self._rng = fraud, fraud.value, rng
        self._given_back: list[str] = []

    def engines(self, own: Engines) -> Engines:
        if not isinstance(own, VirtualEngines):
            return own
        picks = self._picks()
        return own.picking(picks) if picks is not None else own

    def _picks(self) -> TokenSampler | None:
        match self.fraud:
            case Fraud.FORGED_NUMBERS:
                return ForgedNumbers(self._rng)
            case Fraud.OLDER_TOKENS:
                return OlderTokens()
            case Fraud.BEST_OF | Fraud.OWN_BEST_OF:
                return BestOf(self.fraud is Fraud.BEST_OF)
            case Fraud.MEMORISED:
                return MemorisedAnswers()
            case _:
                return None

    # ---- messages

    def says(self, method: str, side: int, data: bytes) -> Sequence[bytes]:
        if (method, side) == (SESSION, 0):
            return self._to_coordinator(coordinator_pb2.WorkerMessage.FromString(data))
        if (method, side) == (REPORT, 0) and self.fraud is Fraud.EARLY_LENGTH:
            report = ingest_pb2.RolloutReport.FromString(data)
            for segment in report.segments:
                _cut(segment)
            return (report.SerializeToString(),)
        return (data,)

    def _to_coordinator(self, message: coordinator_pb2.WorkerMessage) -> Sequence[bytes]:
        said = [message]
        if message.HasField("hello") and self.fraud in (Fraud.LOW_PRICE, Fraud.HIGH_PRICE):
            message.hello.price_usd_per_hour = HIGH_USD if self.fraud is Fraud.HIGH_PRICE else 0.0
        while self._given_back:
            back = coordinator_pb2.LeaseEnded.REASON_HANDED_BACK
            ended = coordinator_pb2.LeaseEnded(lease_id=self._given_back.pop(), reason=back)
            said.append(coordinator_pb2.WorkerMessage(lease_ended=ended))
        return [one.SerializeToString() for one in said]

    def hears(self, method: str, side: int, data: bytes) -> bool:
        """Hides from the daemon the leases that the machine hands back at once."""
        if self.fraud is not Fraud.HARD_BACK or (method, side) != (SESSION, 0):
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
