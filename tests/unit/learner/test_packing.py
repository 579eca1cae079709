"""The layout of a batch in rows, and both forms of its mask and both attentions over it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from echo2.base.errors import ConfigError
from echo2.base.ids import Step
from echo2.learner.rollouts.groups import Batch, Insertion
from echo2.learner.training import model as model_module, trainer as trainer_module
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.packing import (
    BLOCK,
    Attention,
    GroupLengths,
    PackingLimits,
    UnitTree,
    block_mask,
    collate,
    dense_mask,
    lengths_of,
    plan_microbatches,
)
from echo2.learner.training.scoring import choose_attention, refuse_wrong_rows, trial_inputs
from tests.contract.families import WINDOW, WINDOWED, save_tiny
from tests.unit.learner.made import group_of, new_trainer, rollout_of
from tests.unit.learner.tiny import make_tiny_model

GROUPS = st.lists(
    st.builds(GroupLengths, st.integers(1, 40), st.lists(st.integers(1, 60), max_size=9).map(tuple)), max_size=12
)
LIMITS = st.builds(PackingLimits, st.integers(1, 600), st.integers(1, 300), st.booleans())


@given(groups=GROUPS, limits=LIMITS)
def test_every_completion_has_one_place_and_budgets_hold(groups: list[GroupLengths], limits: PackingLimits) -> None:
    places: Counter[tuple[int, int]] = Counter()
    layout = plan_microbatches(groups, limits)
    assert layout == plan_microbatches(list(groups), limits), "a function of the lengths"
    for micro in layout:
        assert micro.positions <= limits.token_budget or len(micro.rows) == 1
        for row in micro.rows:
            used = 0
            for unit in row:
                group = groups[unit.group]
                assert unit.tokens == group.prompt + sum(group.completions[member] for member in unit.members)
                assert limits.is_packed or len(unit.members) == 1
                places.update((unit.group, member) for member in unit.members)
                used += unit.tokens
            assert used <= micro.width
    expected = {(g, m) for g, group in enumerate(groups) for m in range(len(group.completions))}
    assert set(places) == expected and all(count == 1 for count in places.values())


def test_siblings_share_their_prompt() -> None:
    (micro,) = plan_microbatches([GroupLengths(10, (5, 5, 5, 5))], PackingLimits(1000, 100))
    assert micro.width == 30 and len(micro.rows) == 1


# Without a compiler it says that it is slow; the compiler's own modules use what torch calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

CPU = torch.device("cpu")
VOCABULARY = 50


def tree_of(seed: int, rows: int = 2, blocks: int = 4) -> UnitTree:
    return trial_inputs(VOCABULARY, seed, rows, blocks * BLOCK).tree


def seen_one_by_one(tree: UnitTree) -> torch.Tensor:
    """By the rule in words, a pair of tokens at a time."""
    rows, width = tree.unit_BW.shape
    seen = torch.zeros(rows, width, width, dtype=torch.bool)
    for b in range(rows):
        unit, part = tree.unit_BW[b].tolist(), tree.part_BW[b].tolist()
        for query in range(width):
            for key in range(query + 1):
                seen[b, query, key] = unit[query] == unit[key] and part[key] in (0, part[query])
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_the_dense_mask_is_the_rule_and_blocks_are_those_of_it_and_no_others(seed: int) -> None:
    tree = tree_of(seed, rows=1, blocks=1)
    assert torch.equal(dense_mask(tree), seen_one_by_one(tree))
    assert bool(dense_mask(tree).any(-1).all()), "a row of a softmax is never empty"
    tree = tree_of(seed)
    blocks = block_mask(tree)
    dense = dense_mask(tree)
    rows, width, _ = dense.shape
    tiles = dense.view(rows, width // BLOCK, BLOCK, width // BLOCK, BLOCK).transpose(2, 3)
    expected = tiles.any(-1).any(-1)
    assert torch.equal(blocks.to_dense()[:, 0].bool(), expected)
    assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
    for b in range(rows):
        for band in range(width // BLOCK):
            count = int(blocks.full_kv_num_blocks[b, 0, band])
            full = set(blocks.full_kv_indices[b, 0, band, :count].tolist())
            assert full == set(tiles[b, band].all(-1).all(-1).nonzero()[:, 0].tolist())


def test_a_whole_model_gives_the_same_log_probabilities_by_either(model_path: Path) -> None:
    policy = PolicyModel(str(model_path), "float32", CPU, 1.0).policy
    inputs = trial_inputs(VOCABULARY, 5)
    with torch.no_grad():
        expected_T, _ = policy(inputs)
        policy.attend_by(Attention.FLEX)
        assert policy.row_multiple == BLOCK
        with torch.compiler.set_stance("force_eager"):
            found_T, _ = policy(inputs)
        policy.attend_by(Attention.DENSE)
        again_T, _ = policy(inputs)
    assert torch.allclose(found_T, expected_T, atol=1e-5)
    assert torch.equal(again_T, expected_T) and policy.row_multiple == 1


def test_chats_that_begin_alike_with_nothing_are_attended_to_by_units_too(model_path: Path) -> None:
    policy = PolicyModel(str(model_path), "float32", CPU, 1.0).policy
    said = (Insertion(0, (6, 7)),), (Insertion(0, (8,)),)
    groups = [
        group_of((), [rollout_of((9, 10, 1)), rollout_of((11, 1), 1)], said=said),
        group_of((5,), [rollout_of((4, 1))]),
    ]
    (micro,) = plan_microbatches(lengths_of(groups), PackingLimits(64, 32))
    expected_T, found_T = (policy(collate(groups, replace(micro, by_units=way)).inputs)[0] for way in (False, True))
    assert torch.allclose(found_T, expected_T, atol=1e-5)
    torch.autograd.backward(found_T.sum())
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in policy.parameters())


def test_beyond_their_window_rows_are_as_short_as_their_mask_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("mistral", WINDOWED, tmp_path)
    trainer = new_trainer(tmp_path)
    monkeypatch.setattr(trainer_module, "PART_FLOPS", -1e30)
    for completion, by_units in ((WINDOW - 3, True), (WINDOW - 2, False)):
        groups = [group_of((5, 6, 7), [rollout_of([8] * completion)]) for _ in range(9)]
        (part,) = trainer._parts(Batch(Step(0), tuple(groups)))
        assert {micro.by_units for micro in part.layout} == {by_units}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {"final_logit_softcapping": 1.5}),
        ("cohere2", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 3.0}),
    ],
)
def test_logits_are_made_in_pieces_where_a_family_scales_or_caps_them_too(
    tmp_path: Path, model_type: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(model_type, fields, tmp_path)
    policy = PolicyModel(str(tmp_path), "float32", CPU, 1.0).policy
    assert policy.slices_head
    rollout = rollout_of((9, 10, 11))
    group = group_of((5, 6), [rollout])
    (micro,) = plan_microbatches(lengths_of([group]), PackingLimits(64, 32))
    own_TV = policy.hf_model(torch.tensor([[5, 6, 9, 10, 11]])).logits[0, 1:-1].log_softmax(-1)
    own_T, parameters = own_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0], list(policy.parameters())
    weight_T = torch.tensor([1.0, -2.0, 3.0])
    expected = torch.autograd.grad((own_T * weight_T).sum(), parameters)
    for rows in (3, 2):  # in one piece, and in two
        monkeypatch.setattr(model_module, "LOGIT_BYTES_MIN", 4 * 96 * rows)
        found_T, _ = policy(collate([group], micro).inputs)
        assert torch.allclose(found_T, own_T, atol=1e-5)
        for one, other in zip(torch.autograd.grad((found_T * weight_T).sum(), parameters), expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_where_flex_fails_dense_goes_on_and_says_why(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A CPU has no gradient of it: what a broken kernel would do on another device."""
    policy = PolicyModel(str(model_path), "float32", CPU, 1.0).policy
    policy_inputs_stay = trial_inputs(VOCABULARY, 0)
    for device in (CPU, torch.device("meta")):
        assert "dense masks, slower" not in caplog.text
        choose_attention(policy, device)
        assert policy.attention is Attention.DENSE
    assert "dense masks, slower" in caplog.text
    assert torch.isfinite(policy(policy_inputs_stay)[0]).all()
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_ignores_masks_is_refused(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_computes_in_bf16", lambda *_: dtype == "bfloat16")  # as on a GPU
    policy = PolicyModel(str(make_tiny_model(tmp_path, hidden=128, layers=8)), dtype, CPU, 1.0).policy
    with torch.no_grad():
        policy.hf_model.get_output_embeddings().weight.mul_(100)  # rounds a token by 0.25 nats in bf16
    refuse_wrong_rows(policy, 200, "model m")
    policy.hf_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(ConfigError, match=r"model m: the learner cannot lay out its sequences in rows: .* nats"):
        refuse_wrong_rows(policy, 200, "model m")


def test_a_model_whose_code_takes_no_mask_of_rows_is_refused(tmp_path: Path) -> None:
    save_tiny("openai-gpt", {}, tmp_path)
    policy = PolicyModel(str(tmp_path), "float32", CPU, 1.0).policy
    with pytest.raises(ConfigError, match="model m: the learner cannot lay out its sequences in rows: RuntimeError"):
        refuse_wrong_rows(policy, 200, "model m")
