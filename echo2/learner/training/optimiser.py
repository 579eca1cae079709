"""AdamW over the masters, its moments in float32, in 8 bits, or with the masters in host memory.

Guarantees: `host` gives the bits of `float32` on the same device; a resumed optimiser goes on with the bits that it had.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from echo2.base.errors import ConfigError
from echo2.config.run import OptimizerState
from echo2.learner.training.ranks import own_part, whole

PIECE_ELEMENTS = 16 << 20
"""Of masters on the device at a time: 64 MiB a tensor fill PCIe, and three tensors in two places take 0.4 GB."""


def refuse_optimizer(state: OptimizerState, weights_dtype: str, rank_count: int) -> None:
    """Raises `ConfigError`, before a model is read, for a state that cannot be had here: bitsandbytes steps on whole tensors."""
    if state == "host" and weights_dtype == "float32":
        raise ConfigError("learner.optimizer_state: expected weights in bfloat16 for host, got float32")
    if state != "8bit":
        return
    if rank_count > 1:
        raise ConfigError(f"learner.optimizer_state: expected float32 or host on {rank_count} ranks, got 8bit")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "learner.optimizer_state: expected the package of echo2[lean] for 8bit, bitsandbytes not found; install it from "
            "echo2's checkout: pip install '.[lean]'"
        )


def adamw_of(
    state: OptimizerState, masters: Sequence[Tensor], device: torch.device, **settings: Any
) -> torch.optim.Optimizer:
    """Makes AdamW: fused on a GPU; on a CPU the plain one, because recorded runs depend on its exact bits. `settings`: lr, betas,
    eps, weight_decay. `refuse_optimizer` tells what is not to be had."""
    if state == "host":
        return HostAdamW(masters, device, **settings)
    if state == "float32":
        return torch.optim.AdamW(masters, fused=True if device.type == "cuda" else None, **settings)
    import bitsandbytes

    optimiser: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(masters, **settings)
    return optimiser


def host_tensors(like: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Float32 tensors of zeros in host memory, of this rank's shapes, in one buffer that a GPU copies from and to by itself."""
    shapes = [own_part(tensor).shape for tensor in like]
    held = np.zeros(sum(shape.numel() for shape in shapes), np.float32)
    if device.type == "cuda" and held.size:
        # Registered, not pin_memory(): that rounds up to a power of two. Refused, the copies are slower and right.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if not int(cudart.cudaHostRegister(held.ctypes.data, held.nbytes, 0)):
            # Else the address stays taken.
            weakref.finalize(held, cudart.cudaHostUnregister, held.ctypes.data).atexit = False
    parts = torch.split(torch.from_numpy(held), [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def clip(gradients: Sequence[Tensor | None], norm_max: float) -> float:
    """Scales the gradients to a global norm of at most `norm_max`, as torch's `clip_grad_norm_` does; returns the norm before."""
    present = [gradient for gradient in gradients if gradient is not None]
    norm = whole(torch.nn.utils.get_total_norm(present))
    scale = torch.clamp(norm_max / (norm + 1e-6), max=1.0)
    for gradient in present:
        own_part(gradient).mul_(scale)
    return float(norm)


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose masters and moments lie in host memory. Each piece of them visits the device for its update while the piece
    before goes back and the next one comes (ZeRO-Offload, Ren et al. 2021, with the arithmetic left on the device)."""

    def __init__(self, masters: Sequence[Tensor], device: torch.device, **settings: Any) -> None:
        super().__init__(masters, settings)
        self._masters, self._device = masters, device
        self._first, self._second = host_tensors(masters, device), host_tensors(masters, device)
        self._streams = _Streams(device) if device.type == "cuda" else None

    def moments_of(self, master: Tensor) -> dict[str, Tensor]:
        """The state of one master, zero if there is none yet."""
        state: dict[str, Tensor] = self.state[master]
        if not state:
            number = next(n for n, other in enumerate(self._masters) if other is master)
            first, second = self._first[number].zero_(), self._second[number].zero_()
            state |= {"step": torch.zeros((), dtype=torch.float32), "exp_avg": first, "exp_avg_sq": second}
        return state

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> None:
        """Updates each master that has a gradient (float32, on the device), and rounds it to its parameter in bf16."""
        for master, gradient, parameter in zip(self._masters, gradients, parameters, strict=True):
            if gradient is None:
                continue
            state = self.moments_of(master)
            held = [part.view(-1) for part in (own_part(master), state["exp_avg"], state["exp_avg_sq"])]
            flat, rounded = own_part(gradient).reshape(-1), own_part(parameter).view(-1)
            for begin in range(0, held[0].numel(), PIECE_ELEMENTS):
                place = slice(begin, begin + PIECE_ELEMENTS)
                self._update_piece([part[place] for part in held], flat[place], rounded[place], state["step"])
            state["step"] += 1
        if self._streams is not None:
            self._streams.going.synchronize()

    def _update_piece(self, held: list[Tensor], gradient: Tensor, rounded: Tensor, step: Tensor) -> None:
        how = self.param_groups[0]
        first, second, steps = held[1], held[2], step.clone()
        master = held[0]
        if self._streams is not None:
            master, first, second, steps = self._streams.bring([*held, step], self._device)
        adamw(
            [master], [gradient], [first], [second], [], [steps], foreach=False, amsgrad=False, lr=how["lr"],
            beta1=how["betas"][0], beta2=how["betas"][1], weight_decay=how["weight_decay"], eps=how["eps"], maximize=False,
            fused=True if self._streams is not None else None,
        )  # fmt: skip
        rounded.copy_(master.to(torch.bfloat16))
        if self._streams is not None:
            self._streams.take_back([master, first, second], held)


class _Streams:
    """Copies to and from the device beside its computing, at most `IN_FLIGHT` pieces at a time, whose memory is used again."""

    IN_FLIGHT = 2

    def __init__(self, device: torch.device) -> None:
        self.coming: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.going: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._gone: deque[torch.cuda.Event] = deque()

    def bring(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        if len(self._gone) == self.IN_FLIGHT:
            self._gone.popleft().synchronize()
        with torch.cuda.stream(self.coming):
            moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
        current = torch.cuda.current_stream(device)
        current.wait_stream(self.coming)
        for tensor in moved:
            tensor.record_stream(current)
        return moved

    def take_back(self, tensors: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        self.going.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(self.going):
            for part, tensor in zip(held, tensors, strict=True):
                part.copy_(tensor, non_blocking=True)
                tensor.record_stream(self.going)
            self._gone.append(self.going.record_event())


def put_back_state(
    optimiser: torch.optim.Optimizer, master: Tensor, field: str, value: Tensor, *, is_given_away: bool
) -> None:
    """Restores one field of a master's state. `is_given_away`: the value may be kept, instead of copied, on a CPU."""
    if isinstance(optimiser, HostAdamW):
        own_part(optimiser.moments_of(master)[field]).copy_(own_part(value))
        return
    state, device = optimiser.state[master], own_part(master).device
    if field == "step":
        is_fused = isinstance(optimiser, torch.optim.AdamW) and bool(optimiser.defaults["fused"])
        state[field] = (
            value.to(device if is_fused else value.device, copy=True) if value.is_floating_point() else int(value)
        )
    elif is_given_away and device.type == "cpu":
        state[field] = value
    elif value.shape == master.shape and value.dtype == master.dtype:
        state[field] = torch.zeros_like(master)
        own_part(state[field]).copy_(own_part(value))
    else:  # moments in 8 bits and what reads them
        state[field] = value.to(device, copy=True)
