"""The step loop of the embedded engine: one thread that owns the slots, the caches and the live weights, and draws tokens.

Guarantees: commands (submit, abort, swap, fingerprint) act between two steps; every sampled token carries the version of the
weights that sampled it; a token depends only on its own logits, sampling parameters and random number, never on the rest of the
batch; filters apply in the order temperature, top-k, top-p; ties at the cutoff are kept by top-k and cut in token order by top-p.
Waits for commands when nothing runs, and for the outbox when it is full.

Shapes: T sequences, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from echo2.base.errors import EchoError, EngineError, LimitExceeded
from echo2.base.ids import Version
from echo2.base.rng import uniform
from echo2.base.rollout import NO_ROUTING, FinishReason, Routing, SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.worker.engines.embedded.live_weights import LiveTensors
from echo2.worker.engines.embedded.slots import BlockPool, Copy, Fill, SlotSequence, SlotTable
from echo2.worker.engines.engine import EngineStats, GenerateRequest, SwapMode
from echo2.worker.engines.outbox import Outbox, SampledToken


class Forward(Protocol):
    """A model's forward pass over its cache. Not thread-safe: one thread calls it."""

    def warm_up(self) -> None: ...

    def decode(self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] after feeding one token to each of T slots at the given positions."""
        ...

    def fill(self, fills: Sequence[Fill]) -> None:
        """Computes keys and values of runs of tokens, all runs in one pass."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies cached positions between blocks, of all layers."""
        ...

    @property
    def routing(self) -> Callable[[int, int, int], bytes] | None:
        """Packed rows (base/rollout) of cached positions of a slot: the slot, the first position, their number. None: it does not
        record which experts computed each position."""
        ...


COMMANDS_MAX = 65_536  # as many as requests may wait
PREFILL_TOKENS_MAX = 2_048  # a prompt's share of a step, so that others sample on
HOLD_STEPS = 6
"""A swap that recomputes caches waits up to this many steps for sequences about to end: those need no recomputing, and their
successors' prompts are computed once instead of twice. That saves more than the slots that stay empty meanwhile cost."""
_T = TypeVar("_T")


@dataclass(slots=True)
class LiveSwap:
    """A checked version on its way into the live weights. `done`: the seconds that generation paused."""

    version: Version
    parent: Version | None
    updates: list[TensorUpdate]
    mode: SwapMode
    done: Future[float] = field(default_factory=Future)
    steps_left: int = HOLD_STEPS


@dataclass(slots=True)
class StepLoop:
    """`run` is the thread's function. Methods marked "in the thread", `run_commands` and `step` run in that thread; the others may
    be called from any thread."""

    weights: LiveTensors
    make_forward: Callable[[BlockPool], Forward]
    slot_count: int
    context_tokens: int
    outbox: Outbox
    slowdown: float = 1.0
    cache_tokens: int = 0
    version: Version | None = None
    _sampled_tokens: int = 0
    _commands: deque[tuple[Future[Any], Callable[[], object]]] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _stop: threading.Event = field(default_factory=threading.Event)
    _pending_swap: LiveSwap | None = None
    _table: SlotTable = field(init=False)
    _forward: Forward = field(init=False)

    def __post_init__(self) -> None:
        self._table = SlotTable(self.slot_count, self.context_tokens, self.cache_tokens)
        self._forward = self.make_forward(self._table.blocks)

    def run(self) -> None:
        """Steps until stopped. On a failure, fails waiting commands and closes the outbox with that failure."""
        failure: EchoError | None = None
        try:
            torch.set_num_threads(1)
            with torch.inference_mode():
                self._forward.warm_up()
                while not self._stop.is_set():
                    self.run_commands()
                    self.step()
        except EchoError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  the top of a thread: no caller can report it
            failure = EngineError(f"the step loop failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self.stop()
        self._refuse_what_waits(failure or EngineError("the engine is stopped"))
        self.outbox.close(failure)

    def stop(self) -> None:
        """Ends `run` after the current step."""
        self._stop.set()
        self.notify()

    def notify(self) -> None:
        """Wakes the thread to check for work, for example after the outbox has been emptied."""
        with self._wake:
            self._wake.notify_all()

    def call(self, command: Callable[[], _T]) -> Future[_T]:
        """Runs `command` in the thread, between two steps, unless the future is cancelled before."""
        done: Future[_T] = Future()
        with self._wake:
            if self._stop.is_set():
                raise EngineError("the engine is stopped")
            if len(self._commands) >= COMMANDS_MAX:
                raise LimitExceeded(f"the engine has {COMMANDS_MAX} commands waiting already")
            self._commands.append((done, command))
            self._wake.notify_all()
        return done

    def submit(self, request: GenerateRequest) -> None:
        """In the thread: queues a request."""
        self._table.submit(request)

    def abort(self, request_id: str) -> None:
        """In the thread: ends a running or waiting request. Its last chunk follows the tokens already sampled."""
        if self._table.abort(request_id):
            self.outbox.put([SampledToken(request_id, self.version or Version(0), FinishReason.ABORTED)])

    def swap(self, swap: LiveSwap) -> Future[float]:
        """Makes a version live according to its mode; returns `done`."""
        swap.done.set_running_or_notify_cancel()  # a swap cannot be cancelled

        def fail(begun: Future[None]) -> None:
            if (error := begun.exception()) is not None and not swap.done.done():
                swap.done.set_exception(error)

        self.call(lambda: self._begin_swap(swap)).add_done_callback(fail)
        return swap.done

    def _begin_swap(self, swap: LiveSwap) -> None:
        if self._pending_swap is not None:
            raise EngineError(f"version {swap.version}: another swap is under way")
        self._pending_swap = swap
        self._table.is_holding = swap.mode is not SwapMode.KEEP_KV
        self._swap_if_ready()

    def stats(self) -> EngineStats:
        table = self._table
        return EngineStats(
            running_sequences=len(table.running),
            waiting_sequences=len(table.waiting),
            sampled_tokens=self._sampled_tokens,
            prompt_tokens=table.prompt_tokens,
            shared_prompt_tokens=table.shared_prompt_tokens,
            prefilled_tokens=table.prefilled_tokens,
        )

    def run_commands(self) -> None:
        """Runs the waiting commands; waits while there is neither a command nor anything to generate."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._commands or self._stop.is_set() or self._has_work() or self._is_swap_ready()
            )
            commands = list(self._commands)
            self._commands.clear()
        for done, command in commands:
            if done.set_running_or_notify_cancel():
                _settle(done, command)

    def _has_work(self) -> bool:
        table = self._table
        if self.outbox.is_full:
            return False
        return self.version is not None and bool(table.running or (table.waiting and not table.is_holding))

    def step(self) -> None:
        """Admits, prefills, decodes one token of every ready sequence, and carries out a pending swap that is ready."""
        if not self._has_work():
            self._swap_if_ready()
            return
        began = time.monotonic()
        self._table.admit()
        self._prefill()
        self._decode()
        self._swap_if_ready()
        if self.slowdown > 1.0:
            self._stop.wait((time.monotonic() - began) * (self.slowdown - 1.0))

    def _prefill(self) -> None:
        self._forward.copy(self._table.next_copies())
        fills = self._table.next_fills(PREFILL_TOKENS_MAX)
        if fills:
            self._forward.fill(fills)
            self._table.filled(fills)
            self._forward.copy(self._table.next_copies())

    def _decode(self) -> None:
        batch = self._table.decodable()
        if not batch:
            return
        assert self.version is not None, "nothing is decoded before the first version is live"
        logits = self._forward.decode(
            [sequence.tokens[-1] for sequence in batch],
            [sequence.slot for sequence in batch],
            [sequence.cached for sequence in batch],
        )
        params = [sequence.request.sampling for sequence in batch]
        numbers = [uniform(s.request.sampling.seed, s.completion_count) for s in batch]
        tokens = []
        for sequence, (token_id, logprob, raw) in zip(batch, draw(logits, params, numbers), strict=True):
            routing = self._routing_of(sequence)
            reason = self._table.extend(sequence, token_id)
            request_id = sequence.request.request_id
            tokens.append(SampledToken(request_id, self.version, reason, token_id, logprob, raw, routing))
            if reason is not FinishReason.UNFINISHED:
                self._table.release(sequence)
        if self._pending_swap is not None:
            self._pending_swap.steps_left -= 1
        self._sampled_tokens += len(tokens)
        self.outbox.put(tokens)

    def _routing_of(self, sequence: SlotSequence) -> Routing:
        """The routing of the token being sampled: the experts of the position just fed and, with the first token, of the prompt."""
        rows, fed = self._forward.routing, sequence.cached
        if rows is None:
            return NO_ROUTING
        prompt = rows(sequence.slot, 0, fed) if sequence.completion_count == 0 else b""
        return Routing(prompt, rows(sequence.slot, fed, 1))

    def _swap_if_ready(self) -> None:
        pending = self._pending_swap
        if pending is None or not self._is_swap_ready():
            return
        self._pending_swap = None
        self._table.is_holding = False
        _settle(pending.done, lambda: self._apply(pending))

    def _is_swap_ready(self) -> bool:
        pending = self._pending_swap
        if pending is None:
            return False
        match pending.mode:
            case SwapMode.KEEP_KV:
                return True
            case SwapMode.FINISH_FIRST:
                return not self._table.running
            case SwapMode.RECOMPUTE_KV:
                return self.outbox.is_full or not self._table.is_ending_within(pending.steps_left)

    def _apply(self, swap: LiveSwap) -> float:
        if swap.parent is not None and swap.parent != self.version:
            raise EngineError(
                f"version {swap.version}: expected a change of live version {self.version}, got {swap.parent}"
            )
        began = time.monotonic()
        self.weights.apply(swap.updates)
        self.version = swap.version
        self._table.weights_changed(keep_kv=swap.mode is SwapMode.KEEP_KV)
        return time.monotonic() - began

    def _refuse_what_waits(self, failure: EchoError) -> None:
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        if self._pending_swap is not None:
            self._pending_swap.done.set_exception(failure)
        for done, _ in commands:
            if done.set_running_or_notify_cancel():
                done.set_exception(failure)


def _settle(done: Future[_T], work: Callable[[], _T]) -> None:
    """Does the work and gives the future its result; raises again what is no error of ours."""
    try:
        done.set_result(work())
    except EchoError as error:
        done.set_exception(error)
    except BaseException as error:
        done.set_exception(error)
        raise


ELEMENTS_MAX = 1 << 19  # most logits processed at a time; bounds the memory of intermediate results


Drawn = tuple[int, float, float]  # a token, its log-probability under the sampling distribution and under the raw model


def draw(logits_TV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[Drawn]:
    """Draws one token per row. `uniforms`: one random number in [0, 1) per row."""
    step = max(1, ELEMENTS_MAX // logits_TV.shape[1])
    parts = (slice(begin, begin + step) for begin in range(0, len(logits_TV), step))
    return [drawn for rows in parts for drawn in _drawn(logits_TV[rows], params[rows], uniforms[rows])]


def _drawn(logits_TV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Iterator[Drawn]:
    raw_TV = torch.log_softmax(logits_TV, dim=-1)
    sampling_TV = _sampling_logprobs(logits_TV, raw_TV, params)
    cumulative_TV = sampling_TV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative_TV[:, -1:]
    chosen = torch.searchsorted(cumulative_TV, targets, right=True).clamp_(max=logits_TV.shape[-1] - 1)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0.0]
    if greedy:
        chosen[greedy] = logits_TV[greedy].argmax(dim=-1, keepdim=True)
    logprobs = sampling_TV.gather(1, chosen)
    if greedy:
        logprobs[greedy] = 0.0
    raw = raw_TV.gather(1, chosen)
    numbers = (each[:, 0].clamp_(max=0.0).tolist() for each in (logprobs, raw))
    return zip(chosen[:, 0].tolist(), *numbers, strict=True)


def _sampling_logprobs(logits: torch.Tensor, raw: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities after temperature and filters; greedy rows are left raw."""
    is_plain = [p.temperature in (0.0, 1.0) and (p.temperature == 0.0 or _is_unfiltered(p)) for p in params]
    if all(is_plain):
        return raw
    out = raw.clone()
    rows = [row for row, plain in enumerate(is_plain) if not plain]
    temperatures = torch.tensor([params[row].temperature for row in rows])
    out[rows] = torch.log_softmax(logits[rows] / temperatures[:, None], dim=-1)
    for row in rows:
        if not _is_unfiltered(params[row]):
            out[row] = torch.log_softmax(_filtered(out[row], params[row]), dim=-1)
    return out


def _is_unfiltered(params: SamplingParams) -> bool:
    return params.top_p >= 1.0 and params.top_k == 0


def _filtered(logprobs_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """`logprobs_V` with filtered-out tokens set to minus infinity. The likeliest token always stays."""
    values = logprobs_V
    if 0 < params.top_k < len(values):
        threshold = torch.topk(values, params.top_k).values[-1]
        values = values.masked_fill(values < threshold, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.sort(values, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1, dtype=torch.float64)
        before = probs.cumsum(dim=-1) - probs
        is_out = torch.zeros_like(values, dtype=torch.bool).scatter(0, order, before >= params.top_p)
        values = values.masked_fill(is_out, -torch.inf)
    return values
