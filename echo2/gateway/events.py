"""Events and actions of the gateway's sessions (sessions.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo2.gateway.requests import CallRequest
from echo2.gateway.tree import Wording

# ---- events


@dataclass(frozen=True, slots=True)
class ProblemOpened:
    """The learner wants `seats` episodes of this problem. `told`: what their agents learn about it. `is_evaluation`: it is played
    before training problems."""

    root: str
    seats: int
    told: Mapping[str, object]
    is_evaluation: bool = False


@dataclass(frozen=True, slots=True)
class ProblemClosed:
    """The learner has trained on the problem, or dropped it."""

    root: str
    reason: str


@dataclass(frozen=True, slots=True)
class SeatAsked:
    """An outside harness asks for an episode. Episodes with the same `label` get the same problem, so that their rewards can be
    compared; empty: any problem."""

    call_id: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    call_id: int
    session_id: str
    request: CallRequest


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoded tokens that a call adds, or the `problem` that encoding met. `number`: as in `Encode`."""

    session_id: str
    number: int
    token_ids: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CallRefused:
    """A client of this episode sent a malformed call. It counts towards the call limit, since parsing it cost time."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to an `Ask`: the leased group and its chain. An empty group ID: the problem is gone."""

    call_id: int
    choice: int
    group_id: str
    chain: int


@dataclass(frozen=True, slots=True)
class CallTokens:
    """A finished completion. `logprobs`: recorded at sampling, in nats. `is_cut`: it hit the length limit."""

    group_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class CallGrew:
    """All tokens so far of an unfinished completion."""

    group_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client disconnected; a retry of the same call gets its answer."""

    call_id: int


@dataclass(frozen=True, slots=True)
class CallBroke:
    """Handling the call raised an unexpected error. `name`: the error's class."""

    call_id: int
    name: str


@dataclass(frozen=True, slots=True)
class EpisodeRewarded:
    """The harness or the task gave a reward, which ends the episode."""

    session_id: str
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """The episode failed through no fault of the model: the harness or its tools broke, or scoring failed."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class HarnessDone:
    """The harness finished without giving a reward, so the task scores the episode."""

    session_id: str


@dataclass(frozen=True, slots=True)
class GatewayTick:
    """Sent about once a second."""


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
    """Start an episode with echo2's own harness."""

    session_id: str
    key: str
    told: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StopHarness:
    session_id: str


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode a long text off the event loop, and report `Encoded`. `number`: the call's permanent number, which stays the same if a
    retry takes the call over."""

    session_id: str
    number: int
    wording: Wording


@dataclass(frozen=True, slots=True)
class Ask:
    """Lease a completion, and report `Leased`. `chain` None: start a new one. `temperature` None: use the problem's own."""

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
    """One completion of a call, as returned to the client."""

    text: str
    tool_calls: tuple[Mapping[str, object], ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str  # stop | length | tool_calls


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of a streamed completion's text."""

    call_id: int
    text: str


@dataclass(frozen=True, slots=True)
class CallAnswer:
    call_id: int
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a call. `retry_after_s` 0: a retry cannot succeed."""

    call_id: int
    status: int
    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seated:
    """An outside harness gets its episode."""

    call_id: int
    session_id: str
    key: str
    root: str
    seat: int
    told: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class AskScore:
    """Let the task score the episode's last completion, and report `EpisodeRewarded` or `EpisodeFailed`."""

    session_id: str
    root: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EpisodeLost:
    """Log that the episode failed, and why."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndEpisode:
    """End an episode. `chains`: how many calls of each chain count. `reward` None: it failed. `is_final` false: another episode
    takes its seat."""

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
