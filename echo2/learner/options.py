"""What one learner process is given, and the folder that it works in: used by one learner at a time, always for the same run.

Guarantees: a second learner on the same folder is refused while the first lives (the system releases the lock with the process,
so a kill leaves no stale lock); a folder of another run, model or batch shape is refused with an error that names the difference.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

from echo2.base.errors import StateError
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import longest_sequence
from echo2.outside import here, unix_now
from echo2.outside.files import hold
from echo2.trust.tls import read_secret, write_secret


@dataclass(frozen=True, slots=True)
class LearnerLimits:
    checkpoints_kept: int = 2
    free_bytes_min: int = 64 << 20  # disk space that stays free beside a new checkpoint
    keyframe_chain_max: int = 16  # deltas after which a keyframe is published
    linger_s: float = 20.0  # longest time that a finished learner serves its last version
    evaluation_patience_s: float = 600.0  # an evaluation that gets no answer for so long is given up


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """The run's configuration, in which rules have replaced "auto" for the training step, and what only this process or its machine
    knows. `threads`: of the trainer. `turns_max`: most completions in one rollout, by the task. `join_link`: needed until the
    folder has the run's credentials; if `link_file` is set, the link is read from it again when the coordinator cannot be reached.
    `metrics_port`: of the Prometheus endpoint; 0: none. `left_out`: prompts, by evaluation set ("": the run's own) and
    index, whose reference cannot be judged."""

    folder: Path
    config: RunConfig
    threads: int = 1
    turns_max: int = 1
    host: str = "127.0.0.1"
    join_link: str = ""
    link_file: Path | None = None
    metrics_port: int = 0
    limits: LearnerLimits = field(default_factory=LearnerLimits)
    left_out: frozenset[tuple[str, int]] = frozenset()

    @property
    def longest_tokens(self) -> int:
        """Longest sequence of the run in tokens, unless the model's context is shorter."""
        sampling = self.config.sampling
        return longest_sequence(sampling.max_prompt_tokens, sampling.max_new_tokens, self.turns_max)

    @property
    def chunk_folder(self) -> Path:
        return self.folder / "chunks"

    @property
    def trainer(self) -> SimpleNamespace:
        """The training step's options under the names by which scripts of own trainers read them."""
        from echo2.learner.training.loss import LossConfig  # these import torch
        from echo2.learner.training.trainer import GRAD_CLIP, NONFINITE_STEPS_MAX

        learner = self.config.learner
        return SimpleNamespace(
            loss=LossConfig.of(learner), token_budget=learner.token_budget, threads=self.threads, row_tokens=0,
            gradient_checkpointing=learner.gradient_checkpointing, model_path=self.config.model.path, lr=learner.lr,
            grad_clip=GRAD_CLIP, nonfinite_steps_max=NONFINITE_STEPS_MAX,
        )  # fmt: skip


SECRET_BYTES = 32  # 256 bits
_OF_A_RUN = ("checkpoints/step-????????", "journal/segment-*")


class RunFolder:
    """A run folder, locked from construction to `release`. Raises `StateError` if another learner holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = hold(path / "learner.lock", "learner")

    def check_identity(self, identity: Mapping[str, object], notes: Mapping[str, object] | None = None) -> None:
        """Records the run's identity on the first start and compares it on every later one; raises `StateError` if it differs.
        `notes` are recorded but not compared."""
        path = self.path / "run.json"
        wanted = json.loads(json.dumps(dict(identity)))
        if not path.exists():
            left_by_run = (file.name for name in _OF_A_RUN for file in sorted(self.path.glob(name)))
            if left := next(left_by_run, ""):
                raise StateError(f"{path}: expected it beside {left}, found none; restore it from a backup")
            _write(path, {**wanted, **(notes or {})})
            return
        recorded = _read(path)
        for name in (name for name in wanted if name in recorded):
            if recorded[name] != wanted[name]:
                raise StateError(
                    f"run folder {self.path}: expected {name} {_short(recorded[name])} as when the run began, got "
                    f"{_short(wanted[name])}; start a new run under another name, or put the option back"
                )
        if wanted.keys() - recorded.keys():
            _write(path, {**recorded, **wanted})

    def began(self) -> datetime:
        """When the run began, as recorded by `check_identity`; now if it has not."""
        path = self.path / "run.json"
        recorded = _read(path).get("began") if path.exists() else None
        return datetime.fromisoformat(str(recorded)) if recorded else datetime.fromtimestamp(int(unix_now()), UTC)

    def secret(self) -> bytes:
        """The run's secret random bytes, made once, from which its seeds are derived."""
        path = self.path / "sampling.secret"
        if not path.exists():
            write_secret(path, here().rng.randbytes(SECRET_BYTES))
        content = read_secret(path)
        if len(content) != SECRET_BYTES:
            raise StateError(f"{path}: expected {SECRET_BYTES} bytes, got {len(content)}; restore it from a backup")
        return content

    def release(self) -> None:
        os.close(self._lock)


def _write(path: Path, content: Mapping[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**content, "check": _check_of(content)}, indent=1))
    files = here().files
    files.sync_path(partial)
    files.rename(partial, path)
    files.sync_path(path.parent)


def _read(path: Path) -> dict[str, object]:
    try:
        content: dict[str, object] = json.loads(path.read_text())
        if content.pop("check", None) != _check_of(content):
            raise ValueError("other content than was written")
    except (OSError, ValueError, AttributeError) as error:
        raise StateError(f"{path}: expected the run's identity, got: {error}; restore it from a backup") from None
    return content


def _check_of(content: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
