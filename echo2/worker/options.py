"""All that a worker can be told. The command line and the config give it; every value has a default that works.

Guarantees: an option that makes no sense is refused by name before anything starts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.broadcast.link_shape import LinkShape
from echo2.cost_model.sizing import Quantisation
from echo2.worker.engine import SwapMode


class EngineChoice(enum.Enum):
    """Which engine generates. AUTO: vLLM where it is installed and a GPU is there, else the embedded one."""

    AUTO = "auto"
    EMBEDDED = "embedded"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class MachinePlace:
    """Whose machine this is, and in which region, for the operator's totals; empty: not known."""

    provider: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker holds at most, and how long it waits."""

    leases_max: int = 1024
    unheld_tokens_max: int = 1 << 22  # kept for a learner that is away; no new lease is asked for beyond it
    drain_s: float = 2.0  # from SIGTERM to the last partial handed back
    connect_s: float = 10.0  # one attempt to reach a peer
    reconnect_s_max: float = 15.0  # longest pause between two attempts
    finished_delay_s: float = 0.02  # a finished rollout waits this long for others to travel with


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of one worker process.

    `folder` keeps its identity, its chunks and its control socket between runs. `slot_count` 0 lets the engine's rule
    decide. `slowdown` above 1 makes generation that many times slower, to pretend a weaker machine.
    """

    join_link: str
    folder: Path
    name: str = ""
    engine: EngineChoice = EngineChoice.AUTO
    slot_count: int = 0
    context_tokens_max: int = 0
    price_usd_per_hour: float = 0.0
    is_spot: bool = False
    listen_host: str = ""  # empty: every address, or loopback where the coordinator is there
    listen_port: int = 0
    advertised_addresses: tuple[str, ...] = ()
    link: LinkShape = field(default_factory=LinkShape)
    uplink_limit_bytes_per_s: float = 0.0  # 0: none
    store_bytes: int = 0  # disk kept for chunks; 0: from the model
    slowdown: float = 1.0
    swap_mode: SwapMode = SwapMode.RECOMPUTE_KV
    report_interval_s: float = 0.0  # 0: what the coordinator says
    link_file: Path | None = None  # read again where the coordinator is not found: an operator may have moved it
    preemption_notice: str = ""  # where a cloud says that it takes the machine: aws, azure, gcp or an address
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    seed: int = 0
    draft_tokens: int = 0  # vLLM guesses so many tokens ahead; whether that pays depends on the task's repetitions
    quantisation: Quantisation = Quantisation.NONE  # cheaper memory against exactness: no rule can weigh these
    place: MachinePlace = field(default_factory=MachinePlace)
    model_path: str = ""  # folder or hub id of the base model, where this machine may have it; an adapter needs it

    def __post_init__(self) -> None:
        if not 1.0 <= self.slowdown <= 1000.0:
            raise ConfigError(f"slowdown: expected 1 (full speed) to 1000, got {self.slowdown}")
        if not 0 <= self.price_usd_per_hour < 1e6:
            raise ConfigError(f"price_usd_per_hour: expected 0 to a million, got {self.price_usd_per_hour}")
        if not 0 <= self.slot_count <= 4096:
            raise ConfigError(f"slot_count: expected 0 (by rule) to 4096, got {self.slot_count}")
        if not 0 <= self.draft_tokens <= 16:
            raise ConfigError(f"draft_tokens: expected 0 (none) to 16, got {self.draft_tokens}")
        if not 0 <= self.listen_port <= 65535:
            raise ConfigError(f"listen_port: expected 0 (any) to 65535, got {self.listen_port}")
        if not 0 <= self.report_interval_s <= 3600:
            raise ConfigError(
                f"report_interval_s: expected 0 (the coordinator's) to 3600, got {self.report_interval_s}"
            )
