"""Bounds on bytes that connections send and no handler receives, because gRPC has no such bound.

gRPC buffers all bytes that a message claims to have before it checks the length. So we ask the
kernel how many bytes a connection has received, and shut a connection that sends far more than its
handlers have read, or makes only calls that are refused. On systems other than Linux there is no
bound.
"""

import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic
from urllib.parse import unquote

_log = logging.getLogger(__name__)
_DESCRIPTORS = Path("/proc/self/fd")
_BYTES = struct.Struct("<QQ")  # acknowledged by the peer, and received
_BYTES_AT = 120  # offset in struct tcp_info of linux/tcp.h
_UNREAD_BYTES = 16 * 2**20  # per connection: a message and the lookahead of each of eight calls
_ALL_UNREAD_BYTES = 512 * 2**20  # of all connections together
_STRANGER_SECONDS = 30.0  # how long a connection may last without an admitted call
_LEAST_SECONDS = 0.1  # between two checks, or longer, so that they take at most
_SHARE = 0.05  # of the time
# Overhead that a connection may send besides messages: frames, headers, windows and pings, as bytes
# per byte read, per byte sent, per call and per second.
_PER_READ, _PER_SENT, _PER_CALL, _PER_SECOND = 0.02, 0.005, 512, 64

Peer = tuple[str, int]  # IP address and port


def peer_of(name: str) -> Peer:
    """Parse gRPC's name of a peer: "ipv4:192.0.2.7:4711" or "ipv6:%5B2001:db8::7%5D:4711"."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@dataclass(frozen=True)
class _Count:
    """The state of a connection at its last check."""

    first: float  # when it was checked first
    last: float  # when it was checked last
    received: int  # bytes, as counted by the kernel
    acknowledged: int  # bytes sent to the peer, as counted by the kernel
    granted: float  # bytes that the peer was allowed to send
    unread: float = 0.0  # estimate of the received bytes that no handler has read


class Traffic:
    """Connections to one port: bytes that each received, and bytes that handlers have read."""

    def __init__(self) -> None:
        self._granted: dict[Peer, float] = {}
        self._counts: dict[Peer, _Count] = {}
        self._absent: set[Peer] = set()  # not connected at the last check, perhaps since

    def called(self, peer: Peer) -> None:
        """Record that a call of a peer was admitted."""
        self._grant(peer, _PER_CALL)

    def read(self, peer: Peer, size: int) -> None:
        """Record that a handler received a message of `size` bytes from a peer."""
        self._grant(peer, (1.0 + _PER_READ) * size)

    def _grant(self, peer: Peer, size: float) -> None:
        self._granted[peer] = self._granted.get(peer, 0.0) + size

    def bound(self, port: int, stop: Event) -> None:
        """Call `shut_excessive` repeatedly until `stop` is set."""
        seconds = 0.0
        while not stop.wait(max(_LEAST_SECONDS, seconds / _SHARE)):
            began = monotonic()
            with suppress(OSError):  # too many open files
                self.shut_excessive(port)
            seconds = monotonic() - began

    def shut_excessive(self, port: int) -> None:
        """Shut connections to a local port that have too many unread bytes or no admitted call.

        The allowance for overhead accrues over time, but an unused part does not accumulate.
        """
        counts = {peer: self._counted(connection, peer) for connection, peer in _connections(port)}
        absent = set(self._granted) - counts.keys()
        for peer in absent & (self._absent | self._counts.keys()):
            self._granted.pop(peer, None)
        self._counts, self._absent = counts, absent
        long_ago = monotonic() - _STRANGER_SECONDS
        old = {peer for peer, count in counts.items() if count.first < long_ago}
        excessive = old - self._granted.keys()
        total = sum(count.unread for count in counts.values())
        for peer, count in sorted(counts.items(), key=lambda item: -item[1].unread):
            if count.unread <= _UNREAD_BYTES and total <= _ALL_UNREAD_BYTES:
                break
            total -= count.unread
            excessive.add(peer)
            size = count.unread // 2**20
            _log.warning("shut a connection of %s: %d MiB of it make no message", peer[0], size)
        if excessive:
            for connection, peer in _connections(port):
                if peer in excessive:
                    connection.shutdown(socket.SHUT_RDWR)

    def _counted(self, connection: socket.socket, peer: Peer) -> _Count:
        acknowledged, received = _counters(connection)
        now, granted = monotonic(), self._granted.get(peer, 0.0)
        before = self._counts.get(peer) or _Count(now, now, 0, 0, 0.0)
        unread = before.unread + (received - before.received) - (granted - before.granted)
        unread -= _PER_SENT * (acknowledged - before.acknowledged)
        unread -= _PER_SECOND * (now - before.last)
        return _Count(before.first, now, received, acknowledged, granted, max(0.0, unread))


def _connections(port: int) -> Iterator[tuple[socket.socket, Peer]]:
    """Yield the connections accepted at a port, each open until the next is requested."""
    for path in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        descriptor = int(path.name)
        with suppress(OSError):  # gRPC closes connections meanwhile
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            # A duplicate, since gRPC may close its descriptor and the system may reuse the number.
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.getsockname()[1] == port:
                    host, number, *_ = connection.getpeername()  # fails for a listening socket
                    yield connection, (_plain(host), number)


def _counters(connection: socket.socket) -> tuple[int, int]:
    """Return bytes that the peer has acknowledged, and that it has sent; 0 before Linux 4.1."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    padded = information.ljust(_BYTES_AT + _BYTES.size, b"\0")
    acknowledged, received = _BYTES.unpack_from(padded, _BYTES_AT)
    return acknowledged, received
