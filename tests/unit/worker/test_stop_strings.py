"""A rollout ends with the token that completes a stop string, whatever engine samples it, and wherever reports break."""

from __future__ import annotations

from dataclasses import replace

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import FinishReason, Rollout, SegmentVerdict, Verdict, VersionSpan
from echo2.learner.plausible import problem_of_end
from echo2.worker import duties as d
from echo2.worker.assignments import Assignments
from echo2.worker.engine import TokenChunk
from echo2.worker.options import WorkerLimits
from tests.unit.worker.test_assignments import group

SPEC = replace(group("g", 1, 20), sampling=replace(
    group("g").sampling, max_new_tokens=20, stop_strings=(b"</a>",), stop_piece_ids=(5, 6), stop_pieces=(b"x</", b"a>"))
)  # fmt: skip
REQUEST = "g-1/0"


def chunk(*tokens: int, reason: FinishReason = FinishReason.UNFINISHED) -> TokenChunk:
    numbers = (-0.5,) * len(tokens)
    return TokenChunk(REQUEST, tokens, numbers, numbers, Version(0), reason)


def begun(*, is_continuation: bool = False) -> Assignments:
    made = Assignments(WorkerLimits(leases_max=6, drain_s=2.0))
    for event in (d.CoordinatorCame(1.0), d.LearnerCame(), d.Live(Version(0), 4)):
        made.handle(event, 0.0)
    made.handle(d.Granted(LeaseId("g-1"), SPEC, 100.0, is_continuation), 0.0)
    return made


def test_tokens_behind_a_stop_string_are_cut_off_and_the_engine_is_stopped() -> None:
    worker = begun()
    assert not [a for a in worker.handle(d.Sampled((chunk(2, 6, 5),)), 0.1) if isinstance(a, d.Abort)]
    actions = worker.handle(d.Sampled((chunk(6, 3, 4),)), 0.2)
    assert [a.request_id for a in actions if isinstance(a, d.Abort)] == [REQUEST]
    late = worker.handle(d.Sampled((chunk(8),)), 0.25)
    assert not [a for a in late if isinstance(a, d.Abort)], "on its way meanwhile"
    actions += [*late, *worker.handle(d.Sampled((chunk(reason=FinishReason.ABORTED),)), 0.3)]
    actions += worker.handle(d.DutyTick(), 3.0)
    (report,) = [a for a in actions if isinstance(a, d.Report)]
    (segment,) = report.segments
    assert segment.token_ids == (2, 6, 5, 6) and segment.finish_reason is FinishReason.STOP
    verdict = SegmentVerdict(SPEC.group_id, 0, Verdict.ADMITTED, 4)
    ended = [a for a in worker.handle(d.Judged(LeaseId("g-1"), (verdict,)), 3.1) if isinstance(a, d.EndLease)]
    assert len(ended) == 1


def test_whoever_goes_on_with_a_rollout_that_ended_with_a_stop_string_samples_nothing_behind_it() -> None:
    numbers = (-0.5,) * 2
    held = Rollout(SPEC.group_id, 0, (5, 6), numbers, numbers, (VersionSpan(Version(0), 2),), FinishReason.UNFINISHED)
    worker = begun(is_continuation=True)
    actions = worker.handle(d.PartialsCame(LeaseId("g-1"), (held,)), 0.1)
    assert not [a for a in actions if isinstance(a, d.Submit)]


def test_the_learner_refuses_what_no_stop_string_ends() -> None:
    def problem(tokens: tuple[int, ...], reason: FinishReason, held: int = 0) -> str | None:
        numbers = (-1.0,) * len(tokens)
        spans = (VersionSpan(Version(0), len(tokens)),)
        return problem_of_end(Rollout(SPEC.group_id, 0, tokens, numbers, numbers, spans, reason), held, SPEC)

    assert problem((2, 5, 6), FinishReason.STOP) is None and problem((2, 9), FinishReason.STOP) is None
    assert "expected a stop token" in str(problem((2, 5, 3), FinishReason.STOP))
    assert "first stop string, got 1 tokens behind it" in str(problem((2, 5, 6, 3), FinishReason.UNFINISHED, held=3))
