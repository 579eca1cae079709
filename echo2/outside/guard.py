"""Limits the harm of a message to the end of the call or stream that it came on, and what one peer may take of a loop's time.

Guarantees: an unexpected exception while handling a peer's message is logged once with the peer's name (again after QUIET_S, with
the count of those not logged).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import grpc.aio

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.units import format_bytes
from echo2.outside import monotonic

QUIET_S = 60.0  # docs/security.md: a line a minute
KEYS_MAX = 1024  # peers and subjects that are remembered; the oldest may say a line again
REFUSALS_QUIET_S = 0.2  # docs/security.md: five lines a second
PEERS_MAX = 16_384  # more than the largest fleet (10,000)
_log = logging.getLogger("echo2.guard")


class PeerLines:
    """Allows one line in QUIET_S for each peer and subject, so that no peer can fill the disk with lines about itself."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def more(self, party: str, subject: str) -> str | None:
        """None: leave this line out. Else what to add to it: how many were left out since the last one, mostly nothing."""
        key, now = (party, subject), monotonic()
        at, unsaid = self._seen.pop(key, (float("-inf"), 0))
        if now - at < QUIET_S:
            self._seen[key] = (at, unsaid + 1)
            return None
        self._seen[key] = (now, 0)
        while len(self._seen) > KEYS_MAX:
            self._seen.popitem(last=False)
        return f" ({unsaid} more since the last line)" if unsaid else ""


class Mishaps:
    """Logs unexpected exceptions, rate-limited so that no peer can fill the disk with them."""

    def __init__(self, log: logging.Logger = _log) -> None:
        self._log = log
        self.count = 0
        self._lines = PeerLines()

    def note(self, what: str, party: str, error: BaseException) -> None:
        """Records that `what` was ended by `error`, caused by a message of `party`."""
        self.count += 1
        if (more := self._lines.more(party, type(error).__name__)) is not None:
            self._log.error("%s of %s ended by an unforeseen error%s", what, party, more, exc_info=error)


class Refusals:
    """Logs at most five warnings about peers a second; the next one says how many were dropped."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._at, self._unsaid = float("-inf"), 0

    def warn(self, text: str, *arguments: object) -> None:
        """Like `Logger.warning`."""
        now = monotonic()
        if now - self._at < REFUSALS_QUIET_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more not logged)" if self._unsaid else ""
        self._at, self._unsaid = now, 0
        self._log.warning(text + "%s", *arguments, more)


class FairShare:
    """Limits one peer to a `share` of a loop's time, plus a burst of BURST_S; beyond that, it is read more slowly. Work that serves
    the run is given back (`repay`), so that only work for nothing counts in the long run. A burst is earned by time: a caller with
    a new name for every connection has none."""

    SHARE, OF_MANY, BURST_S, PAUSE_MAX_S = 0.05, 0.2, 0.1, 5.0
    """`OF_MANY`: for whoever speaks for many, as the learner, an operator, all newcomers of a link."""

    def __init__(self, share: float = SHARE) -> None:
        self._share, self._owed_s = share, self.BURST_S
        self._at: float | None = None

    def pause_s(self, worked_s: float, now: float) -> float:
        """Seconds to wait before reading the peer's next message, after its last one took `worked_s` to handle."""
        passed_s = 0.0 if self._at is None else now - self._at
        self._owed_s = max(0.0, self._owed_s - passed_s * self._share) + worked_s
        self._at = now
        return min(self.PAUSE_MAX_S, max(0.0, self._owed_s - self.BURST_S) / self._share)

    def repay(self, worked_s: float) -> None:
        """What took so long served the run."""
        self._owed_s = max(0.0, self._owed_s - worked_s)


class FairShares:
    """The shares of all peers. They survive the end of a stream: a new stream does not bring a new share."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, FairShare] = OrderedDict()

    def of(self, peer: str, share: float = FairShare.SHARE) -> FairShare:
        """The peer's share, and how large it is if it is new; the PEERS_MAX most recently used ones are remembered."""
        known = self._by_peer.pop(peer, None) or FairShare(share)
        self._by_peer[peer] = known
        while len(self._by_peer) > PEERS_MAX:
            self._by_peer.popitem(last=False)
        return known


MISHAPS = Mishaps()  # the mishaps of this process


@contextmanager
def noting(what: str, party: str = "this process") -> Iterator[None]:
    """Wraps one iteration of a loop that serves all peers: an unexpected exception is recorded, and the loop goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        MISHAPS.note(what, party, error)


@contextmanager
def handling(what: str, party: str) -> Iterator[None]:
    """Wraps handling of a message of `party`: an unexpected exception is recorded and becomes a MalformedMessage."""
    try:
        yield
    except (EchoError, grpc.aio.AbortError, grpc.aio.AioRpcError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001
        MISHAPS.note(what, party, error)
        raise MalformedMessage(f"{party}: expected a message that can be handled, got one that cannot") from None


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Cancels the tasks and waits until all have ended, which may take as long as their own `finally`. Returns what each ended
    with, in order: its result, its error, or a CancelledError."""
    ending = tuple(tasks)  # a task that ends may leave the set that it came from
    for task in ending:
        task.cancel()
    return await asyncio.gather(*ending, return_exceptions=True)


class Tasks:
    """Tasks that run beside their owner until they or it end. `on_error`: told of an error with which one ended."""

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._on_error = on_error or (lambda error: _log.error("a task ended by an error", exc_info=error))

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[], object] = lambda: None) -> asyncio.Task[None]:
        """`on_end` is called even if the work is cancelled before it begins."""
        task = asyncio.create_task(work)
        self._running.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            self._running.discard(task)
            on_end()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._on_error(error)

        task.add_done_callback(ended)
        return task

    async def end(self) -> None:
        await cancel_all(self._running)


# Progress of long work as log lines; a worker on a terminal shows bars instead (worker/weights).
#
# Guarantees: quick work is not mentioned; then at most one line every `LINE_EVERY_S` for each task; the caller gets what the work
# returns or raises. Waits for the work; woken by its end or by the next look.

LINE_EVERY_S = 3.0  # docs/howto-join.md: a line every 3 s
LOOK_S = 1.0  # a clock's tick on the screen
T = TypeVar("T")


class ShowsProgress(Protocol):
    def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
        """`what` has `done_bytes` of `whole_bytes`; `whole_bytes` 0: not known, or not counted in bytes."""
        ...

    def ended(self, what: str) -> None: ...


async def shown(
    progress: ShowsProgress, what: str, work: Awaitable[T], far: Callable[[], tuple[int, int]] = lambda: (0, 0)
) -> T:
    """Awaits `work`, its end after a cancellation too, and shows that it is running, and for how long. `far`: the bytes done and in
    all, where they can be counted."""
    progress.at(what, *far())
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
            progress.at(what, *far())
        return await task
    finally:
        await cancel_all((task,))
        progress.ended(what)


class ProgressLines:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told_at: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
        now = monotonic()
        began_at = self._began.setdefault(what, now)
        if now < self._told_at.setdefault(what, now) + LINE_EVERY_S:
            return
        self._told_at[what] = now
        if not whole_bytes and not done_bytes:
            self._log.info("%s: under way for %.0f s", what, now - began_at)
            return
        self._log.info("%s: %s", what, _far_text(done_bytes, whole_bytes, now - began_at))

    def ended(self, what: str) -> None:
        self._told_at.pop(what, None)
        self._began.pop(what, None)


def _far_text(done_bytes: int, whole_bytes: int, passed_s: float) -> str:
    """`1.2 GB of 16.4 GB, 300.0 MB/s, 51 s left`, as far as known."""
    rate = done_bytes / passed_s if passed_s > 0 else 0.0
    whole = f" of {format_bytes(whole_bytes)}" if whole_bytes else ""
    left = f", {(whole_bytes - done_bytes) / rate:.0f} s left" if rate > 0 and whole_bytes >= done_bytes else ""
    return f"{format_bytes(done_bytes)}{whole}, {format_bytes(int(rate))}/s{left}"


def no_stop_iteration(call: Callable[[], T]) -> T:
    """Calls it. A StopIteration comes out as another error: no future takes one, and whoever waits for it would do so for ever."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
