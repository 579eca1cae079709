"""Writes metrics.jsonl, one row per step, and the optional sinks.

Guarantees: a row is one complete line; after a restart, a step that already has its row gets no second one. A test compares the
table of names in docs/learner.md with the rows. Leaves to others: computing the values (record).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from echo2.base.errors import ConfigError

_log = logging.getLogger("echo2.learner")
Row = Mapping[str, object]


class Sink(Protocol):
    """Takes rows as they are made."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends to a file. `last_step`: step of the last complete row in it, -1 if it has none."""

    def __init__(self, path: Path) -> None:
        self.last_step = _mend(path)
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


def _mend(path: Path) -> int:
    """Cuts off a torn last line; returns the last step written, -1 if there is none."""
    if not path.exists():
        return -1
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        path.write_bytes(whole)
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else -1


class TensorBoard:
    """Writes scalars to TensorBoard under the row's own names."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"sink tensorboard: expected the package tensorboard (pip install 'echo2[sinks]'), got: {error}"
            ) from None
        self._writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call, unused-ignore]

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to Weights & Biases, in the mode set by its environment variables."""

    def __init__(self, folder: Path, run_id: str) -> None:
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ConfigError(
                f"sink wandb: expected the package wandb (pip install 'echo2[sinks]'), got: {error}"
            ) from None
        self._run: Any = wandb.init(project="echo2", name=run_id, id=run_id, resume="allow", dir=str(folder))

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if isinstance(v, int | float)}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Logs to Trackio, Hugging Face's local tracker: data in `TRACKIO_DIR`, shown by `trackio show --project echo2`."""

    def __init__(self, run_id: str) -> None:
        try:
            import trackio  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise _no_package("trackio", error) from None
        self._run: Any = trackio.init(
            project="echo2", name=run_id, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if isinstance(v, int | float)}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _no_package(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"sink {name}: expected the package {name} (pip install 'echo2[sinks]'), got: {error}")


def open_sinks(folder: Path, run_id: str, names: Sequence[str]) -> list[Sink]:
    """Opens metrics.jsonl, which comes first, and the sinks in `names`. Raises `ConfigError` for an unknown or missing one."""
    unknown = sorted(set(names) - {"tensorboard", "wandb", "trackio"})
    if unknown:
        raise ConfigError(f"sink: expected tensorboard, wandb or trackio, got {unknown[0]!r}")
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    for name in names:
        match name:
            case "tensorboard":
                sinks.append(TensorBoard(folder / "tensorboard"))
            case "wandb":
                sinks.append(WeightsAndBiases(folder, run_id))
            case _:
                sinks.append(Trackio(run_id))
    return sinks


def past_evaluations(folder: Path) -> dict[int, float]:
    """Held-out reward by version from the lines written before a restart; cuts off a torn last line."""
    found: dict[int, float] = {}
    for path in (folder / "metrics.jsonl", folder / "evaluations.jsonl"):  # older releases wrote them to metrics.jsonl
        _mend(path)
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
        found |= {int(row["step"]): float(row["eval/reward"]) for row in rows if "eval/reward" in row}
    return found
