"""What trainers of other projects ask the fleet for: each request is a group of its own, leased and reported like any other.

    asked --> waits by priority --> offered --reports--> whole --> answered
                                       |
                                       '-- too old, or its worker is barred --> offered again under another id, then refused

Guarantees: no token of an answer is older than its request allows, nor than the staleness bound; a request that nobody waits for
any more is closed. A kill loses the requests under way, whose clients see their connections end and ask again; so nothing of them
is journalled.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field, replace

from echo2.base.clock import NO_REQUESTS
from echo2.base.errors import EchoError
from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import GroupSpec, Rollout, SamplingParams, Work
from echo2.gateway.episodes import CallRefused
from echo2.gateway.generate import TokenAnswer, TokenRequest
from echo2.learner.rollouts.admission import STEPS_REMEMBERED
from echo2.learner.rollouts.groups import Group, TrainGroup, empty_rollout
from echo2.learner.rollouts.pool import RolloutPool
from echo2.outside import monotonic, unix_now

OFFERED_MAX = 1024  # rollouts offered at once: more than a fleet's slots, few enough that priority orders the rest
ASKED_MAX = 8192  # rollouts asked for and not answered; beyond it clients are told to come again
RETRY_AFTER_S = 1.0  # a completion or a version takes seconds
EXACT_WAIT_S = 10.0  # a worker that still held a version which is not the newest would have begun
FINISHED_MAX = 4096  # answered groups kept until the next version, for what operators see of them


@dataclass(order=True, slots=True)
class Asked:
    """A request in the order in which it is offered. `retry`: how often it has begun anew. `offered_at`: the last time."""

    priority: int
    number: int
    answer: TokenAnswer = field(compare=False)
    sampling: SamplingParams = field(compare=False)
    retry: int = field(default=0, compare=False)
    offered_at: float = field(default=0.0, compare=False)

    @property
    def group_id(self) -> GroupId:
        again = f"r{self.retry}" if self.retry else ""
        return GroupId(f"s{self.number:08d}{again}")


class RequestPool(RolloutPool):
    """A pool without prompts, rewards and batches. `finished`: whole groups since the last version. `busy_s`: seconds in which a
    request was under way, since the last version."""

    def __init__(self, *parts: object, **named: object) -> None:
        super().__init__(*parts, **named)  # type: ignore[arg-type]
        self.finished: list[TrainGroup] = []
        self.sampled_tokens = 0
        self._asked: dict[GroupId, Asked] = {}
        self._waiting: list[Asked] = []
        self._numbers = itertools.count(int(unix_now()) * 1_000_000)  # no number of an earlier start comes again
        self._busy_s, self._busy_since = 0.0, 0.0

    # ---- what clients ask

    @property
    def rollouts_asked(self) -> int:
        return sum(asked.answer.request.choices for asked in (*self._asked.values(), *self._waiting))

    def generate(self, request: TokenRequest) -> TokenAnswer:
        """Begins a request. Raises CallRefused if the fleet cannot answer it."""
        self._check_versions(request)
        if self.rollouts_asked + request.choices > ASKED_MAX:
            text = f"expected at most {ASKED_MAX} completions under way, come again when some are answered"
            raise CallRefused(429, "busy", text, RETRY_AFTER_S)
        number = next(self._numbers)
        sampling = self._sampling_of(request, number)
        name = GroupId(f"s{number:08d}")
        answer = TokenAnswer(
            request, [empty_rollout(name, index) for index in range(request.choices)],
            lambda rollout: sampling.trained_logprobs(rollout.logprobs, rollout.raw_logprobs),
            asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        if not self._asked and not self._waiting:
            self._busy_since = monotonic()
        heapq.heappush(self._waiting, Asked(request.priority, number, answer, sampling))
        self._settle()
        return answer

    def leave(self, answer: TokenAnswer) -> None:
        """Closes the request if it is still under way."""
        if answer.whole.done() and not answer.whole.cancelled():  # else it is under way: who awaited it was cancelled
            return
        answer.whole.cancel()
        for group_id, asked in list(self._asked.items()):
            if asked.answer is answer and group_id in self.groups.groups:  # else a coming version has closed it
                self.groups.close_family(group_id, "unused")
        self._waiting = [waiting for waiting in self._waiting if waiting.answer is not answer]
        heapq.heapify(self._waiting)
        self._note_idle()
        self._settle()

    def take_busy_s(self) -> float:
        now = monotonic()
        if self._asked or self._waiting:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def _check_versions(self, request: TokenRequest) -> None:
        newest, coming = self.groups.published[-1], self.groups.next_step  # the same, unless a version is being written
        exact, least = request.exact_version, request.min_version
        wanted = least if exact is None else exact
        if wanted is not None and wanted > newest:
            text = f"expected a version up to {newest}, the newest, got {wanted}: ask again when it is published"
            raise CallRefused(409, "version_not_published", text, RETRY_AFTER_S)
        oldest = max(0, coming - self.groups.bound)
        if exact is not None and (exact < oldest or exact not in self.groups.published):
            raise _stale(exact, f"one of the versions that workers may hold, {oldest} to {coming}")

    def _sampling_of(self, request: TokenRequest, number: int) -> SamplingParams:
        run, room = self.prompts.sampling, self.prompts.context_tokens - len(request.token_ids)
        if room < 1:
            text = f"token_ids: expected at most {self.prompts.context_tokens - 1} tokens, got {len(request.token_ids)}"
            raise CallRefused(400, "context_length_exceeded", text)
        token_ids = (*request.token_ids, *request.stop_token_ids)
        if not 0 <= min(token_ids) <= max(token_ids) < self.prompts.vocabulary_size:
            raise CallRefused(
                400, "invalid_request_error",
                f"token_ids: expected ids from 0 to below {self.prompts.vocabulary_size}, got {min(token_ids)!r:.40} to "
                f"{max(token_ids)!r:.40}",
            )  # fmt: skip
        if request.max_tokens is not None and request.max_tokens > run.max_new_tokens:
            text = (
                f"sampling_params.max_tokens: expected at most {run.max_new_tokens}, for which workers keep room "
                f"(sampling.max_new_tokens of the run), got {request.max_tokens}"
            )
            raise CallRefused(400, "invalid_request_error", text)
        try:
            piece_ids, pieces = self.prompts.stop_strings.pieces_of(request.stops)
            ends = () if request.ignores_end else run.stop_token_ids
            return SamplingParams(
                request.temperature, request.top_p, request.top_k,
                min(run.max_new_tokens if request.max_tokens is None else request.max_tokens, room),
                tuple(sorted({*ends, *request.stop_token_ids})),
                self.prompts.secret_seed(f"request/{number}") if request.seed is None else request.seed,
                tuple(text.encode() for text in request.stops), piece_ids, pieces,
            )  # fmt: skip
        except EchoError as error:
            raise CallRefused(400, "invalid_request_error", str(error)) from None

    # ---- as the pool of the ingest port

    def _on_tokens(self, group: Group, rollout: Rollout, is_admitted: bool) -> None:
        asked = self._asked[rollout.group_id]
        asked.answer.rollouts[:] = group.rollouts  # all: later segments of this report may have ended others
        asked.answer.grew.set()
        if group.is_sampled:
            self._answer(asked, group)

    def _answer(self, asked: Asked, group: Group) -> None:
        group.rewards = dict.fromkeys(range(len(group.rollouts)), 0.0)
        whole = self.groups.train_group(group)
        spans = [span for rollout in whole.rollouts for span in rollout.version_spans]
        if group.is_training:
            self.groups.ledger.record(asked.group_id, self.groups.next_step, spans)
        self.groups.counts.trained += len(whole.rollouts)
        tokens = sum(len(rollout.token_ids) for rollout in whole.rollouts)
        self.groups.counts.trained_tokens += tokens
        self.sampled_tokens += tokens
        if len(self.finished) < FINISHED_MAX:
            self.finished.append(whole)
        self._port.on_answer(whole)
        if not asked.answer.whole.done():
            asked.answer.whole.set_result(None)
        self.groups.close_family(asked.group_id, "complete")

    # ---- after every call

    def _tell_closures(self) -> None:
        for closure in self.groups.take_closures():
            self._port.close([closure.group_id], closure.reason)
            asked = self._asked.pop(closure.group_id, None)
            if asked is None or asked.answer.whole.done():
                continue
            try:
                self._check_versions(asked.answer.request)
                if closure.again is None:
                    text = f"its tokens could not be used: {closure.reason}, {asked.retry + 1} times; ask again"
                    raise CallRefused(503, "not_sampled", text, RETRY_AFTER_S)
                heapq.heappush(self._waiting, replace(asked, retry=asked.retry + 1))
            except CallRefused as refused:
                asked.answer.whole.set_exception(refused)
                asked.answer.whole.exception()  # its client may have left
        self._note_idle()

    def begin_version(self, version: Version) -> list[TrainGroup]:
        """From now on `version` is the trainer's newest: closes what is too old for it. Returns what was answered before."""
        self.groups.next_step = Step(version)
        self.groups.drop_stale()
        oldest = version - self.groups.bound
        for group_id, asked in self._asked.items():
            exact = asked.answer.request.exact_version
            if exact is not None and exact < oldest and group_id in self.groups.groups:
                self.groups.close_family(group_id, "stale")
        self.groups.ledger.forget_before(Step(max(0, version - STEPS_REMEMBERED)))
        finished, self.finished = self.finished, []
        return finished

    def tick(self, now: float) -> None:
        """Refuses requests for a version that no worker is at any more. Call about every second; `now`: seconds."""
        newest = self.groups.published[-1]
        for group_id, asked in self._asked.items():
            exact, group = asked.answer.request.exact_version, self.groups.groups.get(group_id)
            if exact is None or exact >= newest or now - asked.offered_at <= EXACT_WAIT_S:
                continue
            if group is not None and not group.is_begun:
                asked.answer.whole.set_exception(_stale(exact, f"{newest}, the newest, since no worker is at another"))
                asked.answer.whole.exception()  # its client may have left
                self.groups.close_family(group_id, "unused")
        self._settle()

    def _note_idle(self) -> None:
        if not self._asked and not self._waiting and self._busy_since:
            self._busy_s += monotonic() - self._busy_since
            self._busy_since = 0.0

    def _draw_missing(self) -> None:
        """Offers what waits, by priority, while there is room."""
        offered = sum(other.answer.request.choices for other in self._asked.values())
        while self._waiting and offered < OFFERED_MAX:
            asked = heapq.heappop(self._waiting)
            request, name = asked.answer.request, asked.group_id
            work = Work.TRAIN if request.exact_version is None else Work.EVALUATE
            # A worker may begin with versions from `consume_step - S` on.
            least = request.min_version or 0
            step = Step(max(self.groups.next_step, least + self.groups.bound if least else 0))
            exact = None if request.exact_version is None else Version(request.exact_version)
            spec = GroupSpec(name, request.token_ids, request.choices, asked.sampling, step, work, exact)
            self._asked[name], asked.offered_at = asked, monotonic()
            offered += request.choices
            self.groups.open(spec, asked.number, asked.retry)
            self.groups.groups[name].min_version = max(least, self.groups.groups[name].min_version)
            self._port.offer([spec])

    @property
    def waits_for(self) -> str:
        if not self._asked and not self._waiting:
            return NO_REQUESTS
        # None: closed, which is told with the next version.
        groups = [self.groups.groups.get(name) for name in self._asked]
        begun = sum(group is not None and group.is_begun for group in groups)
        return f"{len(self._asked)} requests, {begun} begun by workers; {len(self._waiting)} wait for their turn"


def _stale(exact: int, expected: str) -> CallRefused:
    return CallRefused(409, "version_gone", f"expected {expected}, got {exact}")
