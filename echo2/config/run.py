"""Every option of a run, one line each, grouped by component. One file may serve all roles; each role takes its section as it is.

Guarantees: frozen, validated, units parsed (`80ms`, `4MiB`, `300mbit/s`); imports no torch. A test holds the full list of options,
so that a new option is a visible decision. What a rule can derive is a property here or stands with the rule.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from echo2.base.errors import ConfigError
from echo2.base.units import LinkShape, is_loopback, parse_duration_s, parse_rate_bytes_per_s

_T = TypeVar("_T")


def opt(default: _T, text: str, *, why: str = "", **bounds: Any) -> _T:
    """One option: its default, what it does, its bounds. `why`: the reason for a bound that does not explain itself."""
    extra: dict[str, Any] | None = {"why": why} if why else None
    return cast(_T, Field(default, description=text, json_schema_extra=extra, **bounds))


def _parsed(parse: Any) -> BeforeValidator:
    def convert(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError("expected a number or a string with a unit")
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None  # pydantic names the field

    return BeforeValidator(convert)


def _shaped(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text, re.ASCII | re.IGNORECASE) is None:
            raise ValueError(f"expected {expected}, got {text!r}")
        return text

    return AfterValidator(check)


def rate_with_unit(value: str | float) -> float:
    """Bytes per second. A bare number is refused, because 300 could be meant as Mbit/s but would be 300 bytes per second; 0
    needs no unit."""
    if not isinstance(value, str) and value != 0:
        raise ConfigError(f"rate: expected a number with a unit, such as 300mbit/s or 37.5MB/s, got {value!r}")
    return parse_rate_bytes_per_s(value)


def link_shape(value: object) -> LinkShape:
    """`10mbit/s 100mbit/s 20ms`: uplink, downlink, round trip; an empty text is no emulation."""
    if isinstance(value, LinkShape):
        return value
    words = value.split() if isinstance(value, str) else ["?"]
    if not words:
        return LinkShape()
    if len(words) != 3:
        raise ValueError(f"expected uplink, downlink and round trip, such as '10mbit/s 100mbit/s 20ms', got {value!r}")
    try:
        up, down = (0.0 if word == "0" else rate_with_unit(word) for word in words[:2])
        return LinkShape(up, down, parse_duration_s(words[2]))
    except ConfigError as error:
        raise ValueError(str(error)) from None


RATE = _parsed(rate_with_unit)  # marks the options that are bytes per second, so that `to_toml` writes their unit
Seconds = Annotated[float, _parsed(parse_duration_s), Field(ge=0)]
BytesPerSecond = Annotated[float, RATE, Field(ge=0)]
EmulatedLink = Annotated[LinkShape, BeforeValidator(link_shape)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
_HOST = r"([^\s/:@\[\]]+|\[[0-9a-f:.]+\])"
Host = Annotated[str, _shaped(rf"({_HOST}|[0-9a-f:.]*:[0-9a-f.]*:[0-9a-f.]*)?", "a host without a port or http://")]
Address = Annotated[str, _shaped(rf"({_HOST}:[0-9]{{1,5}})?", "HOST:PORT, such as learner.example.org:8421")]
Name = Annotated[
    str,
    _shaped(
        r"[a-z0-9][a-z0-9_.-]{0,62}",
        "1 to 63 letters, digits, dots, dashes or underscores that begin with a letter or digit",
    ),
]
# Why temperature has its bounds.
_GREEDY = "greedy rollouts of one prompt are all the same; vLLM takes none above 2"


class Section(BaseModel):
    """A frozen group of options; an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: object, info: ValidationInfo) -> object:
        """Refuses true and false where a number is expected; pydantic takes them for 1 and 0."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise PydanticCustomError("no_boolean", "expected no boolean")  # load says what is expected
        return value


class RunSection(Section):
    name: Name = opt("run", "Names the run and its folder.")
    folder: str = opt("runs", "Parent of the run folders.")
    seed: Whole = opt(0, "Seeds prompt order and sampling.")


OptimizerState = Literal["float32", "8bit", "host"]
WeightsDtype = Literal["bfloat16", "float32", "nf4"]
Correction = Literal["behaviour", "tis_token", "tis_sequence", "decoupled"]
SwapModeName = Literal["keep_kv", "recompute_kv", "finish_first"]


class ModelSection(Section):
    path: str = opt("", "Local folder in Hugging Face layout, or a hub id.")
    weights_dtype: WeightsDtype = opt("bfloat16", "Precision of the published policy; nf4: a LoRA base in 4 bits.")
    lora_rank: Whole = opt(
        0, "Trains only a LoRA adapter (alpha / rank = 2); 0: all weights.",
        le=4096, why="a rank above 4096 is no smaller than the weights",
    )  # fmt: skip

    @model_validator(mode="after")
    def _codes_are_frozen(self) -> Self:
        if self.weights_dtype == "nf4" and not self.lora_rank:
            raise ValueError(
                "weights_dtype: expected bfloat16 or float32 without lora_rank, because weights in 4 bits cannot be trained "
                "themselves, got nf4: set model.lora_rank, to 16 say"
            )
        return self


class EvaluationSetTable(Section):
    """One entry of `task.eval_sets`. Several samples are drawn at the run's temperature, one is greedy."""

    task: str = Field(description="Task adapter, like task.name.")
    args: dict[str, Any] = opt({}, "The task's arguments.")
    prompts: Whole = opt(0, "Number of the task's prompts; 0: all of a finite data set.")
    samples: Count = opt(1, "Completions per prompt.", le=4096, why="a group holds at most 4096 rollouts")


class MixedTaskTable(Section):
    """One entry of `task.mixture`."""

    task: str = Field(description="Task adapter, like task.name.")
    args: dict[str, Any] = opt({}, "The task's arguments.")
    weight: Positive = opt(1.0, "Its share of the prompts is weight / the sum of all weights.", le=1e6)
    eval_prompts: int = opt(-1, "Held-out prompts in each evaluation; -1: as many as task.eval_prompts.", ge=-1)


class TaskSection(Section):
    name: str = opt("sort_digits", "sort_digits, reasoning_gym, math, module:Class ... (docs/tasks.md).")
    args: dict[str, Any] = opt({}, "The task's arguments.")
    epochs: Whole = opt(0, "Passes over a finite data set, then the run ends; 0: no limit.")
    eval_prompts: Whole = opt(64, "Held-out prompts per evaluation.")
    eval_every_steps: Count = opt(20, "Steps between evaluations.")
    eval_samples: Count = opt(
        1, "Completions per held-out prompt; 1: greedy; more: pass@k.",
        le=4096, why="a group holds at most 4096 rollouts",
    )  # fmt: skip
    eval_sets: dict[str, EvaluationSetTable] = opt({}, "More evaluation sets: task, args, prompts, samples.")
    mixture: dict[Name, MixedTaskTable] = opt(
        {}, "Tasks instead of task.name: task, args, weight, eval_prompts.", max_length=64
    )
    trusted_rewards: bool = opt(False, "DANGER: uncontained scorers let completions reach keys and weights.")
    readable: tuple[str, ...] = opt((), "More files and folders that rewards may read.")
    ray: str = opt("", "Ray cluster for rewards: HOST:PORT, ray://..., auto; empty: none.")
    system_prompt: str = opt("", "System message for chats that have none.", max_length=65_536)
    template_args: dict[str, Any] = opt({}, "Chat template's arguments, such as enable_thinking = false.")
    plain_prompts: bool = opt(False, "No chat template for text prompts; for base models.")

    @model_validator(mode="after")
    def _has_one_or_many(self) -> Self:
        if self.mixture and (self.name != type(self).model_fields["name"].default or self.args):
            raise ValueError(
                "mixture: expected no task.name and task.args beside it, because all prompts come from the mixture's tasks, "
                f"got task.name {self.name!r}"
            )
        return self

    @property
    def asked(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Adapter and arguments of each training task."""
        return tuple((entry.task, entry.args) for entry in self.mixture.values()) or ((self.name, self.args),)

    @property
    def held_out(self) -> dict[str, int]:
        """Number of held-out prompts by name of the mixture's tasks; a single task has an empty name."""
        default, asked = self.eval_prompts, {name: entry.eval_prompts for name, entry in self.mixture.items()}
        return {name: default if count < 0 else count for name, count in asked.items()} or {"": default}


class AgentSection(Section):
    """Agents that use OpenAI's API produce the prompts, call by call; enabled by a harness or an address."""

    harness: str = opt("", "module:function or command that plays an episode; empty: external agents.")
    listen: str = opt("", "HOST:PORT of the gateway; empty: loopback with a harness, else none.")
    tls: str = opt("", "PEM file (certificate and key); needed off loopback.")
    turns: Count = opt(8, "Most calls per conversation; workers reserve context for them.")
    episode_timeout: Seconds = opt(
        3600.0, "Own time of an episode, without its waits for workers; then it is stopped and scored.", gt=0
    )

    @property
    def is_on(self) -> bool:
        return bool(self.harness or self.listen)


class SamplingSection(Section):
    temperature: float = opt(1.0, "Divides the logits.", gt=0, le=2, why=_GREEDY)
    top_p: float = opt(1.0, "Nucleus sampling; 1: off.", gt=0, le=1)
    top_k: Whole = opt(0, "Keeps the k likeliest tokens; 0: off.")
    max_new_tokens: Count = opt(1024, "Longest completion.")
    stop: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = opt(
        (), "Strings that also end a completion.", max_length=16
    )
    max_prompt_tokens: Count = opt(1024, "Longer prompts are skipped; workers reserve context for them.")


class StalenessSection(Section):
    bound: int = opt(
        4, "S: largest age in steps of a trained token; 0: synchronous.",
        ge=0, le=64, why="0 is synchronous; beyond 64 steps no correction learns",
    )  # fmt: skip
    kappa: Whole = opt(0, "Steps between publications; 0: the planner chooses.")

    @model_validator(mode="after")
    def _kappa_fits(self) -> Self:
        if self.kappa > (most := max(1, self.bound)):
            text = f"kappa: expected at most the staleness bound {most} (0: the planner chooses), got {self.kappa}"
            raise ValueError(text)
        return self


class LearnerSection(Section):
    steps: Count = opt(200, "Optimiser steps.")
    prompts_per_step: Count = opt(16, "Groups per step.")
    rollouts_per_prompt: Count = opt(16, "Completions per prompt.", le=4096, why="a group holds at most 4096 rollouts")
    lr: Positive = opt(1e-6, "AdamW's learning rate.")
    warmup_steps: Whole = opt(0, "Steps in which the rate rises from 0.")
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "Learning rate after the warm-up.")
    weight_decay: float = opt(0.0, "Decoupled weight decay.", ge=0)
    advantage: Literal["grpo", "dr_grpo", "mc_grpo", "vcpo"] = opt(
        "grpo", "Baseline and scale of group advantages (docs/algorithms.md)."
    )
    optimizer_state: OptimizerState = opt(
        "float32", "AdamW's moments: in 8 bits (bitsandbytes), or with the masters in host memory."
    )
    updates_per_batch: Count = opt(1, "Optimiser updates per step, each on a share of its groups.")
    loss: str = opt("auto", "dapo, grpo, dr_grpo, gspo, luspo, cispo, m2po, module:function; auto: by the bound.")
    correction: Correction = opt("behaviour", "Correction for stale samples (docs/algorithms.md).")
    clip: tuple[Share, Positive] = opt((0.2, 0.28), "Clips the ratio to 1 - the first .. 1 + the second.")
    kl_coefficient: float = opt(0.0, "Weight of the k3 KL penalty to the base model.", ge=0)
    teacher: str = opt("", "Model whose log-probabilities of sampled tokens are the advantage (docs/algorithms.md).")
    train_on_truncated: bool = opt(True, "Trains on truncated completions; they count in the baseline anyway.")
    overlong_buffer_tokens: Whole = opt(0, "Reward falls within this many tokens of the limit; 0: off.")
    drop_equal_groups: bool = opt(False, "Dynamic sampling: replaces groups with equal rewards, up to a limit.")
    gradient_checkpointing: bool | Literal["auto", "selective"] = opt(
        "auto", "Less memory, more time; selective: half; auto: by the model."
    )
    token_budget: Whole = opt(0, "Tokens per micro-batch; 0: as many as fit.")
    replicas: Count = opt(1, "HSDP copies, each sharded over ranks / replicas.")
    replay_routing: bool = opt(False, "Mixture of experts: trains through the experts that workers report.")
    device: str = opt("auto", "auto, cpu, cuda, cuda:0 ...")
    checkpoint_every_steps: Whole = opt(0, "Most steps that a restart repeats; 0: by cost, at most 20.")
    audit_share: Fraction = opt(0.12, "Share of rollouts scored again to find cheating workers.")
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = opt(
        (), "tensorboard, wandb, trackio, besides metrics.jsonl."
    )
    port: Port = opt(0, "Ingest and broadcast, its second relay 4 above; 0: any free ones.")
    advertise: Address = opt("", "host:port for workers; empty: where it listens.")
    uplink_limit: BytesPerSecond = opt(0.0, "Largest sending rate; 0: no limit.")
    emulated_link: EmulatedLink = opt(LinkShape(), "For experiments: uplink, downlink, round trip.")
    emulated_step: Seconds = opt(0.0, "For experiments: shortest step.")

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.updates_per_batch > self.prompts_per_step:
            raise ValueError(
                f"updates_per_batch: expected at most prompts_per_step {self.prompts_per_step}, because each update trains on "
                f"whole groups, got {self.updates_per_batch}"
            )
        if self.teacher and (self.kl_coefficient or self.drop_equal_groups or self.advantage != "grpo"):
            raise ValueError(
                "teacher: expected no kl_coefficient, drop_equal_groups or advantage beside it, because it alone says which "
                "tokens to raise"
            )
        return self

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def relay_port(self) -> int:
        """As far above as the coordinator's is, for both may be on one machine; any free one where that is any free one."""
        return self.port + 4 if 0 < self.port < 65_532 else 0


class SftSection(Section):
    """Supervised warm start: the run's first steps train on conversations, before any rollout; enabled by a path."""

    path: str = opt("", "Conversations: jsonl, json, parquet or hub id (docs/tasks.md); empty: none.")
    steps: Count = opt(100, "How many of learner.steps; each takes a step's number of rollouts as conversations.")
    lr: float = opt(0.0, "Learning rate; 0: learner.lr.", ge=0)

    @property
    def step_count(self) -> int:
        return self.steps if self.path else 0


class CoordinatorSection(Section):
    host: str = opt("127.0.0.1", "Where it listens; loopback keeps the run on this machine.")
    advertise: Host = opt("", "Host in join links; empty: coordinator.host.")
    enrol_port: Port = opt(8418, "Enrolment, named in join links.")
    port: Port = opt(8419, "Control streams (mutual TLS).")
    dashboard_port: Port = opt(8420, "Dashboard and /metrics.")
    dashboard_host: str = opt("", "Empty: the coordinator's.")
    usd_per_hour_cap: float = opt(math.inf, "The pool's largest cost.", ge=0, allow_inf_nan=True)
    usd_budget: float = opt(math.inf, "Once spent, all workers go to standby.", ge=0, allow_inf_nan=True)
    planner_mode: Literal["advise", "approve", "auto"] = opt(
        "auto", "Proposals are shown, wait for approval, or are carried out within the budget."
    )
    offers: str = opt("", "TOML file of machines to rent; empty: by hand only.")
    database_url: str = opt("", "postgresql+psycopg://...; empty: SQLite in the run's folder.")

    @property
    def is_local(self) -> bool:
        """Whether the whole run is on this machine."""
        return is_loopback(self.host)

    @property
    def relay_port(self) -> int:
        """libp2p relay for workers behind NAT: beside the run's other ports; any free one where that is any free one."""
        return self.port + 4 if 0 < self.port < 65_532 else 0

    @property
    def heartbeat_interval(self) -> float:
        """Time between a node's heartbeats: loopback answers at once, and 20,000 workers at 5 s are 4,000 messages a second."""
        return 0.5 if self.is_local else 5.0

    @property
    def suspect_after(self) -> float:
        """A worker silent for this long gets no new leases: three heartbeats, or what a busy machine may pause."""
        return max(3.0, 3 * self.heartbeat_interval)

    @property
    def gone_after(self) -> float:
        """The leases of a worker silent for this long go to others."""
        return 3 * self.suspect_after

    @property
    def report_interval(self) -> float:
        """Time between reports of partial rollouts: a lost worker costs at most this much work."""
        return min(2.0, 2 * self.heartbeat_interval)

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {name: getattr(self, name) for name in ("enrol_port", "port", "dashboard_port")}
        if len(taken := [port for port in ports.values() if port]) != len(set(taken)):
            raise ValueError(f"expected ports that differ (0: any free one), got {ports}")
        return self

    lease_timeout: ClassVar[float] = 120.0
    """A lease without progress for this long goes on elsewhere: longer than a keyframe over a slow link, or a pause of vLLM."""
    plan_interval: ClassVar[float] = 5.0
    """The planner runs again at least this often: money is spent and stragglers age without any event."""


class WorkerSection(Section):
    engine: Literal["auto", "embedded", "vllm"] = opt("auto", "auto: vLLM if installed with a GPU, else embedded.")
    slots: Whole = opt(
        0, "Most concurrent sequences; 0: as many as fit.", le=4096, why="no engine decodes more sequences together"
    )
    swap_mode: SwapModeName = opt("recompute_kv", "What a new version does to sequences in flight (docs/worker.md).")
    price_usd_per_hour: float = opt(0.0, "This machine's price.", ge=0, lt=1e6, why="none costs a million an hour")
    is_spot: bool = opt(False, "The machine may be preempted.")
    place: str = opt("", "PROVIDER or PROVIDER/REGION, where traffic is free; empty: detected.", max_length=128)
    draft_tokens: Whole = opt(
        0, "Tokens that vLLM drafts ahead; learner and workers need the same run file.",
        le=16, why="longer drafts are rejected more often than they help",
    )  # fmt: skip
    quantisation: Literal["none", "bf16", "fp8"] = opt(
        "none", "bf16: embedded engine; fp8: vLLM, rounded weights. Coordinator and workers need the same run file."
    )
    port: Port = opt(0, "Broadcast; 0: any free one.")
    uplink_limit: BytesPerSecond = opt(0.0, "Largest sending rate; 0: no limit.")
    emulated_link: EmulatedLink = opt(LinkShape(), "For experiments: uplink, downlink, round trip.")
    slowdown: float = opt(1.0, "For experiments: slows the embedded engine.", ge=1, le=1000, why="it would do nothing")


class RunConfig(Section):
    """All options of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    agent: AgentSection = AgentSection()
    sampling: SamplingSection = SamplingSection()
    staleness: StalenessSection = StalenessSection()
    learner: LearnerSection = LearnerSection()
    sft: SftSection = SftSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    worker: WorkerSection = WorkerSection()

    @model_validator(mode="after")
    def _gateway_has_a_port(self) -> Self:
        port, listen = self.learner.port, self.agent.listen
        if port and listen.rpartition(":")[2] in (str(port), str(port + 1), str(port + 4)):
            raise ValueError(
                f"agent.listen: expected a port other than {port}, {port + 1} and {port + 4}, which learner.port {port} takes for "
                f"ingest, broadcast and relay, got {listen}"
            )
        return self

    @model_validator(mode="after")
    def _warm_start_fits(self) -> Self:
        if self.sft.step_count >= self.learner.steps:
            raise ValueError(
                f"sft.steps: expected fewer than learner.steps {self.learner.steps}, which count the supervised ones, got "
                f"{self.sft.steps}"
            )
        if 0 < self.sft.step_count <= self.staleness.bound:
            raise ValueError(
                f"sft.steps: expected more than staleness.bound {self.staleness.bound}, so that no rollout of the model before "
                f"them is trained on, got {self.sft.steps}"
            )
        return self
