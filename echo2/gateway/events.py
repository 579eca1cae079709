"""Events and actions of the gateway's sessions (sessions.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo2.gateway.requests import CallRequest
from echo2.gateway.tree import Wording

# ---- events


@dataclass(frozen=True, slots=True)
class ProblemOpened:
    """The learner wants `seats` episodes of this problem; `told`: what their agents are told of it. `is_evaluation`: it is
    played before those to train on."""

    root: str
    seats: int
    told: Mapping[str, object]
    is_evaluation: bool = False


@dataclass(frozen=True, slots=True)
class ProblemClosed:
    """It is trained on, or dropped."""

    root: str
    reason: str


@dataclass(frozen=True, slots=True)
class SeatAsked:
    """By an outside harness. Episodes of one `label` are of one problem, whose rewards are compared; empty: any."""

    call_id: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    call_id: int
    session_id: str
    request: CallRequest


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of what a call adds, or why there are none. `number`: as `Encode` has it."""

    session_id: str
    number: int
    token_ids: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CallRefused:
    """What a client of this episode sent was no call: it counts as one, since reading it cost time."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Leased:
    """What became of an `Ask`: the group and the chain; an empty group: the problem is gone."""

    call_id: int
    choice: int
    group_id: str
    chain: int


@dataclass(frozen=True, slots=True)
class CallTokens:
    """A call's completion. `logprobs` are those of sampling, in nats; `is_cut`: it ended for its length."""

    group_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class CallGrew:
    """What there is of a completion that goes on."""

    group_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Whoever made the call does not wait for it any more; a second try of the same call takes its answer."""

    call_id: int


@dataclass(frozen=True, slots=True)
class CallBroke:
    """An error that nobody foresaw in handling it, by its class."""

    call_id: int
    name: str


@dataclass(frozen=True, slots=True)
class EpisodeRewarded:
    """By the harness or the task; the episode ends with it."""

    session_id: str
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """For a reason that is not the model's: the harness or its tools broke, or scoring failed."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class HarnessDone:
    """It ended well and gave no reward: the task has the word."""

    session_id: str


@dataclass(frozen=True, slots=True)
class GatewayTick:
    """Every second or so."""


Event = (
    ProblemOpened
    | ProblemClosed
    | SeatAsked
    | Called
    | Encoded
    | CallRefused
    | Leased
    | CallTokens
    | CallGrew
    | ClientLeft
    | CallBroke
    | EpisodeRewarded
    | EpisodeFailed
    | HarnessDone
    | GatewayTick
)

# ---- actions


@dataclass(frozen=True, slots=True)
class RunHarness:
    """Begin an episode with the harness that echo2 runs."""

    session_id: str
    key: str
    told: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StopHarness:
    session_id: str


@dataclass(frozen=True, slots=True)
class Encode:
    """A long text is to become tokens beside the loop, and to come back as `Encoded`. `number`: the call's for good, also when a
    client's second try takes it over."""

    session_id: str
    number: int
    wording: Wording


@dataclass(frozen=True, slots=True)
class Ask:
    """Have a completion leased and come back with `Leased`. `chain` None: it begins one. `temperature` None: the problem's own."""

    call_id: int
    choice: int
    root: str
    chain: int | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stops: tuple[str, ...]
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a call as its client reads it."""

    text: str
    tool_calls: tuple[Mapping[str, object], ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str  # stop | length | tool_calls


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a streamed completion's text."""

    call_id: int
    text: str


@dataclass(frozen=True, slots=True)
class CallAnswer:
    call_id: int
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """`retry_after_s` 0: there is no use in trying again."""

    call_id: int
    status: int
    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seated:
    """An outside harness has its episode."""

    call_id: int
    session_id: str
    key: str
    root: str
    seat: int
    told: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class AskScore:
    """Have the task score the last completion of the episode, and come back with its reward, or with `EpisodeFailed`."""

    session_id: str
    root: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EpisodeLost:
    """It failed, for this reason, which the log is to say."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndEpisode:
    """`chains`: how many calls of each count. `reward` None: it failed. Not `is_final`: another takes its seat."""

    root: str
    chains: Mapping[int, int]
    reward: float | None
    parts: Mapping[str, float]
    is_final: bool


Action = (
    RunHarness
    | StopHarness
    | Encode
    | Ask
    | CallPiece
    | CallAnswer
    | Refuse
    | Seated
    | AskScore
    | EpisodeLost
    | EndEpisode
)
