"""The learner's metrics: the row of each step, and the sinks that take it (metrics.jsonl, TensorBoard, Prometheus, ...).

Guarantees: a row is one complete line; after a restart, a step that already has its row gets no second one. The newest number of
each field is a Prometheus gauge, whose name follows from the field's by rule. docs/learner.md lists names and meanings; a test
compares.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import make_asgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from echo2.base.errors import ConfigError, PortBusy
from echo2.base.ids import PeerId
from echo2.gateway.app import GatewayPort
from echo2.learner.rollouts.groups import Batch
from echo2.outside import unix_now
from echo2.outside.guard import noting
from echo2.staleness.rule import lag_of
from echo2.trust.ports import HttpLimits

if TYPE_CHECKING:
    from echo2.learner.publishing.publisher import VersionPublisher
    from echo2.learner.publishing.schedule import PublicationSchedule
    from echo2.learner.rollouts.pool import RolloutPool
    from echo2.learner.training.trainer import StepResult

Row = Mapping[str, object]

PEAK_FLOPS_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bf16 peak FLOP/s by a part of the device name, from the manufacturers' data sheets."""


@dataclass(slots=True)
class Utilisation:
    """The share of time that the learner trains: busy / (busy + waiting), both measured; of the last 50 steps (`recent`) and of all
    since the process began. Evaluations, checkpoints' snapshots and a process's wait for its first batch (workers join, load,
    compile) count as neither."""

    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=50))
    busy_s: float = 0.0
    wait_s: float = 0.0

    def add(self, busy_s: float, wait_s: float) -> None:
        self.recent.append((busy_s, wait_s))
        self.busy_s += busy_s
        self.wait_s += wait_s

    @property
    def means_s(self) -> tuple[float, float]:
        """Mean seconds per step over the window: busy, and busy plus waiting."""
        count = max(1, len(self.recent))
        busy_s = sum(busy for busy, _ in self.recent) / count
        return busy_s, busy_s + sum(wait for _, wait in self.recent) / count

    @property
    def window(self) -> float:
        """0 before the first step."""
        busy_s, total_s = self.means_s
        return busy_s / total_s if total_s > 0 else 0.0

    @property
    def overall(self) -> float:
        total_s = self.busy_s + self.wait_s
        return self.busy_s / total_s if total_s > 0 else 1.0


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step outside the trainer's own phases."""

    wait_s: float = 0.0
    diff_s: float = 0.0
    publish_wait_s: float = 0.0
    checkpoint_s: float = 0.0
    audit_wait_s: float = 0.0

    def busy_s(self, result: StepResult) -> float:
        return sum(result.phases_s.values()) + self.diff_s + self.audit_wait_s


@dataclass(slots=True)
class RunFacts:
    """Facts in a row that do not come from the step."""

    predicted_utilisation: float = 0.0
    flops_per_position: float = 0.0
    peak_flops: float = 0.0


def reward_fields(batch: Batch) -> dict[str, float]:
    rewards = [reward for group in batch.groups for reward in group.rewards]
    equal = sum(max(group.rewards) - min(group.rewards) < 1e-12 for group in batch.groups)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/equal_group_fraction": equal / len(batch.groups),
    }


def lag_fields(batch: Batch) -> dict[str, object]:
    """`lag/histogram`[k]: tokens of this step with a lag of k. `lag/mean` and `lag/max` are over rollouts."""
    tokens: Counter[int] = Counter()
    oldest: list[int] = []
    mixed = 0
    for group in batch.groups:
        for rollout in group.rollouts:
            for span in rollout.version_spans:
                tokens[lag_of(batch.step, span.version)] += span.count
            if rollout.oldest_version is not None:
                oldest.append(lag_of(batch.step, rollout.oldest_version))
            mixed += len(rollout.version_spans) > 1
    return {
        "lag/mean": statistics.fmean(oldest) if oldest else 0.0,
        "lag/max": max(oldest, default=0),
        "lag/histogram": [tokens.get(lag, 0) for lag in range(max(tokens, default=0) + 1)],
        "rollouts/mixed_versions": mixed,
    }


def time_fields(result: StepResult, times: StepTimes, facts: RunFacts) -> dict[str, float]:
    busy_s = times.busy_s(result)
    fields = {f"phase/{name}_s": seconds for name, seconds in result.phases_s.items()}
    fields |= {f"phase/{name}": seconds for name, seconds in asdict(times).items()} | {
        "step_s": busy_s,
        "tokens_per_s": result.sampled_tokens / busy_s if busy_s > 0 else 0.0,
        "positions_per_s": result.positions / busy_s if busy_s > 0 else 0.0,
    }
    if facts.peak_flops > 0 and busy_s > 0:
        fields["mfu"] = facts.flops_per_position * result.positions / busy_s / facts.peak_flops
    return fields


def state_fields(
    pool: RolloutPool, publisher: VersionPublisher, schedule: PublicationSchedule, utilisation: Utilisation
) -> dict[str, object]:
    held, counts, sent = pool.groups, pool.groups.counts, publisher.bytes
    return {
        "utilisation": utilisation.window,
        "utilisation/overall": utilisation.overall,
        "version": schedule.newest,
        "kappa": schedule.kappa,
        "delta/setting": publisher.choice.setting.name.lower(),
        "delta/setting_reason": publisher.choice.reason,
        "encode_s": publisher.encode_s,
        **{f"bytes/{name}": count for name, count in asdict(sent).items() if name != "versions"},
        "rollouts/buffered": held.buffered_rollouts,
        "rollouts/open": held.open_rollouts,
        **{f"rollouts/{name}": count for name, count in asdict(counts).items() if name != "trained_tokens"},
        "tokens/trained": counts.trained_tokens,
        "tokens/over_stale": held.ledger.over_stale_tokens(),
        "rewards/failed": pool.rewards.failed,
        "rewards/score_s": pool.rewards.seconds,
        "rewards/held": held.workers.completions_held,
        "rewards/held_s": held.workers.seconds_held,
    }


def left_out_by_worker(batch: Batch, result: StepResult) -> Counter[PeerId]:
    """Tokens left out of the step, by worker, because their reported log-probabilities are too far from the learner's own. None
    of a step that was skipped: the learner's own may be NaN."""
    counts: Counter[PeerId] = Counter()
    rollouts = [senders for group in batch.groups for senders in group.senders or [()] * len(group.rollouts)]
    for senders, tokens in zip(rollouts, result.left_out, strict=False):
        for peer_id in {sent.peer_id for sent in senders} if tokens and not result.is_skipped else ():
            counts[peer_id] += tokens
    return counts


def optimiser_fields(result: StepResult) -> dict[str, float]:
    """`grad_norm` and `lr`; empty if the user's own trainer has the optimiser."""
    known = {"grad_norm": result.grad_norm, "lr": result.lr}
    return {name: value for name, value in known.items() if value is not None}


def task_fields(batch: Batch, task_of: Callable[[int], str]) -> dict[str, float]:
    """Groups and mean reward of each task of a mixture in the batch. `task_of`: task name by cursor; empty without a mixture."""
    rewards: dict[str, list[float]] = {}
    groups: Counter[str] = Counter()
    for group in batch.groups:
        if name := task_of(group.cursor):
            groups[name] += 1
            rewards.setdefault(name, []).extend(group.rewards)
    fields: dict[str, float] = {}
    for name in sorted(groups):
        fields |= {f"task/{name}/groups": groups[name], f"task/{name}/reward": statistics.fmean(rewards[name])}
    return fields


def step_row(batch: Batch, result: StepResult, times: StepTimes, facts: RunFacts) -> dict[str, object]:
    """All fields about the step itself; `state_fields` adds the state of the run."""
    completions = [len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts]
    return {
        "step": result.step,
        "unix_s": unix_now(),
        **reward_fields(batch),
        **(result.metrics or {}),
        **optimiser_fields(result),
        "is_skipped": result.is_skipped,
        "rollouts": batch.rollout_count,
        "groups": len(batch.groups),
        "tokens": result.sampled_tokens,
        "reports/left_out_tokens": sum(result.left_out),
        "reports/left_out_workers": len(left_out_by_worker(batch, result)),
        "positions": result.positions,
        "completion_tokens/mean": statistics.fmean(completions),
        "completion_tokens/max": max(completions),
        **lag_fields(batch),
        **time_fields(result, times, facts),
        "utilisation/predicted": facts.predicted_utilisation,
    }


def supervised_row(batch: Batch, result: StepResult, step_s: float) -> dict[str, Any]:
    """All fields of a step of the supervised warm start. It has no `step_s`, by which the fleet is planned."""
    return {
        "step": result.step,
        "unix_s": unix_now(),
        "loss": (result.metrics or {}).get("loss", 0.0),
        **optimiser_fields(result),
        "is_skipped": result.is_skipped,
        "supervised/conversations": batch.rollout_count,
        "supervised/tokens": result.sampled_tokens,
        "supervised/step_s": step_s,
    }


def peak_flops_of(device_name: str) -> float:
    """Peak FLOP/s of a device; 0 if unknown."""
    return next((peak for part, peak in PEAK_FLOPS_BF16.items() if part in device_name), 0.0)


def number_in(row: Row, name: str) -> float:
    """A number of a row; 0 if it has none of that name."""
    value = row.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


# ---- sinks


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """Appends to a file, from `step` on. `last_step`: step of the last complete row in it, -1 if it has none."""

    def __init__(self, path: Path, step: int) -> None:
        self.last_step = _mend(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        step = row["step"]
        assert isinstance(step, int), "a row says its step"
        if step <= self.last_step:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.last_step = step

    def close(self) -> None:
        self._file.close()


def _mend(path: Path, step: int) -> int:
    """Cuts off a torn last line, and those after `step`, to which the run has gone back; returns the last step left, -1 if there is
    none."""
    data = path.read_bytes() if path.exists() else b""
    last, end = -1, data.rfind(b"\n") + 1
    while end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        if (last := int(json.loads(data[begin:end])["step"])) <= step:
            break
        last, end = -1, begin
    if end != len(data):
        os.truncate(path, end)
    return last


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._writer: Any = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Logs numbers to a run of Weights & Biases, in the mode that its environment variables set, or of Trackio, Hugging Face's
    local tracker (data in `TRACKIO_DIR`, shown by `trackio show --project echo2`)."""

    def __init__(self, name: str, run_id: str, **settings: object) -> None:
        self._run: Any = _package(name, name).init(project="echo2", name=run_id, resume="allow", **settings)
        self.link = str(getattr(self._run, "url", None) or f"{name} show --project echo2")

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if isinstance(v, int | float)}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class FurtherSink:
    """A sink beside metrics.jsonl. What it raises is logged: a tracker's service that dies ends no run."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = f"sink {name}", sink

    def write(self, row: Row) -> None:
        with noting("a row", self._name):
            self._sink.write(row)

    def close(self) -> None:
        with noting("the end", self._name):
            self._sink.close()


def _package(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"sink {name}: expected the package {name} (pip install {name}), got: {error}"
        raise ConfigError(text) from None


def open_sinks(folder: Path, run_id: str, names: Sequence[str], step: int) -> list[Sink]:
    """Opens metrics.jsonl, which comes first and goes on from `step`, and the sinks of `learner.sinks`. Raises `ConfigError` if a
    package is missing; but no run that goes on waits for a tracker's service."""
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
        "wandb": lambda: Tracker("wandb", run_id, id=run_id, dir=str(folder)),
        "trackio": lambda: Tracker("trackio", run_id, embed=False, auto_log_gpu=False, auto_log_cpu=False),
    }
    others = dict[str, Sink]()
    for name in names:
        with noting("the start", f"sink {name}") if step else nullcontext():
            others[name] = makers[name]()
    if links := [sink.link for sink in others.values() if isinstance(sink, Tracker)]:
        (folder / "trackers.json").write_text(json.dumps(links))  # for the run's report
    return [JsonLines(folder / "metrics.jsonl", step), *(FurtherSink(name, sink) for name, sink in others.items())]


def past_evaluations(folder: Path, step: int) -> dict[int, float]:
    """Held-out reward by version from the lines written before a restart at `step`; mends them, and those of samples."""
    path = folder / "evaluations.jsonl"
    _mend(path, step)
    _mend(folder / "samples.jsonl", step)
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
    return {int(row["step"]): float(row["eval/reward"]) for row in rows if "eval/reward" in row}


def gauge_name(name: str) -> str:
    """Gauge name of a row's field: `phase/wait_s` becomes `echo2_learner_phase_wait_s`."""
    return "echo2_learner_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


METRICS = HttpLimits("metrics", 0.02, 16, strangers_per_host=16, handshakes_per_host=16, backlog=16)


class PrometheusEndpoint(Collector):
    """A sink that serves the newest value of each field, of rows of steps and of evaluations, and what `now` returns at each
    request, at /metrics; on loopback only, because plain HTTP authenticates nobody. Construct it on the event loop that serves
    it, and `stop` it there."""

    def __init__(self, port: int, now: Callable[[], Mapping[str, float]]) -> None:
        self._now, self._row = now, dict[str, object]()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._port = GatewayPort(f"127.0.0.1:{port}", limits=METRICS)
        except (ConfigError, PortBusy) as error:
            raise type(error)(f"--metrics-port: {str(error).partition(': ')[2]}") from None
        self.url = f"{self._port.url}/metrics"
        self._serving = asyncio.get_running_loop().create_task(self._port.run(make_asgi_app(registry)))

    def write(self, row: Row) -> None:
        self._row = {**self._row, **row}

    def collect(self) -> Iterator[Metric]:
        for name, value in {**self._row, **self._now()}.items():
            match value:
                case bool() | int() | float():
                    yield GaugeMetricFamily(gauge_name(name), f"newest {name}", value=float(value))
                case list():
                    family = GaugeMetricFamily(gauge_name(name), f"newest {name}", labels=["lag"])
                    for lag, count in enumerate(value):
                        family.add_metric([str(lag)], float(count))
                    yield family

    def close(self) -> None: ...

    async def stop(self) -> None:
        await self._port.stop(self._serving)
