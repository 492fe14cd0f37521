from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """A TCP proxy that records what clients send, and can cut their connections."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.sent = bytearray()  # what the clients wrote
        self._down = threading.Event()
        self._silent = threading.Event()
        self.refused = 0  # connections, while it was down or silent
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._silent.is_set():
                self._sockets.append(near)
                self.refused += 1
                continue
            if self._down.is_set():
                near.close()
                self.refused += 1
                continue
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for ends in ((near, far, self.sent), (far, near, bytearray())):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        try:
            while data := source.recv(65536):
                record += data
                sink.sendall(data)
        except OSError:
            pass

    def go_down(self) -> None:
        """Cuts all connections and takes no new ones until `come_back`."""
        self._down.set()
        self.cut()

    def fall_silent(self) -> None:
        """Cuts all connections; new ones are taken and never answered."""
        self._silent.set()
        self.cut()

    def come_back(self) -> None:
        self._down.clear()

    def cut(self) -> None:
        # Not those that clients open from now on: they come back at once.
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):  # its other end may have closed it
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
