"""Events and actions of the batcher (batcher.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, Rollout, RolloutSegment, SamplingParams, SegmentVerdict
from echo2.learner.batch import Batch, TrainGroup
from echo2.learner.episodes import NOBODY, TurnOf
from echo2.learner.exam import ExamResult
from echo2.learner.group import Draw, Group
from echo2.learner.history import Record

# ---- events


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run starts, or resumes with what the journal restored. `exams`: groups of evaluations that have no result yet,
    by version."""

    exams: Mapping[Version, Sequence[Group]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reported:
    """The segments of one report, from worker `sender`, which holds the lease as its `attempt`."""

    segments: tuple[RolloutSegment, ...]
    attempt: int
    sender: PeerId = NOBODY


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A worker takes over a group as `attempt` and asks for the tokens that the learner holds."""

    group_id: GroupId
    attempt: int


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The reward of a finished rollout, given after its last turn; None if scoring failed. `parts`: named components."""

    group_id: GroupId
    index: int
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Said:
    """The environment answered the finished turn `before` with `token_ids`, so another turn follows."""

    before: TurnOf
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallAsked:
    """An agent asks for a completion of `prompt_token_ids`, as the next call of `chain`; None starts a new chain.
    `temperature`: if not None, replaces the evaluation's temperature, when the problem belongs to an evaluation."""

    root: GroupId
    chain: int | None
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An agent's episode ended. `chains`: how many calls of each chain count. `reward`: None if the episode failed.

    If not `is_final`, the episode was lost, and another one takes its seat.
    """

    root: GroupId
    chains: Mapping[int, int]
    reward: float | None
    is_final: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptsDrawn:
    """The answer to `AskPrompts`. Fewer draws than asked for means that the prompts are exhausted."""

    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True)
class CapPlanned:
    """The plan's bound on rollouts in flight; None if there is no plan."""

    rollouts: int | None


@dataclass(frozen=True, slots=True)
class VersionLeft:
    """From now on workers may name this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class WorkerBarred:
    """The worker was banned or quarantined: nothing that it reported may be trained on."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class BatchWanted:
    """The trainer is free and asks for a batch."""


@dataclass(frozen=True, slots=True)
class ExamDue:
    """Evaluate this version, which was published: after the running evaluation, and instead of any version that waits."""

    version: Version


@dataclass(frozen=True, slots=True)
class QuestionsDrawn:
    """The answer to `AskQuestions`."""

    version: Version
    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True)
class ExamTick:
    """Sent about every second; ends or moves an evaluation that makes no progress. `now`: seconds, monotonic."""

    now: float


@dataclass(frozen=True, slots=True)
class OffersEnded:
    """Stop offering groups."""


Event = (
    Resumed
    | Reported
    | TakenOver
    | Rewarded
    | Said
    | CallAsked
    | EpisodeEnded
    | PromptsDrawn
    | CapPlanned
    | VersionLeft
    | WorkerBarred
    | WorkerReleased
    | BatchWanted
    | ExamDue
    | QuestionsDrawn
    | ExamTick
    | OffersEnded
)

# ---- actions


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """Answers a report. `is_synced_first`: sync the journal to disk before the answer is sent."""

    verdicts: tuple[SegmentVerdict, ...]
    is_synced_first: bool


@dataclass(frozen=True, slots=True)
class Hand:
    """Sends the held rollouts of a group to the worker that takes it over; None: the group is closed, or a later attempt
    has taken it over."""

    rollouts: tuple[Rollout, ...] | None


@dataclass(frozen=True, slots=True)
class Keep:
    """Appends the record to the journal."""

    record: Record


@dataclass(frozen=True, slots=True)
class Score:
    """Asks the task or environment for the reward of this finished turn, or for the next turn's prompt."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Drive:
    """Lets agents start episodes of this problem."""

    spec: GroupSpec
    draw: Draw


@dataclass(frozen=True, slots=True)
class CallOpened:
    """The group as which an agent's call is leased; None: the group of its episode is closed."""

    group_id: GroupId | None


@dataclass(frozen=True, slots=True)
class CallGrown:
    """More tokens of an agent's call arrived; it is not finished."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class CallSampled:
    """An agent's call is finished: `rollout` is its completion."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class AskPrompts:
    """Draws the prompts in `again` once more, then up to `fresh` new ones. `PromptsDrawn` must follow, even if it is empty."""

    again: tuple[Draw, ...]
    fresh: int


@dataclass(frozen=True, slots=True)
class OfferGroups:
    specs: tuple[GroupSpec, ...]


@dataclass(frozen=True, slots=True)
class Close:
    group_ids: tuple[GroupId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AccuseWorker:
    peer_id: PeerId
    text: str


@dataclass(frozen=True, slots=True)
class Fared:
    """The rewards of the group on prompt `cursor`, for the curriculum."""

    cursor: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Trains on this batch, once its record is on disk."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class AskQuestions:
    """Makes the prompts of these questions of a version's evaluation; `QuestionsDrawn` must follow."""

    version: Version
    numbers: range


@dataclass(frozen=True, slots=True)
class Answered:
    """All rollouts of an evaluation question have rewards. The group is audited and shown, never trained on."""

    group: TrainGroup


@dataclass(frozen=True, slots=True)
class Examined:
    """The evaluation ended, with a result or given up."""

    result: ExamResult


@dataclass(frozen=True, slots=True)
class WakeTrainer:
    """Wakes the trainer, if it waits for a batch: one is ready, or none will come."""


Action = (
    AnswerReport
    | Hand
    | Keep
    | Score
    | Drive
    | CallOpened
    | CallGrown
    | CallSampled
    | AskPrompts
    | OfferGroups
    | Close
    | AccuseWorker
    | Fared
    | Train
    | WakeTrainer
    | AskQuestions
    | Answered
    | Examined
)
