"""Connections between virtual machines: rates, delays, loss, clogging, partitions, cuts, frozen ends.

A wire behaves like TCP with keepalive: while it is up, frames arrive whole and in order in each direction, so packet loss only
delays a frame. Guarantees: same seed, same result; each end learns once that its wire has ended, in the context of its process.
A blocked direction holds frames back; after `KEEPALIVE_S` both ends give up the wire.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echo2.outside.net import Shown
from echo2.sim.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from echo2.sim.machine import Process

KEEPALIVE_S = 18.0  # as production's TCP: tls_streams.GONE_S
FRAME_BYTES = 60  # headers of TCP, IP and TLS
PACKET_BYTES = 1_500
"""Connections share a link: a frame that fits in a packet waits only for its own connection's queue, not for others'."""
KNOCK_AGAIN_S = 1.0  # TCP's first retransmission of a SYN


@dataclass(slots=True)
class AccessLink:
    """A machine's access link: bytes/s up and down, round-trip seconds. `clog` multiplies both rates until `clogged_until`; what
    has queued by then leaves at full speed."""

    up: float
    down: float
    rtt_s: float
    clog: float = 1.0
    clogged_until: float = 0.0
    up_free_at: float = 0.0
    down_free_at: float = 0.0

    def passed_at(self, begun_at: float, size: int, bytes_per_s: float) -> float:
        slowly = min(size, max(0.0, self.clogged_until - begun_at) * bytes_per_s * self.clog)
        return begun_at + slowly / (bytes_per_s * self.clog) + (size - slowly) / bytes_per_s


class End:
    """One end of a wire, owned by one process."""

    def __init__(self, wire: Wire, side: int, process: Process) -> None:
        self.wire, self.side, self.process = wire, side, process
        self.is_open = True
        self.on_frame: Callable[[Any], None] = lambda frame: None
        self.on_closed: Callable[[str], None] = lambda reason: None
        self.left_at = self.arrives_after = 0.0
        self.stalled: list[tuple[object, int]] = []

    @property
    def peer(self) -> End:
        return self.wire.ends[1 - self.side]

    def send(self, frame: object, size: int) -> None:
        if self.is_open and not self.process.has_ended:
            self.wire.wires.send(self, frame, size + FRAME_BYTES)

    def close(self, reason: str = "closed") -> None:
        """Closes the wire from this end; the other end learns of it later."""
        self.wire.wires.close(self, reason)


class Wire:
    """A connection. `caller_pair`: key and certificate that the caller presented, if any; `caller_port`: its local port."""

    def __init__(
        self, wires: Wires, client: Process, server: Process, pair: tuple[bytes, bytes] | None, port: int
    ) -> None:
        self.wires, self.caller_pair, self.caller_port = wires, pair, port
        self.number = wires.counts["connections"]
        self.ends = (End(self, 0, client), End(self, 1, server))


class Wires:
    """The network. `tap` is called with every frame when it is sent."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop, self._rng = loop, rng
        self.loss = 0.0
        self.jitter_s = 0.004
        self.chunk_scale = 1
        self.counts: Counter[str] = Counter()
        self.tap: Callable[[End, Any], None] = lambda end, frame: None
        self.names: dict[str, str] = {}  # machine names by address
        self.shown: dict[tuple[str, int], Shown] = {}
        self._ports = 0
        self._blocks: Counter[tuple[str, str]] = Counter()
        self._wires: dict[Wire, None] = {}
        self._listeners: dict[tuple[str, int], tuple[Process, Callable[[End], None]]] = {}

    def after(self, delay_s: float, act: Callable[[], None], process: Process | None = None) -> None:
        """Calls `act` after `delay_s` in the context of `process`, so that it is held back while that is frozen; None: in the
        network's own context."""
        context = process.context if process is not None else _NOBODY
        self.loop.call_later(max(0.0, delay_s), act, context=context)

    # ---- connecting

    def listen(self, process: Process, port: int, accept: Callable[[End], None]) -> bool:
        """Listens on a port; False if another living process has it."""
        key = (process.machine.host, port)
        held = self._listeners.get(key)
        if held is not None and not held[0].has_ended:
            return False
        self._listeners[key] = (process, accept)
        return True

    def stop_listening(self, process: Process, port: int) -> None:
        key = (process.machine.host, port)
        if key in self._listeners and self._listeners[key][0] is process:
            del self._listeners[key]

    def listener(self, host: str, port: int) -> tuple[Process, Callable[[End], None]] | None:
        held = self._listeners.get((host, port))
        return held if held is not None and not held[0].has_ended else None

    async def reach(self, client: Process, host: str, port: int, give_up_s: float) -> Process | None:
        """The process that answers there, one round trip later; None if the connection is refused or `give_up_s` have passed."""
        until = self.loop.time() + give_up_s
        while self.loop.time() < until:
            listening = self.listener(host, port)
            server = listening[0] if listening is not None else None
            name = server.name if server is not None else self.names.get(host)
            is_cut_off = name is None or self.is_cut_off(client.name, name)
            if not is_cut_off and server is None:
                await asyncio.sleep(client.machine.link.rtt_s / 2)  # refused: no process listens
                return None
            if not is_cut_off and server is not None and not server.is_frozen:
                await asyncio.sleep(2 * self._one_way_s(client, server))
                return server
            await asyncio.sleep(min(KNOCK_AGAIN_S, until - self.loop.time()))
        return None

    def connect(self, client: Process, host: str, port: int, pair: tuple[bytes, bytes] | None) -> End | None:
        """Opens a wire and returns the client's end; None if no process listens there any more."""
        listening = self.listener(host, port)
        if listening is None or client.has_ended:
            return None
        server, accept = listening
        self._ports = self._ports % 20_000 + 1
        wire = Wire(self, client, server, pair, 40_000 + self._ports)
        self._wires[wire] = None
        self.counts["connections"] += 1
        server.context.copy().run(accept, wire.ends[1])
        return wire.ends[0]

    # ---- sending

    def _one_way_s(self, first: Process, second: Process) -> float:
        return (first.machine.link.rtt_s + second.machine.link.rtt_s) / 4

    def send(self, end: End, frame: object, size: int) -> None:
        sender, receiver = end.process, end.peer.process
        if end.stalled or self.is_blocked(sender.name, receiver.name):
            end.stalled.append((frame, size))
            return
        self.tap(end, frame)
        now, near, far = self.loop.time(), sender.machine.link, receiver.machine.link
        free_at = end.left_at if size <= PACKET_BYTES else near.up_free_at
        end.left_at = near.passed_at(max(now, free_at), size, near.up)
        near.up_free_at = max(near.up_free_at, end.left_at)
        arrives_at = end.left_at + self._one_way_s(sender, receiver) + self.jitter_s * self._rng.random()
        if self.loss and self._rng.random() < self.loss:
            self.counts["packets lost"] += 1
            arrives_at += max(0.2, near.rtt_s) * self._rng.uniform(1.0, 4.0)
        if size > PACKET_BYTES:
            far.down_free_at = max(arrives_at, far.passed_at(far.down_free_at, size, far.down))
            arrives_at = far.down_free_at
        end.arrives_after = max(arrives_at, end.arrives_after + 1e-7)
        self.counts["messages"] += 1
        peer = end.peer
        self.loop.call_at(end.arrives_after, self._arrive, peer, frame, context=receiver.context)

    def backlog_s(self, end: End) -> float:
        """Seconds until everything sent on this end so far has left the machine."""
        return max(0.0, end.left_at - self.loop.time())

    def _arrive(self, end: End, frame: object) -> None:
        if end.is_open and not end.process.has_ended:
            self.counts["messages read after their sender gave the connection up"] += not end.peer.is_open
            end.on_frame(frame)

    # ---- ending

    def close(self, end: End, reason: str) -> None:
        if not end.is_open:
            return
        end.is_open = False
        is_flushed = self._rng.random() < 0.5  # if not, the peer sees the close before frames still in flight
        wait_s = self._one_way_s(end.process, end.peer.process)
        if is_flushed:
            wait_s = max(wait_s, end.arrives_after - self.loop.time() + 1e-7)
        if self.is_blocked(end.process.name, end.peer.process.name):
            wait_s = KEEPALIVE_S
        self._tell_closed(end.peer, reason, wait_s)
        self._wires.pop(end.wire, None) if not end.peer.is_open else None

    def _tell_closed(self, end: End, reason: str, wait_s: float) -> None:
        def tell() -> None:
            if end.is_open and not end.process.has_ended:
                end.is_open = False
                end.on_closed(reason)

        def forget() -> None:
            if not end.peer.is_open:
                self._wires.pop(end.wire, None)

        self.after(wait_s, tell, end.process)
        self.after(wait_s, forget)

    def process_ended(self, process: Process) -> None:
        """Closes the ended process's wires and ports, as its operating system would."""
        for end in self._ends_of(process):
            end.is_open = True
            self.close(end, f"{process.name} is gone")
        for key in [key for key, held in self._listeners.items() if held[0] is process]:
            del self._listeners[key]

    def cut(self, first: str, second: str) -> int:
        """Breaks the wires between two machines; the ends notice at different times. Returns how many were broken."""
        broken = [w for w in self._wires if {w.ends[0].process.name, w.ends[1].process.name} == {first, second}]
        for wire in broken:
            for end in wire.ends:
                self._tell_closed(end, "the connection broke", self._rng.choice((0.0, self._rng.uniform(0.0, 8.0))))
        return len(broken)

    def _ends_of(self, process: Process) -> list[End]:
        return [end for wire in list(self._wires) for end in wire.ends if end.process is process and end.is_open]

    # ---- faults

    def is_blocked(self, sender: str, receiver: str) -> bool:
        return self._blocks[(sender, receiver)] > 0

    def is_cut_off(self, first: str, second: str) -> bool:
        """In either direction."""
        return self.is_blocked(first, second) or self.is_blocked(second, first)

    def block(self, sender: str, receiver: str) -> None:
        """Blocks one direction between two machines; blocks are counted, so each needs its own `unblock`."""
        self._blocks[(sender, receiver)] += 1
        self.after(KEEPALIVE_S, lambda: self._give_up(sender, receiver))

    def unblock(self, sender: str, receiver: str) -> None:
        self._blocks[(sender, receiver)] -= 1
        if self.is_blocked(sender, receiver):
            return
        for wire in list(self._wires):
            for end in wire.ends:
                if (end.process.name, end.peer.process.name) == (sender, receiver) and end.is_open:
                    stalled, end.stalled = end.stalled, []
                    for frame, size in stalled:
                        self.send(end, frame, size)

    def _give_up(self, sender: str, receiver: str) -> None:
        if self.is_blocked(sender, receiver):
            self.cut(sender, receiver)

    def freeze(self, process: Process) -> None:
        """Freezes the process; its peers notice after `KEEPALIVE_S` if it is still frozen."""
        process.is_frozen = True

        def notice() -> None:
            if process.is_frozen and not process.has_ended:
                for end in self._ends_of(process):
                    self._tell_closed(end.peer, f"{process.name} does not answer", self._rng.uniform(0.0, 2.0))
                    self._tell_closed(end, "the other side gave up", 0.0)

        self.after(KEEPALIVE_S, notice)


_NOBODY = contextvars.Context()  # the context of what belongs to no process
