"""What a GPU's memory decides, entered on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.ids import Step
from echo2.learner.rollouts.groups import Batch
from echo2.learner.training.model import Chosen, host_copies, logit_bytes, selective_contexts
from tests.unit.learner.test_trainer import gradient_of, new_trainer, random_groups
from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_logits_grow_with_the_memory_that_is_free_within_bounds() -> None:
    assert [logit_bytes(free << 30) >> 20 for free in (0, 1, 2, 8, 16, 100)] == [64, 64, 128, 512, 1024, 1024]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_that_a_device_makes_by_itself_are_the_same(dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 3), torch.randn(7), torch.zeros(0, 4)]
    plain, pinned = (host_copies(parts, dtype, pinned=is_pinned) for is_pinned in (False, True))
    for one, other, part in zip(plain, pinned, parts, strict=True):
        assert torch.equal(one, other) and other.dtype == dtype and torch.equal(one, part.to(dtype))
    kept = [copy.clone() for copy in pinned]
    for part in parts:
        part.add_(1.0)
    assert all(torch.equal(copy, before) for copy, before in zip(pinned, kept, strict=True))


def test_selective_checkpointing_gives_the_same_gradient(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Step(0), random_groups(3))
    plain = gradient_of(new_trainer(model_path, weights_dtype="float32"), batch)
    asked: list[tuple[bool, str]] = []
    original = Chosen.__call__

    def watched(self: Chosen, context: Any, op: Any, *rest: Any, **named: Any) -> Any:
        policy = original(self, context, op, *rest, **named)
        asked.append((context.is_recompute, policy.name))
        return policy

    monkeypatch.setattr(Chosen, "__call__", watched)
    found = gradient_of(new_trainer(model_path, weights_dtype="float32", gradient_checkpointing="selective"), batch)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, found, strict=True))
    assert {policy for _, policy in asked} == {"MUST_SAVE", "PREFER_RECOMPUTE"}


def test_a_layer_keeps_half_of_its_products() -> None:
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    products = 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def layer(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    counts = []
    for context_fn in (None, selective_contexts):
        how = {} if context_fn is None else {"context_fn": context_fn}
        with Counting():
            products = 0
            x = torch.ones(2, 8, requires_grad=True)
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, **how).sum().backward()
        counts.append(products)
    assert counts[0] - counts[1] == 2, "two of four products are not computed again"
