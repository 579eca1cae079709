"""Batches kept for a person to look at."""

from __future__ import annotations

import json
from pathlib import Path

from echo2.base.ids import Step
from echo2.learner.rollouts.groups import Batch
from echo2.learner.run_folder import KEPT_MAX, keep_for_inspection
from tests.unit.learner.test_trainer import random_groups


def test_a_kept_batch_reads_back_whole_and_few_are_kept(tmp_path: Path) -> None:
    for step in range(KEPT_MAX + 2):
        keep_for_inspection(Batch(Step(step), random_groups(step)), tmp_path)
    kept = sorted((tmp_path / "not_finite").iterdir())
    assert [path.name for path in kept] == [f"step-{step:08d}.json" for step in range(KEPT_MAX)]
    found = json.loads(kept[3].read_text())
    groups = random_groups(3)
    assert found["step"] == 3 and len(found["groups"]) == len(groups)
    for said, group in zip(found["groups"], groups, strict=True):
        assert said["group_id"] == group.spec.group_id and said["rewards"] == list(group.rewards)
        assert said["prompt_token_ids"] == list(group.spec.prompt_token_ids)
        for one, rollout in zip(said["rollouts"], group.rollouts, strict=True):
            assert one["index"] == rollout.index and one["token_ids"] == list(rollout.token_ids)
            assert one["logprobs"] == list(rollout.logprobs) and one["raw_logprobs"] == list(rollout.raw_logprobs)
