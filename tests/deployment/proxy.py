"""A network between nodes and server that can be slow, cut or silent."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 2**14
_ACCEPT_SECONDS = 0.05
# With this, the end of a connection is a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class Proxy:
    """Passes what comes at `port` on to a port of this machine, in both directions.

    Attributes:
        port: where it listens.
        up: bytes that were passed on to the server so far.
        down: bytes that were passed on to nodes so far.
        up_rate: bytes per second, of each connection, that are passed on to the server; None: all.
        down_rate: the same to nodes.
        open: while it is not set, nothing is passed on; nothing is lost either, as from a network
            that comes back before anybody has given up.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_ACCEPT_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self.up = self.down = 0
        self.up_rate: float | None = None
        self.down_rate: float | None = None
        self.open = threading.Event()
        self.open.set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def reset(self) -> None:
        """Cut all connections; new ones are passed on."""
        with self._lock:
            cut, self._sockets = self._sockets, []
        for one in cut:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                one.shutdown(socket.SHUT_RD)  # wakes the thread that reads
            one.close()

    def close(self) -> None:
        """End all connections and threads."""
        self._ended.set()
        self.open.set()
        self.up_rate = self.down_rate = None
        self.reset()
        for thread in self._threads:
            thread.join()
        self.reset()  # one that was being accepted
        self._listener.close()

    def _begin(self, function, *args) -> None:
        thread = threading.Thread(target=function, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                node, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # nobody listens there
                node.close()
                continue
            for one in (node, server):
                one.settimeout(None)
            with self._lock:
                self._sockets += [node, server]
            self._begin(self._pump, node, server, "up")
            self._begin(self._pump, server, node, "down")

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(_PIECE):
                self.open.wait()
                if rate := getattr(self, f"{way}_rate"):
                    time.sleep(len(data) / rate)
                sink.sendall(data)
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other direction was cut
            with suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """A proxy that ends with the block."""
    one = Proxy(target)
    try:
        yield one
    finally:
        one.close()
