"""All options of a worker, from the command line and the config; all but the join link and the folder have a default that works.

Guarantees: an option out of range raises ConfigError, which names it, before anything starts.
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
    """Which engine generates. AUTO: vLLM if it is installed and the machine has a GPU, else the embedded engine."""

    AUTO = "auto"
    EMBEDDED = "embedded"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class MachinePlace:
    """The machine's provider and region, for the operator's totals; empty: not known."""

    provider: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How much a worker holds at most, and how long it waits."""

    leases_max: int = 1024
    unheld_tokens_max: int = 1 << 22  # tokens the learner does not hold yet; above this no lease is requested
    drain_s: float = 2.0  # from SIGTERM to the last partial rollout handed back
    connect_s: float = 10.0  # timeout of one attempt to reach a peer
    reconnect_s_max: float = 15.0  # longest backoff between two attempts
    finished_delay_s: float = 0.02  # a finished rollout waits this long so that siblings share its report


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of one worker process.

    `folder` keeps its identity, its chunks and its control socket between runs. With `slot_count` 0 the engine's rule decides.
    `slowdown` above 1 makes generation that many times slower, to emulate a weaker machine.
    """

    join_link: str
    folder: Path
    name: str = ""
    engine: EngineChoice = EngineChoice.AUTO
    slot_count: int = 0
    context_tokens_max: int = 0
    price_usd_per_hour: float = 0.0
    is_spot: bool = False
    listen_host: str = ""  # empty: every address, or loopback if the coordinator is on loopback
    listen_port: int = 0
    advertised_addresses: tuple[str, ...] = ()
    link: LinkShape = field(default_factory=LinkShape)
    uplink_limit_bytes_per_s: float = 0.0  # 0: none
    store_bytes: int = 0  # disk space for chunks; 0: from the model's size
    slowdown: float = 1.0
    swap_mode: SwapMode = SwapMode.RECOMPUTE_KV
    report_interval_s: float = 0.0  # 0: the coordinator's
    link_file: Path | None = None  # read again if the coordinator is not found: the operator may have moved it
    preemption_notice: str = ""  # where to watch for preemption: aws, azure, gcp or an http address
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    seed: int = 0
    draft_tokens: int = 0  # tokens that vLLM drafts ahead; whether that pays depends on how repetitive the task is
    quantisation: Quantisation = Quantisation.NONE  # trades exactness for memory: no rule can decide that
    place: MachinePlace = field(default_factory=MachinePlace)
    model_path: str = ""  # folder or hub id of the base model; required for an adapter, else it may save a download

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
