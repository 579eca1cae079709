"""Records or replays the choices of the routers of a mixture of experts, in transformers' modules.

Guarantees: recording changes no number; with given experts, each router weighs those by its own scores, with their gradient; a
router chooses itself where the given expert is negative; layers recomputed in a backward pass get the same experts.

Shapes: T tokens of one forward pass, in the order in which the model flattens them; L routers, K chosen experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echo2.base.errors import ConfigError
from echo2.base.rollout import RoutingShape

# The two forms in which transformers' routers choose.
_TOPK: tuple[Callable[..., Any], ...] = (torch.topk, torch.Tensor.topk)


class Routers:
    """The routers of one model, in the order of its layers. Not for concurrent calls of the model."""

    def __init__(self, model: nn.Module, owner: str) -> None:
        modules = [module for module in model.modules() if _is_router(module)]
        sizes = {(int(module.top_k), int(module.num_experts)) for module in modules}  # type: ignore[arg-type]
        if len(sizes) != 1:
            raise ConfigError(
                f"{owner}: routing can be replayed where each router says its top_k and num_experts, the same ones; "
                + ("this model has no such router" if not modules else f"got {sorted(sizes)}")
            )
        ((chosen, experts),) = sizes
        self.owner = owner
        self.shape = RoutingShape(len(modules), chosen, experts)
        self._given_LTK: Tensor | None = None
        self._record: list[Tensor] | None = None
        for number, module in enumerate(modules):
            module.forward = _Chosen(self, number, module.forward)

    def give(self, experts_TLK: Tensor | None) -> None:
        """Sets the experts for all passes from now on (None: none); negative entries let the router choose."""
        self._given_LTK = None if experts_TLK is None else experts_TLK.transpose(0, 1)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yields a list that holds each router's choice, [T, K] each, after the forward pass."""
        choices: list[Tensor] = []
        self._record = choices
        try:
            yield choices
        finally:
            self._record = None

    def choose(self, number: int, scores_TE: Tensor, choice: Any) -> Any:
        """The values and indices that router `number` uses, instead of its own `choice`."""
        values_TK, experts_TK = choice
        if self._given_LTK is not None:
            given_TK = self._given_LTK[number].to(experts_TK)
            experts_TK = torch.where(given_TK < 0, experts_TK, given_TK)
            values_TK = scores_TE.gather(-1, experts_TK)
        if self._record is not None:
            self._record.append(experts_TK)
        return torch.return_types.topk((values_TK, experts_TK))


class _Chosen:
    def __init__(self, routers: Routers, number: int, forward: Callable[..., Any]) -> None:
        self._routers, self._number, self._forward = routers, number, forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with _Choosing(self._routers, self._number) as choosing:
            outcome = self._forward(*arguments, **named)
        if not choosing.has_chosen:  # met at a start, whose trials call the model
            raise ConfigError(
                f"{self._routers.owner}: routing can be replayed where routers choose by torch.topk, and these do not: set "
                "learner.replay_routing = false"
            )
        return outcome


class _Choosing(TorchFunctionMode):
    """Intercepts the top-k call by which a router chooses among all experts."""

    def __init__(self, routers: Routers, number: int) -> None:
        super().__init__()
        self._routers, self._number, self.has_chosen = routers, number, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        choice = function(*args, **kwargs)
        if function not in _TOPK:
            return choice
        scores, shape = args[0] if args else kwargs["input"], self._routers.shape
        if scores.ndim != 2 or scores.shape[-1] != shape.experts or choice[1].shape[-1] != shape.chosen:
            return choice  # a choice of expert groups
        self.has_chosen = True
        return self._routers.choose(self._number, scores, choice)


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    known = isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int)
    return known and isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == module.num_experts
