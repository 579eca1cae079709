"""Writes batches whose loss or gradient was not finite as JSON, for manual inspection.

Guarantees: at most `KEPT_MAX` per run; a file is complete or absent. Do not call it on the event loop's thread: a batch of 6
million tokens is 300 MB of text and takes seconds. It writes one rollout at a time, so that other threads get the GIL. Leaves to
others: which batches (loop).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from echo2.learner.batch import Batch, TrainGroup

KEPT_MAX = 16
"""Batches kept per run; later ones are only counted."""


def keep_for_inspection(batch: Batch, folder: Path) -> None:
    """Writes `batch` to not_finite/ in the run folder `folder`, unless `KEPT_MAX` batches are already there."""
    kept = folder / "not_finite"
    kept.mkdir(exist_ok=True)
    if len(list(kept.glob("*.json"))) >= KEPT_MAX:
        return
    target = kept / f"step-{batch.step:08d}.json"
    partial = target.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(_text_of(batch))
    partial.rename(target)


def _text_of(batch: Batch) -> Iterator[str]:
    yield f'{{"step": {int(batch.step)}, "groups": ['
    for number, group in enumerate(batch.groups):
        yield ", " if number else ""
        yield from _group_text(group)
    yield "]}"


def _group_text(group: TrainGroup) -> Iterator[str]:
    head = {
        "group_id": group.spec.group_id,
        "prompt_token_ids": group.spec.prompt_token_ids,
        "rewards": group.rewards,
    }
    yield json.dumps(head)[:-1] + ', "rollouts": ['
    for number, rollout in enumerate(group.rollouts):
        said = {
            "index": rollout.index,
            "token_ids": rollout.token_ids,
            "logprobs": rollout.logprobs,
            "raw_logprobs": rollout.raw_logprobs,
        }
        yield (", " if number else "") + json.dumps(said)
    yield "]}"
