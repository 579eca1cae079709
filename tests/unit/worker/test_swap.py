"""The swap machine: what is live was verified twice, and no failure leaves it in between."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.base.ids import Version
from echo2.worker import swap as s
from echo2.worker.engine import SwapMode
from echo2.worker.swap import FAILURES_MAX, SKIPS_MAX, SwapMachine

MODE = SwapMode.RECOMPUTE_KV


class SwapRules(RuleBasedStateMachine):
    """A host, an engine and a stream of artifacts, any of which may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sut = SwapMachine(MODE)
        self.host: int | None = None
        self.engine: int | None = None
        self.engine_is_right = True
        self.is_holding = False
        self.coming: tuple[int, int | None] | None = None
        self.swapping: s.SwapEngine | None = None
        self.checking: int | None = None
        self.live: int | None = None
        self.gave_up = False
        self.newest = 0

    def send(self, event: s.Event) -> None:
        for action in self.sut.handle(event, self.now):
            match action:
                case s.SwapEngine():
                    assert self.is_holding, "tokens are held before the weights change"
                    if action.source is s.SwapSource.DELTA:
                        assert self.coming is not None and self.coming[1] in (None, self.engine)
                        assert self.engine_is_right, "a delta goes upon a right engine only"
                    else:
                        assert self.host == action.version, "the host holds what the engine is given"
                    self.swapping = action
                case s.Check(version):
                    self.checking = version
                case s.Commit(version):
                    assert self.coming is not None and self.coming[0] == version
                    assert self.coming[1] in (None, self.host), "a delta goes upon its parent only"
                    self.host = version
                case s.HoldTokens():
                    self.is_holding = True
                case s.ReleaseTokens():
                    assert self.engine_is_right
                    self.is_holding = False
                case s.DiscardTokens():
                    self.is_holding = False
                case s.GoLive(version):
                    assert version == self.engine == self.host and self.engine_is_right
                    self.live = version
                    self.coming = None
                case s.StartOver(version):
                    self.coming = None
                    if version is None:
                        self.host = None
                case s.GiveUp():
                    self.gave_up = True
                case s.StartDecoder() | s.DropDecoder():
                    pass

    @precondition(lambda self: self.coming is None and self.swapping is None and self.checking is None)
    @rule(is_keyframe=st.booleans())
    def artifact_begins(self, is_keyframe: bool) -> None:
        self.newest += 1
        parent = None if is_keyframe or self.host is None else self.host
        self.coming = (self.newest, parent)
        self.send(s.ArtifactBegan(Version(self.newest), None if parent is None else Version(parent)))

    @precondition(lambda self: self.coming is not None and self.swapping is None and self.checking is None)
    @rule(more=st.booleans())
    def it_is_decoded(self, more: bool) -> None:
        assert self.coming is not None
        self.send(s.Decoded(Version(self.coming[0]), more))
        if self.swapping is None:
            self.coming = None

    @precondition(lambda self: self.coming is not None and self.swapping is None and self.checking is None)
    @rule(is_bad=st.booleans())
    def it_is_lost(self, is_bad: bool) -> None:
        self.send(s.DecodeFailed("bits are wrong") if is_bad else s.ArtifactGivenUp())
        self.coming = None

    @precondition(lambda self: self.swapping is not None)
    @rule(outcome=st.sampled_from(["good", "wrong", "fails"]))
    def engine_answers(self, outcome: str) -> None:
        assert self.swapping is not None
        version, self.swapping = self.swapping.version, None
        if outcome == "fails":
            self.send(s.SwapFailed("no room"))
            return
        self.engine, self.engine_is_right = version, outcome == "good"
        self.send(s.Swapped(version, 0.01))

    @precondition(lambda self: self.checking is not None)
    @rule()
    def fingerprint_is_compared(self) -> None:
        assert self.checking is not None
        version, self.checking = self.checking, None
        self.send(s.Checked(Version(version), self.engine_is_right))

    @invariant()
    def tokens_of_wrong_weights_are_held_or_the_worker_has_given_up(self) -> None:
        assert self.engine_is_right or self.is_holding or self.gave_up

    @invariant()
    def what_it_says_is_live_was_proven(self) -> None:
        assert self.sut.live == self.live

    def teardown(self) -> None:
        """Once nothing fails any more, the newest version goes live, unless it had given up."""
        for _ in range(10):
            if self.checking is not None:
                self.fingerprint_is_compared()
            elif self.swapping is not None:
                self.engine_answers("good")
            elif self.coming is not None:
                self.it_is_decoded(False)
            else:
                break
        if not self.gave_up:
            self.artifact_begins(False)
            self.it_is_decoded(False)
            if self.swapping is not None:
                self.engine_answers("good")
                self.fingerprint_is_compared()
            assert self.live == self.newest


TestSwap = SwapRules.TestCase
TestSwap.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_overtaken_versions_stay_off_the_engine_but_not_for_ever() -> None:
    machine = SwapMachine(MODE, host=Version(0), live=Version(0))
    for version in range(1, SKIPS_MAX + 1):
        machine.handle(s.ArtifactBegan(Version(version), Version(version - 1)), 0.0)
        assert machine.handle(s.Decoded(Version(version), True), 0.0) == [s.Commit(Version(version))]
    last = Version(SKIPS_MAX + 1)
    machine.handle(s.ArtifactBegan(last, Version(SKIPS_MAX)), 0.0)
    actions = machine.handle(s.Decoded(last, True), 0.0)
    assert actions == [s.Commit(last), s.HoldTokens(last), s.SwapEngine(last, s.SwapSource.HOST, MODE)]


def test_the_machine_gives_up_after_several_failures_in_a_row_and_says_why() -> None:
    machine = SwapMachine(MODE)
    for attempt in range(FAILURES_MAX):
        machine.handle(s.ArtifactBegan(Version(1), None), 0.0)
        actions = machine.handle(s.DecodeFailed("bits are wrong"), 0.0)
        if attempt < FAILURES_MAX - 1:
            assert actions == [s.DropDecoder(), s.StartOver(None, "bits are wrong")]
    assert isinstance(actions[-1], s.GiveUp)
    assert "the last time: bits are wrong" in actions[-1].reason


def test_a_bad_delta_is_fetched_again_and_then_a_keyframe() -> None:
    machine = SwapMachine(MODE, host=Version(3), live=Version(3))
    starts = []
    for _ in range(2):
        machine.handle(s.ArtifactBegan(Version(4), Version(3)), 0.0)
        starts += machine.handle(s.DecodeFailed("bits are wrong"), 0.0)
    assert starts == [
        s.DropDecoder(), s.StartOver(Version(3), "bits are wrong"),
        s.DropDecoder(), s.StartOver(None, "bits are wrong"),
    ]  # fmt: skip
    assert machine.live == 3


def test_adopted_weights_go_live_by_the_same_proof_and_give_way_to_whole_tensors_where_it_fails() -> None:
    machine = SwapMachine(MODE)
    assert machine.handle(s.Adopted(Version(0)), 10_000.0) == [
        s.HoldTokens(Version(0)), s.SwapEngine(Version(0), s.SwapSource.HOST, MODE),
    ]  # fmt: skip
    assert machine.handle(s.Swapped(Version(0), 0.1), 10_001.0) == [s.Check(Version(0))], "the host holds it already"
    assert machine.handle(s.Checked(Version(0), is_equal=False), 10_002.0) == [
        s.DiscardTokens(), s.HoldTokens(Version(0)), s.SwapEngine(Version(0), s.SwapSource.HOST, MODE),
    ]  # fmt: skip
    machine.handle(s.Swapped(Version(0), 0.1), 10_003.0)
    assert machine.handle(s.Checked(Version(0), is_equal=True), 10_004.0) == [
        s.ReleaseTokens(), s.GoLive(Version(0), 0.1, 4.0),
    ], "the time to apply counts from the adoption: a planner believes it"  # fmt: skip
    assert (machine.host, machine.live, machine.is_idle) == (0, 0, True)
