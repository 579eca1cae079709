"""Malicious workers that have the keys and the certificate of honest ones: each runs the real daemon and lies in one way, in
the messages that leave its machine or in what its engine samples and reports.

Guarantees: it can do only what a real one could: it cannot sign as the learner or the coordinator.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence

import numpy as np

from echo2.base.ids import GroupId
from echo2.base.rng import derived_seed
from echo2.sim import tiny_model as tiny
from echo2.sim.machine import PEERS
from echo2.sim.simulated_engine import VirtualEngines
from echo2.sim.tiny_model import STOP_TOKEN, Pick, group_of, logprobs_of, seeded, seeded_pick
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.worker.engines.engine import GenerateRequest

REPORTS_KEPT = 64  # of several versions, so that stale ones are among them
REPLAYS_SHARE = 0.3  # most of its reports stay honest, else it would only be slow
REPLAYED = 1 << 40  # replayed reports have sequence numbers from here on; the daemon does not know of them
SPEED, ROOM = 40.0, 1 << 20  # above any honest worker's, within the bounds of the message
SESSION, REPORT = "/echo2.v1.Coordinator/WorkerSession", "/echo2.v1.Ingest/Report"  # the calls whose messages it alters


TRIES = 4  # as the benchmark's best of four
HIGH_USD = 1e6  # within the wire's bound, above any price cap of a scenario
MEMORISED_TOKENS = 12  # within the median length, so that it is not found by its length


class Lie(enum.Enum):
    CORRUPT_CHUNKS = "corrupt chunks"
    LYING_HAVE_MAPS = "lying have-maps"
    REPLAYED_ROLLOUTS = "replayed rollouts"
    WRONG_LOGPROBS = "wrong log-probabilities"
    WRONG_VERSION = "wrong version"
    FALSE_PROGRESS = "tells of progress and reports nothing"
    FALSE_ENDS = "tells that it has finished and reports nothing"
    FALSE_SPEED = "says that it is the fastest of all, for nothing, and works as it did"
    FALSE_ROOM = "asks for a million rollouts and reports nothing"
    FORGED_NUMBERS = "log-probabilities that it makes up"
    OLDER_TOKENS = "tokens of an older version, with the numbers of the one named"
    BEST_OF = "the best of four completions, by reward"
    OWN_BEST_OF = "the best of four completions, and says that it cannot draw by seeds"
    MEMORISED = "one memorised answer a group, with honest numbers"
    EARLY_LENGTH = "ends for its length after one token"
    HARD_BACK = "hands back every other prompt"
    LOW_PRICE = "offers itself for nothing"
    HIGH_PRICE = "asks for a million USD an hour"


OF_STORMS = tuple(Lie)[: tuple(Lie).index(Lie.FORGED_NUMBERS)]
"""Those that harm nobody in any storm. The others gain something until they are found, which takes calm weather to see."""
SILENT = (Lie.FALSE_PROGRESS, Lie.FALSE_ENDS, Lie.FALSE_ROOM)  # these never report rollouts
CLAIMS = (Lie.FALSE_SPEED, Lie.FALSE_ROOM)  # these say something untrue about the worker itself
PRICES_USD = {Lie.FALSE_SPEED: 0.0, Lie.LOW_PRICE: 0.0, Lie.HIGH_PRICE: HIGH_USD}


def forged_numbers(rng: random.Random, mean_nats: float = 0.5) -> Pick:
    """Honest tokens, with log-probabilities that make them look less likely than they were."""

    def pick(bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        token, logprob = seeded_pick(bits, request, position)
        return token, float(np.float32(logprob - rng.expovariate(1.0 / mean_nats)))

    return pick


def older_tokens() -> Pick:
    """Samples from the first weights it had, and recomputes the log-probabilities under the weights it should use."""
    first: list[int] = []

    def pick(bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        if not first:
            first.append(bits)
        token, _ = seeded_pick(first[0], request, position)
        return token, float(logprobs_of(bits, group_of(request), position)[token])

    return pick


def best_of_pick() -> Pick:
    """Completes a prompt with four seeds, the lease's first, and submits the completion with the highest reward."""
    chosen: dict[tuple[GroupId, int], int] = {}

    def value(bits: int, request: GenerateRequest, seed: int) -> float:
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_new_tokens and STOP_TOKEN not in tokens:
            tokens.append(seeded(bits, group_of(request), seed, len(tokens))[0])
        return tiny.reward_of(tuple(tokens))

    def pick(bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
        group_id, seed = group_of(request), request.sampling.seed
        if (group_id, seed) not in chosen:
            seeds = [seed, *(derived_seed(seed, "mine", number) for number in range(1, TRIES))]
            chosen[group_id, seed] = max(seeds, key=lambda tried: value(bits, request, tried))
        return seeded(bits, group_id, chosen[group_id, seed], position)

    return pick


def memorised_pick(bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
    """A memorised answer as the first completion of each group; the others are honest."""
    if not request.request_id.endswith("/0"):
        return seeded_pick(bits, request, position)
    token = STOP_TOKEN if position + 1 >= MEMORISED_TOKENS else tiny.VOCABULARY - 1 - position
    return token, float(logprobs_of(bits, group_of(request), position)[token])


class Liar:
    """A dishonest worker's machine: it alters messages and may replace its daemon's engines. `side`: 0 for the calling side of a
    message, 1 for the serving side."""

    def __init__(self, kind: Lie, rng: random.Random) -> None:
        self.kind, self.name, self._rng = kind, kind.value, rng
        self.lies_told = 0
        self._given_back: list[str] = []
        self._leases: dict[str, int] = {}  # lease granted to it -> tokens that it claims
        self._version = 0
        self._kept: list[ingest_pb2.RolloutReport] = []
        self._tickets: dict[str, rollout_pb2.LeaseTicket] = {}

    def engines(self, honest: VirtualEngines) -> VirtualEngines:
        """The engines that its daemon gets: honest ones, changed."""
        match self.kind:
            case Lie.FORGED_NUMBERS:
                honest.pick = forged_numbers(self._rng)
            case Lie.OLDER_TOKENS:
                honest.pick = older_tokens()
            case Lie.BEST_OF | Lie.OWN_BEST_OF:
                honest.pick, honest.draws_by_seed = best_of_pick(), self.kind is Lie.BEST_OF
            case Lie.MEMORISED:
                honest.pick = memorised_pick
        return honest

    # ---- outgoing messages

    def says(self, method: str, side: int, data: bytes) -> Sequence[bytes]:
        """The messages to send instead of `data`, any number of them."""
        messages: Sequence[bytes] = (data,)
        if method == PEERS:
            messages = self.to_peers(data)
        elif (method, side) == (SESSION, 0):
            messages = self.to_coordinator(data)
        elif (method, side) == (REPORT, 0):
            messages = self.to_learner(data)
        self.lies_told += list(messages) != [data]
        return messages

    def to_coordinator(self, data: bytes) -> Sequence[bytes]:
        message = coordinator_pb2.WorkerMessage.FromString(data)
        messages = [message]
        match message.WhichOneof("kind"):
            case "hello" if self.kind in PRICES_USD:
                message.hello.price_usd_per_hour = PRICES_USD[self.kind]
            case "heartbeat":
                messages += self._beat(message.heartbeat)
            case "lease_request" if self.kind is Lie.FALSE_ROOM:
                message.lease_request.free_rollouts = ROOM
            case "lease_ended":
                self._leases.pop(message.lease_ended.lease_id, None)
        messages += [_ended(lease_id, coordinator_pb2.LeaseEnded.REASON_HANDED_BACK) for lease_id in self._given_back]
        self._given_back.clear()
        return [each.SerializeToString() for each in messages]

    def _beat(self, beat: coordinator_pb2.Heartbeat) -> list[coordinator_pb2.WorkerMessage]:
        """Lies in the heartbeat itself; returns what is said beside it."""
        more = list[coordinator_pb2.WorkerMessage]()
        self._version = beat.version
        if self.kind in CLAIMS:
            beat.rollouts_per_s, beat.tokens_per_s = SPEED, 100 * SPEED
            beat.rollout_s_mean = beat.rollout_s_p95 = 0.1
        if self.kind is Lie.FALSE_ROOM and beat.has_version:
            wish = coordinator_pb2.LeaseRequest(free_rollouts=ROOM, version=beat.version)
            more.append(coordinator_pb2.WorkerMessage(lease_request=wish))
        for lease_id in list(self._leases):
            if self.kind is Lie.FALSE_PROGRESS:
                self._leases[lease_id] += 1
                progress = coordinator_pb2.LeaseProgress(lease_id=lease_id, tokens=self._leases[lease_id])
                more.append(coordinator_pb2.WorkerMessage(lease_progress=progress))
            elif self.kind is Lie.FALSE_ENDS:
                del self._leases[lease_id]
                more.append(_ended(lease_id, coordinator_pb2.LeaseEnded.REASON_FINISHED))
        return more

    def to_learner(self, data: bytes) -> Sequence[bytes]:
        if self.kind in SILENT:
            return ()
        report = ingest_pb2.RolloutReport.FromString(data)
        if report.HasField("ticket"):
            self._tickets[report.lease_id] = report.ticket
        for segment in report.segments:
            self._change(segment)
        messages = [report.SerializeToString()]
        if self.kind is Lie.REPLAYED_ROLLOUTS:
            self._kept = [*self._kept, report][-REPORTS_KEPT:]
            if self._rng.random() < REPLAYS_SHARE:
                messages.append(self._replay().SerializeToString())
        return messages

    def _replay(self) -> ingest_pb2.RolloutReport:
        """A kept report under its old ticket: its lease may be over, and the group may be leased to another worker now."""
        again = ingest_pb2.RolloutReport()
        again.CopyFrom(self._rng.choice(self._kept))
        again.sequence = REPLAYED + self._rng.randrange(1 << 20)
        if again.lease_id in self._tickets:
            again.ticket.CopyFrom(self._tickets[again.lease_id])
        return again

    def _change(self, segment: rollout_pb2.RolloutSegment) -> None:
        if self.kind is Lie.WRONG_LOGPROBS:
            lies = [-self._rng.randrange(1, 4096) / 1024.0 for _ in segment.logprobs]
            segment.logprobs[:] = segment.raw_logprobs[:] = lies
        elif self.kind is Lie.WRONG_VERSION:
            for span in segment.version_spans:  # an unpublished version, an old one, or the true one
                span.version = max(0, span.version + self._rng.choice((-6, 0, 1, 2, 50)))
        elif self.kind is Lie.EARLY_LENGTH and segment.token_ids and segment.offset == 0:
            del segment.token_ids[1:], segment.logprobs[1:], segment.raw_logprobs[1:], segment.version_spans[1:]
            segment.version_spans[0].count = 1
            segment.finish_reason = rollout_pb2.FINISH_REASON_LENGTH

    def to_peers(self, data: bytes) -> Sequence[bytes]:
        message = broadcast_pb2.PeerMessage.FromString(data)
        match message.WhichOneof("kind"):
            case "chunk" if self.kind is Lie.CORRUPT_CHUNKS and message.chunk.payload:
                if self._rng.random() < 0.5:
                    payload = bytearray(message.chunk.payload)
                    payload[self._rng.randrange(len(payload))] ^= 1
                    message.chunk.payload = bytes(payload)
            case "have" if self.kind is Lie.LYING_HAVE_MAPS:
                held = int.from_bytes(message.have.bitmap, "little") | (1 << self._rng.randrange(1, 40)) - 1
                message.have.bitmap = held.to_bytes((held.bit_length() + 7) // 8, "little")
            case _:
                return (data,)
        return (message.SerializeToString(),)

    # ---- incoming messages

    def hears(self, method: str, side: int, data: bytes) -> bool:
        """Whether the daemon receives the message. Not those of leases that the machine hands back at once, nor verdicts on reports
        that the daemon has not sent."""
        if (method, side) == (REPORT, 0):
            return ingest_pb2.RolloutVerdict.FromString(data).sequence < REPLAYED
        return (method, side) != (SESSION, 0) or self._hears_order(coordinator_pb2.WorkerOrder.FromString(data))

    def _hears_order(self, order: coordinator_pb2.WorkerOrder) -> bool:
        if order.HasField("lease_revoke"):
            self._leases.pop(order.lease_revoke.lease_id, None)
        if not order.HasField("lease_grant"):
            return True
        grant = order.lease_grant
        self._leases.setdefault(grant.ticket.lease_id, 0)
        if self.kind is not Lie.HARD_BACK or grant.is_renewal or derived_seed(0, grant.ticket.group_id) % 2:
            return True
        self._given_back.append(grant.ticket.lease_id)
        return False


def _ended(lease_id: str, reason: coordinator_pb2.LeaseEnded.Reason) -> coordinator_pb2.WorkerMessage:
    return coordinator_pb2.WorkerMessage(lease_ended=coordinator_pb2.LeaseEnded(lease_id=lease_id, reason=reason))
