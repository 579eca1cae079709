"""What nodes report about themselves, as frozen values. Their limits are checked when messages are parsed (wire/coordinator)."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import PeerId, RunId, Step, Version
from echo2.base.rollout import GroupSpec
from echo2.broadcast.reachability import Access
from echo2.coordinator.leases.lease import HeldLease


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Rates and round-trip time of an access link; 0: not known."""

    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportedLink:
    """A worker's link to a peer. `kind`: direct | reverse | hole-punched | relayed."""

    peer_id: PeerId
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportedLine:
    """A warning or error from a worker's own log."""

    unix_s: float
    is_error: bool
    text: str


_STEP_0, _VERSION_0, _UNKNOWN_LINK = Step(0), Version(0), LinkReport()


@dataclass(frozen=True, slots=True)
class WorkerHello:
    protocol_version: int
    name: str
    run_id: RunId
    addresses: tuple[str, ...] = ()
    price_usd_per_hour: float = 0.0
    is_spot: bool = False
    gpu: str = ""
    engine: str = ""
    provider: str = ""
    slot_count: int = 0
    link: LinkReport = _UNKNOWN_LINK
    held_leases: tuple[HeldLease, ...] = ()
    model_digest: str = ""
    quantisation: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's heartbeat. Rates are per busy second; counts are since the worker's process began."""

    version: Version | None = None
    running_sequences: int = 0
    waiting_sequences: int = 0
    sampled_tokens: int = 0
    finished_rollouts: int = 0
    rollouts_per_s: float = 0.0
    tokens_per_s: float = 0.0
    rollout_s_mean: float = 0.0
    rollout_s_p95: float = 0.0
    swap_s: float = 0.0
    apply_s: float = 0.0
    link: LinkReport = _UNKNOWN_LINK
    sent_chunk_bytes: int = 0
    received_chunk_bytes: int = 0
    newest_chunk_count: int = 0
    newest_chunks_held: int = 0
    newest_version_in_flight: int = 0
    waits_for: str = ""
    waits_since_s: float = 0.0
    fingerprint: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    reach: Access | None = None  # how to reach it, as it found out; None: as in its hello
    links: tuple[ReportedLink, ...] | None = None  # None: unchanged
    log: tuple[ReportedLine, ...] | None = None  # newest last; None: unchanged


@dataclass(frozen=True, slots=True)
class LearnerHello:
    protocol_version: int
    run_id: RunId
    address: str
    model_name: str
    model_config_json: bytes
    model_digest: str
    staleness_bound: int
    rollouts_per_step: int
    rollouts_per_group: int
    step: Step
    newest_version: Version
    open_groups: tuple[GroupSpec, ...] = ()
    full_snapshot_bytes: int = 0
    link: LinkReport = _UNKNOWN_LINK
    step_limit: int = 0
    kappa_is_fixed: bool = False
    kappa: int = 0
    relay_address: str = ""
    longest_sequence_tokens: int = 0
    chunk_address: str = ""  # where it takes connections of the broadcast


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """The learner's report. `lag_histogram[i]`: trained tokens with lag i. `eval_reward`: None before the first evaluation.
    `evaluation_rollouts`: rollouts per step that evaluations need, and `idle_s`: seconds per step that checkpoints and
    publications take, both spread over the steps in between. `audit_s`: seconds per step that the learner spends on scoring for
    audits. `rewards_due`: completions without a reward; `prompts_exhausted`: the groups in flight are the last. `reward_s`: process
    seconds of a rollout's reward; `reward_processes`: computed at once, 0: none waits. `lengths`: sampled tokens of a rollout,
    means of equal shares of the newest, ascending. `discarded_rollouts`: so far, for equal rewards or none.
    `equal_reward_steps`: the newest steps in a row in which no group had two rewards."""

    step: Step = _STEP_0
    newest_version: Version = _VERSION_0
    train_s: float = 0.0
    wait_s: float = 0.0
    reward_mean: float = 0.0
    buffered_rollouts: int = 0
    open_rollouts: int = 0
    trained_rollouts: int = 0
    trained_tokens: int = 0
    dropped_stale_rollouts: int = 0
    duplicate_rollouts: int = 0
    refused_rollouts: int = 0
    over_stale_tokens_trained: int = 0
    lag_histogram: tuple[int, ...] = ()
    utilisation: float = 0.0
    sent_chunk_bytes: int = 0
    waits_for: str = ""
    waits_since_s: float = 0.0
    is_finished: bool = False
    eval_reward: float | None = None
    fingerprint: str = ""
    evaluation_rollouts: float = 0.0
    idle_s: float = 0.0
    audit_s: float = 0.0
    rewards_due: int = 0
    prompts_exhausted: bool = False
    reward_s: float = 0.0
    reward_processes: int = 0
    lengths: tuple[int, ...] = ()
    discarded_rollouts: int = 0
    equal_reward_steps: int = 0


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    version: Version
    parent: Version | None
    artifact_bytes: int
    full_snapshot_bytes: int
    encode_s: float
    fingerprint: str
