"""A TCP forwarder between real processes whose links a test may cut, stall or refuse."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Forwarder:
    """Listens on `port` and forwards to `target`; runs in a thread of its own until `close`."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_refusing = self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> int:
        """Breaks all connections; returns how many."""
        with self._lock:
            ends = list(self._pairs)
            for end in ends:
                self._drop(end)
        return len(ends) // 2

    def refuse(self, is_refusing: bool) -> None:
        """While refusing, new connections are ended at once."""
        self._is_refusing = is_refusing

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(5)
        self.cut()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(0.2):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            if self._is_refusing:
                raise ConnectionRefusedError
            far = socket.create_connection(self._target, timeout=2)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            one.settimeout(10)
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._pairs[end].sendall(data)
                return
        except OSError:
            pass
        self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        for one in (end, self._pairs.get(end)):
            if one is None:
                continue
            self._pairs.pop(one, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()
