"""Checks that all ranks were started with the same configuration, before any of them loads the model.

Guarantees: if a rank would train with other options, on another kind of device or from another model than rank 0, all ranks end
with one `ConfigError` that names rank, machine, expected and actual value; nothing has been loaded or written by then. For weights
it compares the size and samples of each file, not every byte; for a model given by hub id, only that id. Waits for: the slowest
rank, as any collective. Not compared: what may differ (run folder, threads, addresses).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
import xxhash

from echo2.base.errors import ConfigError
from echo2.learner.options import LearnerOptions, TrainerOptions
from echo2.learner.training.model import pick_device
from echo2.learner.training.ranks import Ranks, local_device

SAMPLE_BYTES, SAMPLES = 64 << 10, 16
"""Bytes per sample, and intervals between evenly spread samples, of each weight file."""
_OWN = {"model_path", "device", "threads", "emulated_step_s"}
"""Options that may differ between ranks; for the first two, the resulting model and device are compared instead."""
_HOST, _MODEL = "host", "model"


def check_agreement(options: LearnerOptions, ranks: Ranks) -> None:
    """Raises `ConfigError` on every rank if one of them differs from rank 0. A collective."""
    if found := difference(ranks.gather(dict(_facts(options)))):
        raise ConfigError(found)


def difference(told: Sequence[Mapping[str, str]]) -> str:
    """Describes the first difference between a rank and rank 0; empty if all agree."""
    first = told[0]
    for rank, other in enumerate(told):
        for name in sorted(first.keys() | other.keys()):
            expected, came = first.get(name, "nothing"), other.get(name, "nothing")
            if name != _HOST and expected != came:
                return (
                    f"{name} of rank {rank} on {other[_HOST]}: expected {expected}, as on rank 0 on {first[_HOST]}, got "
                    f"{came}. {_TO_DO_MODEL if name.startswith(_MODEL) else _TO_DO}"
                )
    return ""


_TO_DO = (
    "Give every machine the same configuration; what it leaves to each machine to choose (learner.token_budget = 0, "
    'learner.gradient_checkpointing = "auto") has to be given where machines differ'
)
_TO_DO_MODEL = "Put the same model on every machine"


def _facts(options: LearnerOptions) -> Iterator[tuple[str, str]]:
    given = options.trainer
    yield _HOST, platform.node() or "a machine without a name"
    yield "torch", torch.__version__
    yield "device", pick_device(local_device(given.device)).type
    config = options.config
    yield "run", repr((config.run.name, config.run.seed, config.learner.steps))
    yield "temperature", repr(config.sampling.temperature)
    for field in fields(TrainerOptions):
        if field.name not in _OWN:
            yield f"trainer's {field.name}", repr(getattr(given, field.name))
    yield from _model_facts(given.model_path)


def _model_facts(path: str) -> Iterator[tuple[str, str]]:
    """One fact per file of the model's folder. An unreadable file is reported as a fact, so that all ranks see the problem."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        is_folder = path.startswith((".", "/", "~")) or path.count("/") > 1
        yield _MODEL, f"no folder {path}" if is_folder else path
        return
    yield _MODEL, "a folder"
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin") or file.name in ("config.json", "generation_config.json"):
            yield f"{_MODEL} file {file.name}", _sampled(file)


def _sampled(file: Path) -> str:
    try:
        size, found = file.stat().st_size, xxhash.xxh3_64()
        with file.open("rb") as opened:
            for number in range(SAMPLES + 1):
                opened.seek(max(0, size - SAMPLE_BYTES) * number // SAMPLES)
                found.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        return f"a file that cannot be read ({error})"
    return f"{size} bytes of sum {found.hexdigest()}"
