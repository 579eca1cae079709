"""Rollouts as they grow, and the gate at which tokens of unproven weights wait."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from hypothesis import given, strategies as st

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason, FinishReason, Rollout, VersionSpan
from echo2.learner.rollouts.admission import problem_of_end
from echo2.outside import SteadyClock
from echo2.sim.virtual_loop import VirtualLoop
from echo2.worker import generation
from echo2.worker.engines.engine import Engine, EngineStats, GenerateRequest, TokenChunk
from echo2.worker.engines.making import SeveralEngines
from echo2.worker.generation import FIRST_TOKEN_S_MAX, PROBE_S_MAX, TOKENS_EACH, Generation
from echo2.worker.rollouts import TokenGate, expected_remaining
from tests.unit.worker.test_leases import L1, Surroundings, group, held


def chunk(request_id: str, token: int, version: int, reason: FinishReason = FinishReason.UNFINISHED) -> TokenChunk:
    return TokenChunk(request_id, (token,), (-1.0,), (-1.0,), Version(version), reason)


TAKEN = st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(["take", "take", "end", "proof", "wrong"]))


@given(st.lists(TAKEN, max_size=40))
def test_no_token_of_wrong_weights_passes_and_sequences_have_no_gaps(steps: list[tuple[int, bool, str]]) -> None:
    """Of weights that are not proven yet tokens wait; of wrong ones they are thrown away with all that follows in their sequences,
    whose leases are told, and whose end is an abort. Three sequences, each of a lease of its own, one after another."""
    passed: list[TokenChunk] = []
    spoiled: list[LeaseId] = []
    gate = TokenGate(passed.extend, spoiled.append)
    version, is_held, wrong = 0, False, set[int]()
    count, waits, lost = Counter[int](), set[str](), set[str]()
    of = {which: f"{which}.0/0" for which in range(3)}
    for which, begins_swap, what in steps:
        if begins_swap:
            gate.release()
            version, is_held, waits = version + 1, True, set()
            gate.hold(Version(version))
        if what == "proof":
            gate.release()
            is_held, waits = False, set()
        elif what == "wrong" and is_held:
            before = len(spoiled)
            gate.discard()
            assert set(spoiled[before:]) == {name.partition("/")[0] for name in waits}
            wrong, lost = wrong | {version}, lost | waits
            version, is_held, waits = version + 1, False, set()
        elif what in ("take", "end"):
            name, before = of[which], len(passed)
            reason = FinishReason.STOP if what == "end" else FinishReason.UNFINISHED
            gate.take([chunk(name, count[which], version, reason)])
            is_dropped = name in lost and what != "end"
            if is_held and not is_dropped:
                waits.add(name)
            is_passed = len(passed) > before
            assert is_passed == (not is_held and not is_dropped)
            count[which] += 1
            if what == "end":
                of[which] = f"{which}.{len(steps) + len(passed) + len(waits)}.{count[which]}/0"
    gate.release()
    for name in {sampled.request_id for sampled in passed}:
        numbers = [token for sampled in passed if sampled.request_id == name for token in sampled.token_ids]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else name in lost
    assert not [sampled for sampled in passed if sampled.token_ids and sampled.version in wrong]
    ends = [sampled for sampled in passed if sampled.finish_reason is not FinishReason.UNFINISHED]
    of_lost = [end for end in ends if end.request_id in lost]
    assert all(end.finish_reason is FinishReason.ABORTED and not end.token_ids for end in of_lost)


LENGTHS = st.lists(st.integers(0, 500), max_size=20)


@given(length=st.integers(0, 600), room=st.integers(1, 600), siblings=LENGTHS, others=LENGTHS)
def test_siblings_weigh_more_and_only_longer_ones_count(
    length: int, room: int, siblings: list[int], others: list[int]
) -> None:
    assert 1 <= expected_remaining(length, length + room, siblings, others) <= room
    assert expected_remaining(10, 1000, [20, 20], []) == 10
    assert expected_remaining(10, 1000, [20], [60]) == 18
    assert expected_remaining(50, 1000, [20, 20], [60]) == 10
    assert expected_remaining(64, 1000, [20, 20], [60]) == 64


SPEC = replace(group("g", 1, 20), sampling=replace(
    group("g").sampling, max_new_tokens=20, stop_strings=(b"</a>",), stop_piece_ids=(5, 6), stop_pieces=(b"x</", b"a>"))
)  # fmt: skip


def test_tokens_behind_a_stop_string_are_cut_off_and_the_engine_is_stopped() -> None:
    it = Surroundings().begin()
    it.grant(L1, SPEC)
    it.sample("l1/0", 2, 6, 5)
    assert it.running
    it.sample("l1/0", 6, 3, 4)
    assert not it.running
    it.chunks = [TokenChunk("l1/0", (8,), (-1.0,), (-1.0,), Version(0), FinishReason.UNFINISHED), *it.chunks]
    it.deliver()  # was on its way meanwhile
    it.at(3.0)
    (segment,) = it.reports[L1]
    assert segment.token_ids == (2, 6, 5, 6) and segment.finish_reason is FinishReason.STOP
    it.judge(L1)
    assert L1 in it.ended
    other = Surroundings().begin()
    other.grant(L1, SPEC, is_continuation=True)
    other.leases.on_partials(L1, [held("g", 0, (5, 6))])
    assert not other.running, "whoever goes on with it samples nothing behind the string"


def test_the_learner_refuses_what_no_stop_string_ends() -> None:
    def problem(tokens: tuple[int, ...], reason: FinishReason, held: int = 0) -> str | None:
        numbers = (-1.0,) * len(tokens)
        spans = (VersionSpan(Version(0), len(tokens)),)
        return problem_of_end(Rollout(SPEC.group_id, 0, tokens, numbers, numbers, spans, reason), held, SPEC)

    assert problem((2, 5, 6), FinishReason.STOP) is None and problem((2, 9), FinishReason.STOP) is None
    assert "expected a stop token" in str(problem((2, 5, 3), FinishReason.STOP))
    assert "first stop string, got 1 tokens behind it" in str(problem((2, 5, 6, 3), FinishReason.UNFINISHED, held=3))


# ---- the rate before the first lease, and weights that turn out to be wrong


@dataclass
class Fake:
    """Samples `tokens_per_s` from `starts_after_s` on, in all slots together; never more than was asked for."""

    loop: VirtualLoop
    tokens_per_s: float
    starts_after_s: float
    slot_count: int = 4
    draws_by_seed: bool = True
    open: set[str] = field(default_factory=set)
    began: float = 0.0

    def submit(self, request: GenerateRequest) -> None:
        self.began = self.began or self.loop.time()
        self.open.add(request.request_id)

    def stats(self) -> EngineStats:
        worked_s = max(0.0, self.loop.time() - self.began - self.starts_after_s) if self.open else 0.0
        tokens = min(self.slot_count * TOKENS_EACH, int(worked_s * self.tokens_per_s))
        return EngineStats(0, 0, 1_000 + tokens)

    async def abort(self, request_id: str) -> None:
        self.open.discard(request_id)


@pytest.mark.parametrize(
    ("tokens_per_s", "starts_after_s", "expected", "within_s", "engines"),
    [
        (60.0, 0.0, 60.0, PROBE_S_MAX, 1),
        (60.0, 15.0, 60.0, 15.0 + PROBE_S_MAX, 1),  # a first step may take long: it is not part of the rate
        (10.0, 0.0, 10.0, PROBE_S_MAX + 0.2, 1),
        (0.0, 0.0, 0.0, FIRST_TOKEN_S_MAX, 1),
        (1e9, 0.0, 2e3, 0.1, 1),  # done at the first look
        (20.0, 0.0, 80.0, PROBE_S_MAX + 0.2, 4),  # of all engines of the machine
    ],
)
def test_the_rate_is_measured(
    monkeypatch: pytest.MonkeyPatch, tokens_per_s: float, starts_after_s: float, expected: float, within_s: float, engines: int
) -> None:  # fmt: skip
    loop, ports = VirtualLoop(), Surroundings()
    monkeypatch.setattr(generation, "monotonic", loop.time)
    fakes = [Fake(loop, tokens_per_s, starts_after_s) for _ in range(engines)]
    engine = fakes[0] if engines == 1 else SeveralEngines(cast(list[Engine], fakes))
    began = loop.time()
    rate = loop.run_until_complete(Generation(SteadyClock(), ports, ports).measure_rate(cast(Engine, engine)))
    assert rate == pytest.approx(expected, rel=0.1 if engines > 1 else 0.25) and not any(fake.open for fake in fakes)
    assert loop.time() - began <= within_s + 0.05
    loop.close()


async def test_what_is_open_under_wrong_weights_is_thrown_away_and_nothing_begins_before_new_ones() -> None:
    """Also a token of the right version's number that comes only after the proof of the second swap."""
    loop = VirtualLoop()
    engine, ports = Fake(loop, 0.0, 0.0), Surroundings()
    made = Generation(SteadyClock(), ports, ports)
    made.engine = cast(Engine, engine)
    made.leases.on_coordinator(1.0)
    made.leases.on_learner()
    made.leases.on_version_live(Version(5), 8)

    def granted(name: str) -> bool:
        made.leases.grant(LeaseId(name), group(name, 1), 1e6, is_continuation=False)
        return f"{name}/0" in engine.open

    assert granted("a")
    made.gate.hold(Version(5))
    made.gate.discard()
    assert not granted("b") and ports.ended[LeaseId("b")][0] is EndReason.REFUSED
    made.gate.hold(Version(5))
    made.gate.release()
    assert granted("c")
    made.gate.take([TokenChunk("a/0", (7,), (-1.0,), (-1.0,), Version(5), FinishReason.UNFINISHED)])
    made.gate.take([TokenChunk("a/0", (), (), (), Version(5), FinishReason.ABORTED)])
    assert ports.ended[LeaseId("a")][0] is EndReason.HANDED_BACK and not ports.reports
    made.close()
    loop.close()
