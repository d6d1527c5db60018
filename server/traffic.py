"""What connections have sent that no handler was given: gRPC has no bound for it.

gRPC takes in all bytes that a message is said to have before it looks whether a message may have so
many. So the kernel is asked how many bytes came over a connection, and one that sends far more than
handlers were given is shut, as is one that only makes calls that are refused. Where the system is
not Linux, nothing is bounded here.
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
_BYTES_AT = 120  # of struct tcp_info in linux/tcp.h
_UNREAD_BYTES = 16 * 2**20  # of one connection: of eight calls, a message and what is read ahead
_ALL_UNREAD_BYTES = 512 * 2**20
_STRANGER_SECONDS = 30.0  # that a connection may last without a call that was let in
_LEAST_SECONDS = 0.1  # between two looks, or more, so that they take no more than
_SHARE = 0.05  # of the time
# What a connection may send beside messages: frames and records, headers, windows, and pings.
_PER_READ, _PER_SENT, _PER_CALL, _PER_SECOND = 0.02, 0.005, 512, 64

Peer = tuple[str, int]  # IP address and port


def peer_of(name: str) -> Peer:
    """The peer that gRPC names so, as in "ipv4:192.0.2.7:4711" or "ipv6:%5B2001:db8::7%5D:4711"."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@dataclass(frozen=True)
class _Count:
    """What was known of a connection when it was last looked at."""

    since: float
    seen: float
    received: int  # bytes, as the kernel counts them
    acknowledged: int
    granted: float
    unread: float = 0.0  # received and not granted; at most what gRPC holds, and some more


class Traffic:
    """Connections to one port: what handlers were given of each, and what came over it."""

    def __init__(self) -> None:
        self._granted: dict[Peer, float] = {}
        self._counts: dict[Peer, _Count] = {}
        self._absent: set[Peer] = set()  # at the last look; one may have come since

    def called(self, peer: Peer) -> None:
        """A call of a peer was let in."""
        self._grant(peer, _PER_CALL)

    def read(self, peer: Peer, size: int) -> None:
        """A handler was given a message of a peer."""
        self._grant(peer, (1.0 + _PER_READ) * size)

    def _grant(self, peer: Peer, size: float) -> None:
        self._granted[peer] = self._granted.get(peer, 0.0) + size

    def bound(self, port: int, stop: Event) -> None:
        """`shut_excessive` again and again until `stop` is set."""
        seconds = 0.0
        while not stop.wait(max(_LEAST_SECONDS, seconds / _SHARE)):
            began = monotonic()
            with suppress(OSError):  # too many open files
                self.shut_excessive(port)
            seconds = monotonic() - began

    def shut_excessive(self, port: int) -> None:
        """Shut connections to a port of ours with too much unread, or without a call let in.

        What a connection may send beside messages is granted as time goes, and never saved up.
        """
        counts = {peer: self._counted(connection, peer) for connection, peer in _connections(port)}
        absent = set(self._granted) - counts.keys()
        for peer in absent & (self._absent | self._counts.keys()):
            self._granted.pop(peer, None)
        self._counts, self._absent = counts, absent
        long_ago = monotonic() - _STRANGER_SECONDS
        strangers = {peer for peer, count in counts.items() if count.since < long_ago}
        excessive = strangers - self._granted.keys()
        left = sum(count.unread for count in counts.values())
        for peer, count in sorted(counts.items(), key=lambda item: -item[1].unread):
            if count.unread <= _UNREAD_BYTES and left <= _ALL_UNREAD_BYTES:
                break
            left -= count.unread
            excessive.add(peer)
            sent = count.unread // 2**20
            _log.warning("shut a connection of %s: %d MiB of it make no message", peer[0], sent)
        if excessive:
            for connection, peer in _connections(port):
                if peer in excessive:
                    connection.shutdown(socket.SHUT_RDWR)

    def _counted(self, connection: socket.socket, peer: Peer) -> _Count:
        acknowledged, received = _counters(connection)
        now, granted = monotonic(), self._granted.get(peer, 0.0)
        last = self._counts.get(peer) or _Count(now, now, 0, 0, 0.0)
        unread = last.unread + (received - last.received) - (granted - last.granted)
        unread -= _PER_SENT * (acknowledged - last.acknowledged) + _PER_SECOND * (now - last.seen)
        return _Count(last.since, now, received, acknowledged, granted, max(0.0, unread))


def _connections(port: int) -> Iterator[tuple[socket.socket, Peer]]:
    """Connections that came to a port, each open until the next is asked for."""
    for path in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        descriptor = int(path.name)
        with suppress(OSError):  # gRPC closes connections meanwhile
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            # A copy: gRPC may close its own at any time, and the system use the number again.
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.getsockname()[1] == port:
                    host, number, *_ = connection.getpeername()  # fails for what listens
                    yield connection, (_plain(host), number)


def _counters(connection: socket.socket) -> tuple[int, int]:
    """Bytes that the peer has acknowledged, and that it has sent; Linux knows them since 4.1."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    known = information.ljust(_BYTES_AT + _BYTES.size, b"\0")
    acknowledged, received = _BYTES.unpack_from(known, _BYTES_AT)
    return acknowledged, received
