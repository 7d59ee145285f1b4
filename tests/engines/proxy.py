"""A way to a server that can be blocked: a proxy that forwards, never answers, answers for ever, or hangs up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Literal

Mode = Literal["forward", "mute", "trickle", "hang up"]


class Proxy:
    """Listens on a port of this machine; `mode` counts for new connections."""

    def __init__(self, host: str, port: int, mode: Mode) -> None:
        self.upstream, self.mode = (host, port), mode
        self.muted = 0
        """Connections that were accepted and not answered."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.mode == "hang up":
                    client.close()
                    continue
                self._open.append(client)
                if self.mode == "mute":
                    self.muted += 1
                    continue
                if self.mode == "trickle":
                    threading.Thread(target=self._trickle, args=(client,), daemon=True).start()
                    continue
                server = socket.create_connection(self.upstream)
                self._open.append(server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _trickle(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                client.sendall(b" ")
                time.sleep(0.05)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def proxy(host: str = "127.0.0.1", port: int = 9, mode: Mode = "forward") -> Iterator[Proxy]:
    """Listen until the end of the block."""
    found = Proxy(host, port, mode)
    try:
        yield found
    finally:
        found.close()
