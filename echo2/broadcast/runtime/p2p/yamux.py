"""Wider windows for py-libp2p's yamux streams, and writes that wait for room as long as it takes.

A stream moves at most one window per round trip. The library starts at 256 KiB (3.2 MB/s over 80 ms) and doubles the
window occasionally; here it is 16 MiB from the start, more than py-libp2p can fill. An unread stream can buffer
a full window in memory, so relays, which hold two per circuit, use RELAY_WINDOW_BYTES. The library's own write gives up
after 5 s without room; but a slow link is not a dead peer, so keepalives decide that instead.
"""

from __future__ import annotations

from typing import Any

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import MAX_WINDOW_SIZE, YamuxStream

WINDOW_BYTES: int = MAX_WINDOW_SIZE
RELAY_WINDOW_BYTES = 4 << 20
PIECE_BYTES = 48 << 10
ROOM_LOOK_S = 0.005


async def widen(stream: Any, window_bytes: int = WINDOW_BYTES) -> None:
    """Lets the other side send up to `window_bytes` unacknowledged. `stream`: a libp2p network stream."""
    inner = getattr(stream, "muxed_stream", None)
    if not isinstance(inner, YamuxStream):
        return
    async with inner.window_lock:
        more = window_bytes - inner.target_recv_window
        if more <= 0:
            return
        inner.target_recv_window = window_bytes
        inner.recv_window += more
    await inner.send_window_update(more)


async def write(stream: Any, data: bytes) -> None:
    """Writes all data, waiting for room without limit; raises MuxedStreamError if the stream ends."""
    inner = getattr(stream, "muxed_stream", None)
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        while isinstance(inner, YamuxStream) and inner.send_window < len(piece):
            if inner.closed or inner.send_closed:
                raise MuxedStreamError("the stream ended while it had no room")
            await trio.sleep(ROOM_LOOK_S)
        await stream.write(bytes(piece))
