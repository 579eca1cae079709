"""The state machine from arriving artifacts to the live version: decode, verify, swap, check, commit.

One door, `SwapMachine.handle(event, now) -> list[Action]`. Artifacts arrive one after another, each on top of the previous one (the
broadcast chooses the path). Guarantees: a version goes live only if its bits were verified on the host and the engine's own
fingerprint agrees, else the tokens sampled since the swap are discarded and the engine is repaired from the host copy; if a later
version is already here, a version is only committed to the host and skips the engine, at most `SKIPS_MAX` times in a row; after
`FAILURES_MAX` failures in a row the machine gives up with the last reason. Leaves to others: fetching (broadcast), decoding
(weights), where the bits go (engine).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from echo2.base.ids import Version
from echo2.worker.engine import SwapMode

SKIPS_MAX = 8
FAILURES_MAX = 5


# ---- events


@dataclass(frozen=True, slots=True)
class ArtifactBegan:
    """The first chunk of an artifact has arrived. `parent` None: a keyframe."""

    version: Version
    parent: Version | None


@dataclass(frozen=True, slots=True)
class ArtifactGivenUp:
    """The artifact being received will not be completed: another path is cheaper now."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The host already holds a whole version: a base checkpoint with the fingerprint that the publisher signed."""

    version: Version


@dataclass(frozen=True, slots=True)
class Decoded:
    """The whole artifact is decoded and has the fingerprint that its publisher signed. `more_is_here`: a complete artifact of a
    later version is here and can follow at once."""

    version: Version
    more_is_here: bool


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The artifact does not decode, or not to its fingerprint."""

    message: str


@dataclass(frozen=True, slots=True)
class Swapped:
    """The engine has the version; generation paused for `stood_still_s` seconds."""

    version: Version
    stood_still_s: float


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """The engine kept its old version."""

    message: str


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether the engine's fingerprint equals the version's."""

    version: Version
    is_equal: bool


Event = ArtifactBegan | ArtifactGivenUp | Adopted | Decoded | DecodeFailed | Swapped | SwapFailed | Checked

# ---- actions


@dataclass(frozen=True, slots=True)
class StartDecoder:
    """Decode the arriving artifact on top of the host's version."""


@dataclass(frozen=True, slots=True)
class DropDecoder:
    """Discard what was decoded."""


class SwapSource(enum.Enum):
    """Where the engine gets the bits from."""

    DELTA = "delta"  # the decoded artifact, on top of the engine's version
    HOST = "host"  # all of the host's weights, after the commit


@dataclass(frozen=True, slots=True)
class SwapEngine:
    version: Version
    source: SwapSource
    mode: SwapMode


@dataclass(frozen=True, slots=True)
class Check:
    """Compare the engine's fingerprint with the version's."""

    version: Version


@dataclass(frozen=True, slots=True)
class Commit:
    """Move the host copy to the decoded version."""

    version: Version


@dataclass(frozen=True, slots=True)
class HoldTokens:
    """Hold the tokens that the engine samples as `version` until `ReleaseTokens` or `DiscardTokens`."""

    version: Version


@dataclass(frozen=True, slots=True)
class ReleaseTokens:
    """Pass on the held tokens: they were sampled by the version that they carry."""


@dataclass(frozen=True, slots=True)
class DiscardTokens:
    """Discard the held tokens, which were sampled by weights of no version, and hand back their rollouts."""


@dataclass(frozen=True, slots=True)
class GoLive:
    """The version is live and proven. `stood_still_s`: pause of generation; `apply_s`: from decoded to proven."""

    version: Version
    stood_still_s: float
    apply_s: float


@dataclass(frozen=True, slots=True)
class StartOver:
    """The artifact was bad: forget it and fetch one that applies to `version` (None: a keyframe)."""

    version: Version | None
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`FAILURES_MAX` attempts in a row to make a version live have failed."""

    reason: str


Action = (
    StartDecoder
    | DropDecoder
    | SwapEngine
    | Check
    | Commit
    | HoldTokens
    | ReleaseTokens
    | DiscardTokens
    | GoLive
    | StartOver
    | GiveUp
)

# ---- the machine


class _State(enum.Enum):
    IDLE = "waits for a version"
    DECODING = "receives and decodes"
    SWAPPING = "swaps"
    CHECKING = "checks the engine's weights"
    BROKEN = "gave up"


@dataclass(slots=True)
class SwapMachine:
    """`host`: the version committed on the host; `live`: the engine's proven version, None until there is one."""

    mode: SwapMode
    host: Version | None = None
    live: Version | None = None
    _state: _State = _State.IDLE
    _began: ArtifactBegan | None = None
    _source: SwapSource = SwapSource.DELTA
    _skips: int = 0
    _failures: int = 0
    _decoded_at: float = 0.0
    _stood_still_s: float = 0.0

    @property
    def state(self) -> str:
        """In words, for the status."""
        return self._state.value

    @property
    def is_idle(self) -> bool:
        return self._state is _State.IDLE

    def handle(self, event: Event, now: float) -> list[Action]:
        return list(self._on(event, now))

    def _on(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case ArtifactBegan():
                yield from self._begin(event)
            case ArtifactGivenUp():
                if self._state is _State.DECODING:
                    self._state = _State.IDLE
                    yield DropDecoder()
            case Adopted(version):
                yield from self._adopted(version, now)
            case Decoded(version, more_is_here):
                yield from self._decoded(version, more_is_here, now)
            case DecodeFailed(message):
                if self._state is _State.DECODING:
                    yield DropDecoder()
                    yield from self._failed(message)
            case Swapped(version, stood_still_s):
                yield from self._swapped(version, stood_still_s)
            case SwapFailed(message):
                yield from self._swap_failed(message)
            case Checked(version, is_equal):
                yield from self._checked(version, is_equal, now)

    def _begin(self, began: ArtifactBegan) -> Iterator[Action]:
        assert self._state in (_State.IDLE, _State.BROKEN), f"an artifact began while the worker {self.state}"
        if self._state is _State.BROKEN:
            return
        self._state = _State.DECODING
        self._began = began
        yield StartDecoder()

    def _adopted(self, version: Version, now: float) -> Iterator[Action]:
        assert self._state in (_State.IDLE, _State.BROKEN), f"weights were adopted while the worker {self.state}"
        if self._state is _State.BROKEN:
            return
        self.host, self._decoded_at = version, now
        self._began = ArtifactBegan(version, None)
        self._state = _State.SWAPPING
        self._source = SwapSource.HOST
        yield HoldTokens(version)
        yield SwapEngine(version, SwapSource.HOST, self.mode)

    def _decoded(self, version: Version, more_is_here: bool, now: float) -> Iterator[Action]:
        if self._state is not _State.DECODING or self._began is None:
            return
        assert self._began.version == version, f"version {self._began.version} began, {version} was decoded"
        self._decoded_at = now
        fits = self._began.parent is None or self._began.parent == self.live
        if more_is_here and self._skips < SKIPS_MAX and self.live is not None:
            self._skips += 1
            self._state = _State.IDLE
            yield from self._commit(version)
            return
        self._skips = 0
        self._state = _State.SWAPPING
        self._source = SwapSource.DELTA if fits else SwapSource.HOST
        if self._source is SwapSource.HOST:
            yield from self._commit(version)
        yield HoldTokens(version)
        yield SwapEngine(version, self._source, self.mode)

    def _commit(self, version: Version) -> Iterator[Action]:
        self.host = version
        yield Commit(version)

    def _swapped(self, version: Version, stood_still_s: float) -> Iterator[Action]:
        if self._state is _State.SWAPPING:
            self._state = _State.CHECKING
            self._stood_still_s = stood_still_s
            if self.host != version:
                yield from self._commit(version)
            yield Check(version)

    def _swap_failed(self, message: str) -> Iterator[Action]:
        if self._state is not _State.SWAPPING or self._began is None:
            return
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            yield from self._broken(message)
            return
        # The host has verified the bits, so send the engine all of them instead of the delta.
        version = self._began.version
        if self.host != version:
            yield from self._commit(version)
        self._source = SwapSource.HOST
        yield SwapEngine(version, SwapSource.HOST, self.mode)

    def _checked(self, version: Version, is_equal: bool, now: float) -> Iterator[Action]:
        if self._state is not _State.CHECKING:
            return
        if is_equal:
            self._state = _State.IDLE
            self._failures = 0
            self.live = version
            yield ReleaseTokens()
            yield GoLive(version, self._stood_still_s, now - self._decoded_at)
            return
        message = f"the engine's weights differ from version {version} after the swap"
        self._failures += 1
        yield DiscardTokens()
        if self._failures >= FAILURES_MAX:
            yield from self._broken(message)
            return
        self._state = _State.SWAPPING
        self._source = SwapSource.HOST
        yield HoldTokens(version)
        yield SwapEngine(version, SwapSource.HOST, self.mode)

    def _failed(self, message: str) -> Iterator[Action]:
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            yield from self._broken(message)
            return
        self._state = _State.IDLE
        # One failure may be a bad copy. After a second, the delta or the host copy may be wrong; a keyframe needs neither.
        if self._failures > 1:
            self.host = None
        yield StartOver(self.host, message)

    def _broken(self, message: str) -> Iterator[Action]:
        self._state = _State.BROKEN
        yield DiscardTokens()
        yield GiveUp(f"no version could be put live, {self._failures} times in a row; the last time: {message}")
