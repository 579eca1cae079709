"""Every option of a run, grouped by component. One file may serve all roles; each role reads its sections.

Guarantees: frozen, validated, units parsed; imports no torch. A test holds the full list of options, so that a new
option is a visible decision.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from echo2.config.fields import Bytes, BytesPerSecond, Count, Fraction, Port, Positive, Seconds, Section
from echo2.config.task import TaskSection


class RunSection(Section):
    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", description="Names the run and its folder.")
    ] = "run"
    folder: Annotated[str, Field(description="Folder that contains the run folders.")] = "runs"
    seed: Annotated[int, Field(ge=0, description="Seeds the order of prompts and the sampling of tokens.")] = 0


class ModelSection(Section):
    path: Annotated[str, Field(description="Local folder in Hugging Face layout, or a hub id.")] = ""
    weights_dtype: Annotated[
        Literal["bfloat16", "float32"], Field(description="Precision of the published policy that workers sample from.")
    ] = "bfloat16"
    lora_rank: Annotated[
        int,
        Field(ge=0, le=4096, description="Trains and publishes a LoRA adapter of this rank; 0: trains all weights."),
    ] = 0
    lora_alpha: Annotated[
        int, Field(ge=0, description="The adapter is scaled by alpha / rank; 0: alpha is twice the rank.")
    ] = 0


class AgentSection(Section):
    """Agents that use OpenAI's API produce the prompts, call by call; enabled by a harness or an address."""

    harness: Annotated[
        str,
        Field(
            description="module:function or command that plays one episode; empty: external agents request episodes."
        ),
    ] = ""
    listen: Annotated[
        str, Field(description="HOST:PORT of the gateway; empty: a free loopback port with a harness, none without.")
    ] = ""
    tls_certificate: Annotated[str, Field(description="PEM file; needed if agent.listen is not loopback.")] = ""
    tls_key: Annotated[str, Field(description="PEM file with the certificate's key.")] = ""
    turns: Annotated[Count, Field(description="Most calls in one conversation; workers reserve context for them.")] = 8
    idle_timeout: Annotated[
        Seconds, Field(gt=0, description="An episode without a call for this long counts as lost and is restarted.")
    ] = 600.0
    episode_timeout: Annotated[Seconds, Field(gt=0, description="An episode that lasts longer counts as lost.")] = (
        3600.0
    )
    restarts: Annotated[
        int, Field(ge=0, description="How often a lost episode is restarted before its rollout is dropped.")
    ] = 2
    at_once: Annotated[int, Field(ge=1, description="Episodes that echo2 plays with its harness in parallel.")] = 64

    @property
    def is_on(self) -> bool:
        return bool(self.harness or self.listen)


class SamplingSection(Section):
    temperature: Annotated[float, Field(ge=0, le=100, description="Divides the logits; 0 is greedy.")] = 1.0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="Keeps the smallest set of tokens with this mass; 1: off.")
    ] = 1.0
    top_k: Annotated[int, Field(ge=0, description="Keeps the k likeliest tokens; 0: off.")] = 0
    max_new_tokens: Annotated[Count, Field(description="Longest completion, in tokens.")] = 1024
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
        Field(max_length=16, description="Strings that end a completion, in addition to the model's own stop tokens."),
    ] = ()
    max_prompt_tokens: Annotated[
        Count, Field(description="Longest prompt, in tokens; longer ones are skipped. Workers reserve context for it.")
    ] = 1024


class StalenessSection(Section):
    bound: Annotated[
        int, Field(ge=0, le=64, description="S: no token older than this many steps is trained on; 0: synchronous.")
    ] = 4
    kappa: Annotated[int, Field(ge=0, description="Steps between publications; 0: the planner chooses.")] = 0

    @model_validator(mode="after")
    def _kappa_fits(self) -> Self:
        if self.kappa > max(1, self.bound):
            raise ValueError(
                f"kappa: expected at most the staleness bound {max(1, self.bound)} (0: the planner chooses), got {self.kappa}"
            )
        return self


class LearnerSection(Section):
    steps: Annotated[Count, Field(description="Optimiser steps of the run.")] = 200
    prompts_per_step: Annotated[Count, Field(description="Groups that one step trains on.")] = 16
    rollouts_per_prompt: Annotated[Count, Field(description="n: completions of each prompt.")] = 16
    lr: Annotated[Positive, Field(description="Learning rate of AdamW.")] = 1e-6
    warmup_steps: Annotated[int, Field(ge=0, description="Steps over which the learning rate rises from 0.")] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], Field(description="Shape of the learning rate after the warm-up.")
    ] = "constant"
    scale_lr_by_ess: Annotated[
        bool,
        Field(
            description="Lowers a step's learning rate when few rollouts carry most of the importance weight (VCPO)."
        ),
    ] = False
    beta1: Annotated[Fraction, Field(description="AdamW's first moment decay.")] = 0.9
    beta2: Annotated[Fraction, Field(description="AdamW's second moment decay.")] = 0.99
    adam_epsilon: Annotated[Positive, Field(description="AdamW's epsilon, outside the root.")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="AdamW's decoupled weight decay.")] = 0.0
    grad_clip: Annotated[Positive, Field(description="Largest global gradient norm.")] = 1.0
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "batch_std", "rloo", "mc_grpo", "vcpo"],
        Field(description="Baseline and scale of group advantages (docs/algorithms.md)."),
    ] = "grpo"
    updates_per_batch: Annotated[
        Count,
        Field(description="Optimiser updates per step, each on its share of the groups; at most prompts_per_step."),
    ] = 1
    objective: Annotated[
        Literal["auto", "token", "gspo", "cispo", "sapo", "vespo", "m2po"],
        Field(
            description="How the importance ratio is formed and bounded (docs/algorithms.md); auto: by the staleness bound."
        ),
    ] = "auto"
    normalisation: Annotated[
        Literal["auto", "dapo", "bnpo", "dr_grpo", "grpo", "luspo"],
        Field(description="What the summed loss is divided by; auto: by the objective."),
    ] = "auto"
    correction: Annotated[
        Literal["none", "behaviour", "tis_token", "tis_sequence", "masked", "masked_sequence", "decoupled"],
        Field(description="Correction for stale samples (docs/algorithms.md says up to which S each one works)."),
    ] = "behaviour"
    clip_low: Annotated[Positive, Field(description="Lower clip of the ratio, 1 - this.")] = 0.2
    clip_high: Annotated[Positive, Field(description="Upper clip of the ratio, 1 + this.")] = 0.28
    is_cap: Annotated[Positive, Field(description="Largest weight of the truncated corrections.")] = 2.0
    is_floor: Annotated[Fraction, Field(description="Smallest weight of the truncated corrections; 0: none.")] = 0.0
    is_band: Annotated[
        tuple[float, float], Field(description="The masked corrections drop weights outside this range.")
    ] = (0.5, 5.0)
    sapo_temperatures: Annotated[
        tuple[Positive, Positive],
        Field(description="Temperatures of sapo's gate: for positive advantages, and for others."),
    ] = (1.0, 1.05)
    vespo_positive: Annotated[
        tuple[Positive, Positive], Field(description="vespo's k and lambda for advantages of 0 or more.")
    ] = (2.0, 3.0)
    vespo_negative: Annotated[
        tuple[Positive, Positive], Field(description="vespo's k and lambda for negative advantages.")
    ] = (3.0, 2.0)
    second_moment_max: Annotated[Positive, Field(description="m2po's limit on a rollout's mean squared log-ratio.")] = (
        0.04
    )
    off_policy_nats_max: Annotated[
        float,
        Field(
            ge=0,
            description="Drops negative-advantage rollouts whose likelihood fell by more nats per token than this; 0: none.",
        ),
    ] = 0.0
    train_on_truncated: Annotated[
        bool, Field(description="Trains on completions cut off at max_new_tokens; they count in the baseline anyway.")
    ] = True
    ratio_ceiling: Annotated[
        float, Field(ge=0, description="Bounds the ratio for negative advantages (dual clip); 0: off.")
    ] = 0.0
    drop_equal_groups: Annotated[
        bool,
        Field(
            description="Dynamic sampling: replaces groups with equal rewards (no gradient), up to a limit per step."
        ),
    ] = False
    prune_hopeless: Annotated[
        bool,
        Field(
            description="Stops rollouts that repeat a phrase or have had low confidence for long; they are scored as is."
        ),
    ] = False
    gradient_checkpointing: Annotated[
        bool | Literal["auto", "selective"],
        Field(
            description="Recomputes layers in the backward pass: less memory, a third more time; selective: half of it; "
            "auto: by the model."
        ),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "dense", "flex"],
        Field(
            description="Attention over packed rows: dense masks, or FlexAttention; auto: flex on a GPU if both agree."
        ),
    ] = "auto"
    replicas: Annotated[
        int,
        Field(
            ge=1,
            description="Copies of the weights among the learner's ranks (HSDP); each copy is sharded over ranks / replicas ranks.",
        ),
    ] = 1
    replay_routing: Annotated[
        bool,
        Field(
            description="Mixture of experts: workers report which experts computed each token; training uses the same ones."
        ),
    ] = False
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Field(description="Where metrics go in addition to metrics.jsonl."),
    ] = ()
    store_bytes: Annotated[Bytes, Field(description="Disk space for chunks; 0: twice the published weights.")] = 0
    metrics_port: Annotated[
        Port, Field(description="Port of the learner's Prometheus endpoint on loopback; 0: none.")
    ] = 0
    overlong_buffer_tokens: Annotated[
        int, Field(ge=0, description="Completions lose reward within this many tokens of the limit; 0: off.")
    ] = 0
    kl_coefficient: Annotated[
        float, Field(ge=0, description="Weight of the k3 KL penalty to the base model; 0: off.")
    ] = 0.0
    kl_weighted_by_ratio: Annotated[
        bool, Field(description="Multiplies the KL penalty by the ratio: unbiased off policy. false: plain k3.")
    ] = True
    token_budget: Annotated[
        int,
        Field(
            ge=0,
            description="Tokens per packed micro-batch; bounds activation memory; 0: as many as machine and model allow.",
        ),
    ] = 0
    threads: Annotated[int, Field(ge=0, description="CPU threads of the trainer; 0: all cores but one.")] = 0
    emulated_step_s: Annotated[
        Seconds, Field(description="A step takes at least this long, for experiments; 0: off.")
    ] = 0.0
    device: Annotated[str, Field(description="Where the trainer runs: auto, cpu, cuda, cuda:0 ...")] = "auto"
    checkpoint_every_steps: Annotated[
        int,
        Field(
            ge=0,
            description="Steps between checkpoints; a restart repeats at most this many; 0: by what both cost, at most 20.",
        ),
    ] = 0
    checkpoints_kept: Annotated[Count, Field(description="Newest checkpoints kept on disk.")] = 2
    keyframe_every_versions: Annotated[
        Count, Field(description="Versions between full snapshots, which newcomers start from.")
    ] = 16
    audit_share: Annotated[
        Fraction, Field(description="Share of rollouts that are scored again to find cheating workers; 0: none.")
    ] = 0.12
    audit_fleet_share: Annotated[
        Fraction,
        Field(
            description="Tokens that workers may process for audits, as a share of those sampled; 0: the learner does all audits."
        ),
    ] = 0.3
    drafting_workers: Annotated[
        bool,
        Field(
            description="Allows speculative decoding, whose tokens do not follow the leases' seeds; else such reports are refused."
        ),
    ] = False
    host: Annotated[str, Field(description="Address that the learner listens on.")] = "127.0.0.1"
    advertise: Annotated[str, Field(description="host:port at which workers reach it; empty: where it listens.")] = ""
    port: Annotated[Port, Field(description="Port of ingest and broadcast; 0: any free one.")] = 0
    relay_port: Annotated[
        Port, Field(description="Relay port for workers behind NAT if the coordinator's relay fails; 0: any free one.")
    ] = 0

    @model_validator(mode="after")
    def _objective_holds(self) -> Self:
        if self.updates_per_batch > self.prompts_per_step:
            raise ValueError(
                f"updates_per_batch: expected at most prompts_per_step {self.prompts_per_step}, because each update trains on "
                f"whole groups, got {self.updates_per_batch}"
            )
        if not 0 <= self.is_band[0] < 1 < self.is_band[1]:
            raise ValueError(f"is_band: expected a lower bound below 1 and an upper one above it, got {self.is_band}")
        if self.is_floor > self.is_cap:
            raise ValueError(f"is_floor: expected at most is_cap {self.is_cap}, got {self.is_floor}")
        if self.objective == "vespo" and self.correction in ("tis_sequence", "masked_sequence"):
            raise ValueError(
                f"correction: expected a per-token one, because the objective vespo weighs whole rollouts, got {self.correction}"
            )
        return self


class BroadcastSection(Section):
    chunk_bytes: Annotated[
        Bytes,
        Field(
            ge=4096,
            le=4 << 20,
            description="Largest chunk; smaller on slow uplinks, larger for more than 16384 chunks.",
        ),
    ] = 256 << 10
    delta_setting: Annotated[
        Literal["auto", "fast", "dense"],
        Field(description="Trades coding speed for delta size; auto: by link and cores."),
    ] = "auto"
    uplink_limit: Annotated[
        BytesPerSecond, Field(description="The learner never sends faster than this; 0: no limit.")
    ] = 0.0
    emulated_uplink: Annotated[
        BytesPerSecond, Field(description="Throttles the learner's sending, for experiments; 0: off.")
    ] = 0.0
    emulated_downlink: Annotated[
        BytesPerSecond, Field(description="Throttles the learner's receiving, for experiments; 0: off.")
    ] = 0.0
    emulated_rtt: Annotated[
        Seconds, Field(description="Delays the learner's messages by half of this, for experiments; 0: off.")
    ] = 0.0


class CoordinatorSection(Section):
    host: Annotated[str, Field(description="Address that the coordinator listens on.")] = "127.0.0.1"
    advertise: Annotated[str, Field(description="Host that join links name; empty: the one it listens on.")] = ""
    enrol_port: Annotated[Port, Field(description="Port for enrolment, named in join links.")] = 8418
    port: Annotated[Port, Field(description="Port of the control streams (mutual TLS).")] = 8419
    dashboard_port: Annotated[Port, Field(description="Port of the dashboard and /metrics.")] = 8420
    relay_port: Annotated[Port, Field(description="Relay port for workers behind NAT (libp2p).")] = 8423
    heartbeat_interval: Annotated[Seconds, Field(gt=0, description="Time between a node's heartbeats.")] = 5.0
    suspect_after: Annotated[Seconds, Field(gt=0, description="A worker silent for this long gets no new leases.")] = (
        15.0
    )
    gone_after: Annotated[
        Seconds, Field(gt=0, description="The leases of a worker silent for this long go to others.")
    ] = 45.0
    lease_timeout: Annotated[
        Seconds, Field(gt=0, description="A lease without progress for this long goes to another worker.")
    ] = 120.0
    report_interval: Annotated[
        Seconds,
        Field(
            gt=0, description="Time between reports of partial rollouts; a lost worker costs at most this much work."
        ),
    ] = 2.0
    target_utilisation: Annotated[Fraction, Field(description="Share of time that the learner should train.")] = 0.98
    usd_per_hour_cap: Annotated[float, Field(ge=0, description="The pool never costs more than this; 0: no cap.")] = 0.0
    usd_budget: Annotated[
        float, Field(ge=0, description="Once this is spent, all workers go to standby; 0: no budget.")
    ] = 0.0
    planner_mode: Annotated[
        Literal["advise", "approve", "auto"],
        Field(
            description="The planner's proposals are only shown, wait for approval, or are carried out within the budget."
        ),
    ] = "auto"
    offers: Annotated[str, Field(description="TOML file of machines that may be rented; empty: rent by hand only.")] = (
        ""
    )
    machines_file: Annotated[
        str,
        Field(
            description="File that records what each kind of machine delivered, for later runs; empty: nothing is recorded."
        ),
    ] = "~/.local/share/echo2/machines.json"
    over_provision: Annotated[
        float,
        Field(
            ge=1,
            le=4,
            description="Groups in flight relative to the plan; above 1, each step takes those that finish first.",
        ),
    ] = 1.0
    quantised_workers: Annotated[
        bool,
        Field(description="Allows workers with quantised weights (worker.quantisation); else they are refused."),
    ] = False
    exit_when_finished: Annotated[
        bool, Field(description="The coordinator exits with its run; else it keeps serving the dashboard, at no cost.")
    ] = False
    database_url: Annotated[str, Field(description="postgresql+psycopg://…; empty: SQLite in the run's folder.")] = ""
    dashboard_host: Annotated[str, Field(description="Address of the dashboard; empty: the coordinator's.")] = ""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if not self.heartbeat_interval < self.suspect_after < self.gone_after:
            raise ValueError(
                "heartbeat_interval < suspect_after < gone_after: expected that order, got "
                f"{self.heartbeat_interval} s, {self.suspect_after} s, {self.gone_after} s"
            )
        return self


class WorkerSection(Section):
    engine: Annotated[
        Literal["auto", "embedded", "vllm"],
        Field(description="auto: vLLM if there is a GPU and vLLM is installed, else embedded."),
    ] = "auto"
    slots: Annotated[
        int, Field(ge=0, le=4096, description="Most sequences that decode together; 0: as many as fit.")
    ] = 0
    context_tokens: Annotated[int, Field(ge=0, description="Longest sequence; 0: the run's longest.")] = 0
    swap_mode: Annotated[
        Literal["keep_kv", "recompute_kv", "finish_first"],
        Field(description="What happens to sequences in flight when a new version is swapped in."),
    ] = "recompute_kv"
    price_usd_per_hour: Annotated[float, Field(ge=0, description="Price of this machine.")] = 0.0
    is_spot: Annotated[bool, Field(description="Whether the machine may be preempted at any time.")] = False
    provider: Annotated[
        str,
        Field(max_length=64, description="Provider of the machine, for the dashboard; empty: detected if possible."),
    ] = ""
    region: Annotated[
        str, Field(max_length=64, description="Region of the machine, for the dashboard; empty: detected if possible.")
    ] = ""
    uplink_limit: Annotated[
        BytesPerSecond, Field(description="The worker never sends faster than this; 0: no limit.")
    ] = 0.0
    emulated_uplink: Annotated[BytesPerSecond, Field(description="Throttles sending, for experiments; 0: off.")] = 0.0
    emulated_downlink: Annotated[BytesPerSecond, Field(description="Throttles receiving, for experiments; 0: off.")] = (
        0.0
    )
    emulated_rtt: Annotated[Seconds, Field(description="Delays messages by half of this, for experiments; 0: off.")] = (
        0.0
    )
    draft_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=16,
            description="Tokens that vLLM drafts from repetitions in a sequence (speculative decoding); 0: none.",
        ),
    ] = 0
    quantisation: Annotated[
        Literal["none", "int8", "fp8"],
        Field(description="Generates with rounded weights, keeping bf16 masters: int8 (embedded engine), fp8 (vLLM)."),
    ] = "none"
    slowdown: Annotated[
        float, Field(ge=1, description="Makes the embedded engine this many times slower, for experiments.")
    ] = 1.0
    host: Annotated[
        str,
        Field(
            description="Address for serving chunks to peers; empty: all, or loopback if the run is on this machine."
        ),
    ] = ""
    port: Annotated[Port, Field(description="Port of the broadcast service; 0: any free one.")] = 0
    advertise: Annotated[
        str,
        Field(description="address:port to which a NAT or provider maps this worker's port; empty: detected."),
    ] = ""
    store_bytes: Annotated[Bytes, Field(description="Disk space for chunks; 0: twice the published weights.")] = 0


class RunConfig(Section):
    """All options of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    agent: AgentSection = AgentSection()
    sampling: SamplingSection = SamplingSection()
    staleness: StalenessSection = StalenessSection()
    learner: LearnerSection = LearnerSection()
    broadcast: BroadcastSection = BroadcastSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    worker: WorkerSection = WorkerSection()
