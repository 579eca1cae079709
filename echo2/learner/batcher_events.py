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
    """The run begins, or goes on after a restart with what the journal gave back. `exams`: groups of evaluations without a
    result, by version."""

    exams: Mapping[Version, Sequence[Group]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reported:
    """The segments of one report of the lease's `attempt`, which the worker `sender` holds."""

    segments: tuple[RolloutSegment, ...]
    attempt: int
    sender: PeerId = NOBODY


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A worker goes on with a group as `attempt` and asks what is held of it."""

    group_id: GroupId
    attempt: int


@dataclass(frozen=True, slots=True)
class Rewarded:
    """Of a finished rollout, to the last of its turns; None when scoring it failed."""

    group_id: GroupId
    index: int
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Said:
    """The world answered a finished turn with words: another turn follows."""

    before: TurnOf
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallAsked:
    """An agent asks for a completion of `prompt_token_ids`: behind the last call of `chain`, or of a chain that begins.
    `temperature`: of a problem that evaluates, another than the evaluation's."""

    root: GroupId
    chain: int | None
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An agent's episode: how many calls of each of its `chains` count, and their reward; None: it failed.

    Not `is_final`: it was lost, and another takes its seat.
    """

    root: GroupId
    chains: Mapping[int, int]
    reward: float | None
    is_final: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptsDrawn:
    """Prompts that were asked for. Fewer than were asked for: there are no more."""

    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True)
class CapPlanned:
    """The plan's bound on rollouts in flight; None while there is no plan."""

    rollouts: int | None


@dataclass(frozen=True, slots=True)
class VersionLeft:
    """From now on workers may name this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class WorkerBarred:
    """Nothing that this worker reported is to be trained on."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class BatchWanted:
    """The trainer is free."""


@dataclass(frozen=True, slots=True)
class ExamDue:
    """This version, which has left, is to be evaluated; behind the evaluation under way, and instead of one that waits."""

    version: Version


@dataclass(frozen=True, slots=True)
class QuestionsDrawn:
    """Questions that were asked for."""

    version: Version
    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True)
class ExamTick:
    """Told every second or so: an evaluation that does not go on is ended by it."""

    now: float


@dataclass(frozen=True, slots=True)
class OffersEnded:
    """No groups are offered any more."""


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
    """`is_synced_first`: the journal must be on the disk before the worker reads it."""

    verdicts: tuple[SegmentVerdict, ...]
    is_synced_first: bool


@dataclass(frozen=True, slots=True)
class Hand:
    """What is held of a group, to the worker that takes it over; None: it is closed, or taken over by a later attempt."""

    rollouts: tuple[Rollout, ...] | None


@dataclass(frozen=True, slots=True)
class Keep:
    """In the journal."""

    record: Record


@dataclass(frozen=True, slots=True)
class Score:
    """Ask the world what it says to this finished turn."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Drive:
    """Agents may begin with the episodes of this problem."""

    spec: GroupSpec
    draw: Draw


@dataclass(frozen=True, slots=True)
class CallOpened:
    """As which group an agent's call is leased; None: the group of its episode is gone."""

    group_id: GroupId | None


@dataclass(frozen=True, slots=True)
class CallGrown:
    """More of an agent's call has come; it goes on."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class CallSampled:
    """An agent's call has its completion."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class AskPrompts:
    """Draw these `again`, then up to `fresh` new ones, and come back with `PromptsDrawn`, even with none."""

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
    """How the group on prompt `cursor` fared, for the curriculum."""

    cursor: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """On this batch, once its record is on the disk."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class AskQuestions:
    """Make the prompts of these questions of a version's evaluation and come back with `QuestionsDrawn`."""

    version: Version
    numbers: range


@dataclass(frozen=True, slots=True)
class Answered:
    """A question of the evaluation is answered: to be audited and shown, never to be trained on."""

    group: TrainGroup


@dataclass(frozen=True, slots=True)
class Examined:
    """The evaluation has ended."""

    result: ExamResult


@dataclass(frozen=True, slots=True)
class WakeTrainer:
    """Whoever waits for a batch: there is one, or there will be none."""


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
