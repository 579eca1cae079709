"""What is live was verified twice: real containers, an engine that may fail or be wrong, artifacts that may be cut or corrupt."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock, call

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.base.errors import EngineError, IntegrityError, VersionMismatch
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason
from echo2.base.staged import StagedVersion
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.catch_up import ArtifactBegun, ArtifactSealed, BlockArrived
from echo2.weights import DeltaHeader, HostWeights, apply_updates, encode_delta, encode_keyframe
from echo2.worker.engines.engine import SwapMode, TokenChunk
from echo2.worker.rollouts import TokenGate
from echo2.worker.weights import FAILURES_MAX, SKIPS_MAX, WeightReceiver, Weights, model_digest

KEY, CONFIG = 7, b"{}"
SHAPE = (4, 8)
MODEL = model_digest(CONFIG, [("w", SHAPE, "bfloat16")]), CONFIG


def published(version: int) -> HostWeights:
    generator = torch.Generator().manual_seed(version)
    return HostWeights.from_tensors({"w": torch.randn(SHAPE, generator=generator).bfloat16()}, Version(version), KEY)


def artifact(version: int, parent: int | None) -> bytes:
    """The bytes of a keyframe, or of a delta from `parent`, as the learner publishes them."""
    target = published(version)
    if parent is None:
        return b"".join(encode_keyframe(target.tensors(), DeltaHeader(Version(version), fingerprint_key=KEY)))
    base = published(parent)
    header = DeltaHeader(Version(version), Version(parent), base.fingerprint(), fingerprint_key=KEY)
    return b"".join(encode_delta(base.tensors(), target.tensors(), header))


class Engine:
    """Applies what it is given. `outcomes`: of the swaps to come; then all are good."""

    def __init__(self, gate: TokenGate) -> None:
        self.version: Version | None = None
        self.outcomes: list[str] = []
        self.gate = gate
        self.weights = {"w": torch.zeros(SHAPE).bfloat16()}
        self.swaps: list[tuple[int, int | None]] = []

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        assert self.gate.is_holding, "tokens are held before the weights change"
        assert staged.parent in (None, self.version), "a delta goes upon its parent only"
        self.swaps.append((staged.version, staged.parent))
        outcome = self.outcomes.pop(0) if self.outcomes else "good"
        if outcome == "fails":
            raise EngineError("no room")
        apply_updates(self.weights, staged.updates())
        if outcome == "wrong":
            self.weights["w"].view(-1).view(torch.int16)[3] ^= 1
        self.version = staged.version
        return 0.01

    async def fingerprint(self, key: int) -> int:
        return HostWeights.from_tensors(self.weights, Version(0), key).fingerprint()

    @property
    def is_right(self) -> bool:
        return self.version is None or torch.equal(self.weights["w"], published(self.version).tensors()["w"])


class Bench:
    """A worker's weights with their engine; notes what they report and which tokens pass."""

    def __init__(self) -> None:
        self.passed: list[TokenChunk] = []
        self.spoiled: list[str] = []
        self.gate = TokenGate(self.passed.extend, self.spoiled.append)
        self.engine = Engine(self.gate)
        self.refetches: list[int | None] = []
        self.weights = Weights(
            self.engine, SwapMode.RECOMPUTE_KV, self.gate, MODEL, self.on_decoded  # type: ignore[arg-type]
        )  # fmt: skip

    def on_decoded(self, is_keyframe: bool, weights_bytes: int, seconds: float) -> None:
        assert weights_bytes == 64 and seconds >= 0.0

    async def take(self, data: bytes, more_is_here: bool = False) -> None:
        self.weights.begin()
        parts = [await self.weights.chunk(data[begin : begin + 40]) for begin in range(0, len(data), 40)]
        if not all([*parts, await self.weights.finish(more_is_here)]):
            self.refetches.append(self.weights.version)
        assert not self.gate.is_holding


class WeightRules(RuleBasedStateMachine):
    """A stream of artifacts and swaps, any of which may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.bench = Bench()
        self.newest = self.failures = 0
        self.gave_up = False

    def take(self, data: bytes, more_is_here: bool = False) -> None:
        try:
            self.runner.run(self.bench.take(data, more_is_here))
        except IntegrityError:
            self.gave_up = True

    @precondition(lambda self: not self.gave_up)
    @rule(
        is_keyframe=st.booleans(), more=st.booleans(),
        outcomes=st.lists(st.sampled_from(["good", "good", "wrong", "fails"]), max_size=3),
    )  # fmt: skip
    def an_artifact_arrives(self, is_keyframe: bool, more: bool, outcomes: list[str]) -> None:
        self.newest += 1
        self.bench.engine.outcomes = list(outcomes)
        self.take(artifact(self.newest, None if is_keyframe else self.bench.weights.version), more)
        if not self.gave_up:
            self.failures = 0 if self.bench.weights.live == self.newest else self.failures
            assert self.bench.weights.version == self.newest
            assert more or self.bench.weights.live == self.newest

    @precondition(lambda self: not self.gave_up)
    @rule(at=st.integers(0, 10_000), is_keyframe=st.booleans(), is_cut=st.booleans())
    def a_bad_artifact_arrives(self, at: int, is_keyframe: bool, is_cut: bool) -> None:
        """Bytes that were changed or are missing count for nothing: live and engine stay, and it is fetched again; after a second
        failure as a keyframe."""
        version, live, count = self.bench.weights.version, self.bench.weights.live, len(self.bench.refetches)
        self.failures += 1
        data = artifact(self.newest + 1, None if is_keyframe else version)
        place = at % len(data)
        self.take(data[:place] if is_cut else data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        if not self.gave_up:
            assert self.bench.weights.live == live and self.bench.weights.version in (version, None)
            assert self.bench.refetches[count:] == [self.bench.weights.version]
            assert self.failures < 2 or self.bench.weights.version is None

    @precondition(lambda self: not self.gave_up)
    @rule(part=st.floats(0, 1))
    def an_artifact_is_dropped_half_way(self, part: float) -> None:
        data, version = artifact(self.newest + 1, None), self.bench.weights.version
        self.bench.weights.begin()
        self.runner.run(self.bench.weights.chunk(data[: int(part * len(data))]))
        self.bench.weights.drop()
        assert self.bench.weights.version == version

    @precondition(lambda self: self.gave_up)
    @rule()
    def it_starts_anew(self) -> None:
        self.bench.weights.close()
        self.bench, self.gave_up, self.failures = Bench(), False, 0

    @invariant()
    def what_is_live_is_what_was_published(self) -> None:
        weights = self.bench.weights
        assert self.gave_up or self.bench.engine.is_right
        if weights.version is not None:
            assert (weights.host.bits("w") == published(weights.version).bits("w")).all()
        if weights.live is not None and weights.version == weights.live:
            assert weights.fingerprint == f"{published(weights.live).fingerprint():016x}"

    def teardown(self) -> None:
        """Once nothing fails any more, the newest version goes live, unless it had given up."""
        if not self.gave_up:
            self.an_artifact_arrives(False, False, [])
        self.bench.weights.close()
        self.runner.close()


TestWeights = WeightRules.TestCase
TestWeights.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


async def test_overtaken_versions_stay_off_the_engine_but_not_for_ever() -> None:
    bench = Bench()
    await bench.take(artifact(0, None))
    for version in range(1, SKIPS_MAX + 1):
        await bench.take(artifact(version, version - 1), more_is_here=True)
        assert (bench.weights.version, bench.weights.live) == (version, 0)
    await bench.take(artifact(SKIPS_MAX + 1, SKIPS_MAX), more_is_here=True)
    assert bench.engine.swaps == [(0, None), (SKIPS_MAX + 1, None)], "the host's whole weights: the delta does not fit"
    assert await bench.weights.next_live() == bench.weights.live == SKIPS_MAX + 1
    await bench.take(artifact(2, None))
    assert bench.weights.live == 2 and bench.engine.is_right, "with a learner that has gone back"


async def test_it_gives_up_after_several_failures_in_a_row_and_says_why() -> None:
    bench = Bench()
    bench.engine.outcomes = ["fails"] * FAILURES_MAX
    with pytest.raises(IntegrityError, match="5 times in a row; the last time: no room"):
        await bench.take(artifact(1, None))
    assert bench.engine.version is None is bench.weights.live
    bench = Bench()  # a delta upon an unproven base that is another model asks for a keyframe at once
    bench.weights.host = published(99)
    bench.weights.host.version = Version(0)
    await bench.take(artifact(4, 0))
    assert bench.refetches == [None] and bench.weights.host.version is None


async def test_a_delta_from_other_weights_than_ours_is_fetched_anew_only_where_it_is_refused_again() -> None:
    """A base checkpoint may be another; once a keyframe has its place, the delta that is here fits, or is the one that is wrong."""
    bench, node, base, delta = Bench(), Mock(), Mock(), ArtifactId(Version(4), Version(0))
    of_another, keyframe = (published(99), published(98)), ArtifactId(Version(0))
    header = DeltaHeader(delta.version, delta.parent, of_another[0].fingerprint(), fingerprint_key=KEY)
    frames = encode_delta(of_another[0].tensors(), published(4).tensors(), header)
    data = {delta: b"".join(frames), keyframe: artifact(0, None)}
    of_another[1].version = Version(0)
    base.candidate = AsyncMock(return_value=of_another[1])
    node.artifacts_available.return_value, node.library.fingerprint_of.return_value = [], ""

    async def progress() -> AsyncIterator[object]:
        for each in (delta, keyframe, delta):
            yield ArtifactBegun(Mock(artifact=each))
            yield BlockArrived(each, data[each])
            yield ArtifactSealed(each, "", len(data[each]))

    node.progress = progress
    generation = Mock(version_may_go_live=AsyncMock(), leases=Mock(exact_leases=[]))
    await WeightReceiver(bench.weights, node, generation, Mock(), base, Mock()).run()
    begins_anew = [call.set_base(None), call.set_live(None)]
    told = [each for each in node.mock_calls if each[0] in ("refetch", "set_base", "set_live")]
    assert told == [*begins_anew, call.refetch(delta), *begins_anew] and bench.weights.live == 0
    assert base.candidate.await_count == 1, "who has weights stands on them"


@pytest.mark.parametrize("outcomes", list(itertools.product(["good", "wrong"], repeat=2)))
async def test_adopted_weights_go_live_by_the_same_proof(tmp_path: Path, outcomes: tuple[str, ...]) -> None:
    bench = Bench()
    bench.engine.outcomes = list(outcomes)
    original, count = bench.engine.swap, itertools.count()

    async def sampling(staged: StagedVersion, mode: SwapMode) -> float:
        paused_s = await original(staged, mode)
        chunk = TokenChunk(f"l/{next(count)}", (1,), (-1.0,), (-1.0,), staged.version, FinishReason.UNFINISHED)
        bench.gate.take([chunk])
        return paused_s

    bench.engine.swap = sampling  # type: ignore[method-assign]
    await bench.weights.adopt(published(0))
    wrong = 0 if outcomes[0] == "good" else outcomes.count("wrong")
    assert bench.weights.live == 0 and [chunk.request_id for chunk in bench.passed] == [f"l/{wrong}"]
    assert bench.spoiled == ["l"] * wrong


async def test_weights_of_another_model_than_the_one_announced_are_refused() -> None:
    bench = Bench()
    tensors = {"w": torch.zeros(8, 4).bfloat16()}
    other = HostWeights.from_tensors(tensors, Version(0), KEY)
    data = b"".join(encode_keyframe(other.tensors(), DeltaHeader(Version(0), fingerprint_key=KEY)))
    with pytest.raises(VersionMismatch, match="names, shapes or types of its tensors differ"):
        await bench.take(data)
    assert MODEL[0] != model_digest(CONFIG, [("w", (8, 4), "bfloat16")])
    assert MODEL[0] != model_digest(b"{ }", [("w", SHAPE, "bfloat16")])
