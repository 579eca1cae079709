"""What a learner needs: state by the parameter, activations by the budget, shared out over GPUs; how often a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.money.market import built_in_models
from echo2.cost_model.sizing import (
    AUDIT_BYTES_OF_CHANGE,
    AUDIT_CHANGED_SHARE,
    KILLED_EVERY_S,
    REPLAY_S,
    STEPS_MAX,
    Checkpointing,
    LearnerRun,
    activation_bytes,
    adapter_parameters,
    audit_versions,
    checkpointing_of,
    fewest_gpus,
    learner_memory,
    steps_between,
)

MODELS = built_in_models()


def test_the_state_of_eight_billion_is_twenty_bytes_a_parameter_over_its_gpus_and_two_less_on_one() -> None:
    size = MODELS["qwen3-8b"]
    run = LearnerRun(checkpoints_kept=2)
    whole = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=1, run=run)
    shared = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=run)
    assert whole.state_bytes == 18 * size.parameters and 8 * shared.state_bytes == 20 * size.parameters
    assert whole.activation_bytes == shared.activation_bytes, "each rank has a micro-batch of its own"
    assert whole.disk_bytes == 3 * 14 * size.parameters, "masters, both moments and the published weights, three times"
    assert shared.host_bytes > (12 + 4) * size.parameters, "the copies that a checkpoint is written from"
    stored = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=replace(run, store_bytes=33 << 30))
    assert stored.disk_bytes == shared.disk_bytes + (33 << 30)


def test_eight_billion_fit_one_gpu_of_80_gb_with_their_masters_on_its_host() -> None:
    size, room = MODELS["qwen3-8b"], int(0.9 * 80e9)
    need = {
        how: learner_memory(size, 8192, Checkpointing.FULL, gpu_count=1, run=LearnerRun(optimizer_state=how))
        for how in ("float32", "8bit", "host")
    }
    assert need["host"].device_bytes < room < need["8bit"].device_bytes < need["float32"].device_bytes
    assert need["host"].host_bytes - need["float32"].host_bytes == 12 * size.parameters
    assert need["8bit"].disk_bytes < 0.6 * need["float32"].disk_bytes


def test_checkpointing_is_taken_where_activations_outgrow_memory_and_selective_lies_between() -> None:
    size = MODELS["qwen3-8b"]
    small, full = MODELS["smollm2-135m"], Checkpointing.FULL
    assert checkpointing_of("auto", size, 16384, 2) is full is not checkpointing_of("auto", small, 2048, 4)
    assert checkpointing_of("auto", small, 1 << 16, 4) is full, "a budget may be large for any model"
    off, some, full = (activation_bytes(size, 16384, keeps, 2) for keeps in Checkpointing)
    assert full < some < off and off > 10 * full - 10 * 4 * (256 << 20)
    # What attention gave, the input, and the products of keys, output and the MLP's second.
    assert some - full == 16384 * 2 * size.layer_count * (4096 + 1024 + 4096 + 12288)
    assert checkpointing_of("selective", size, 16384, 2) is Checkpointing.SELECTIVE


def test_audits_keep_the_versions_of_two_bounds_and_each_costs_host_memory() -> None:
    size = MODELS["qwen3-8b"]
    two, six, off = (
        learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=run).host_bytes
        for run in (LearnerRun(2), LearnerRun(6), LearnerRun(6, is_audited=False))
    )
    assert (audit_versions(2), audit_versions(6)) == (6, 14)
    each = AUDIT_CHANGED_SHARE * AUDIT_BYTES_OF_CHANGE * size.parameters
    assert abs(six - two - 8 * each) < 4 and abs(six - off - 14 * each) < 4
    held = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=LearnerRun(2, rollout_tokens=4e7))
    assert held.host_bytes - two == 4_000_000_000, "100 bytes for each token of a rollout in flight"


def test_an_adapter_needs_its_base_once_and_a_state_for_itself_alone() -> None:
    """Linear layers of Qwen3-4B: 2560 wide, 32 heads and 8 of keys of 128, 9728 in the MLP."""
    size = MODELS["qwen3-4b"]
    adapter = adapter_parameters(size, 16)
    each = (2560 + 4096) * 2 + 2 * (2560 + 1024) + 3 * (2560 + 9728)
    assert adapter == 16 * 36 * each
    found = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=1, run=LearnerRun(adapter_rank=16))
    assert found.state_bytes == 2 * size.parameters + 18 * adapter
    assert found.disk_bytes == 3 * 14 * adapter, "two checkpoints and the one being written"


def test_eight_billion_in_four_bits_train_an_adapter_on_24_gb() -> None:
    size, memory_bytes = MODELS["qwen3-8b"], 24 << 30
    coded, whole = LearnerRun(adapter_rank=16, has_nf4_base=True), LearnerRun(adapter_rank=16)
    assert fewest_gpus(size, 16384, memory_bytes, coded) == 1 < fewest_gpus(size, 16384, memory_bytes, whole)
    state = [learner_memory(size, 4096, Checkpointing.FULL, gpu_count=1, run=run).state_bytes for run in (coded, whole)]
    assert state[1] - state[0] == pytest.approx((2 - 4.25 / 8) * size.linear_parameters, abs=1.0)


SECONDS = st.floats(1e-3, 3600.0)


@given(SECONDS, SECONDS, st.floats(1.0, 10.0))
def test_no_other_number_of_steps_between_checkpoints_costs_much_less(
    checkpoint_s: float, train_s: float, waiting: float
) -> None:
    step_s = waiting * train_s

    def cost(steps: int) -> float:
        return checkpoint_s / (steps * step_s) + steps * train_s / (2 * KILLED_EVERY_S)

    found = steps_between(checkpoint_s, train_s, step_s)
    assert 1 <= found <= STEPS_MAX and (found == 1 or found * train_s <= REPLAY_S)
    allowed = [steps for steps in range(1, STEPS_MAX + 1) if steps == 1 or steps * train_s <= REPLAY_S]
    assert cost(found) <= 1.3 * min(map(cost, allowed)), "rounded down: a step less loses little"
    assert steps_between(1.0, 0.0, 0.0) == STEPS_MAX, "nothing was trained yet"
