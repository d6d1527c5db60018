"""What connections send: content of messages, which handlers read, and everything else of HTTP/2.

gRPC bounds neither what it stores for a peer that does not read nor the work that small frames
cause. So we bound what a node may send besides the messages that handlers read. A node that sends
more is slowed, which ends nothing, so that an honest node loses only time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from fedpriv.server.monitoring import STRANGER

_PREFACE_BYTES, _HEADER_BYTES, _DATA = 24, 9, 0  # RFC 9113, sections 3.4, 4.1 and 6.1
# What a node may send that no handler has read: the content of messages, in bytes, and the rest, in
# bytes plus the cost of waking and of each frame. A node may exceed this by one piece per
# connection; the excess drains with time, with bytes read or sent, and with calls.
_MOST_CONTENT, _MOST_REST = 2.0 * 2**20, 32.0 * 2**10
WAKING_COST, _FRAME_COST = 16, 128
_CONTENT_PER_SECOND, _REST_PER_SECOND = 16.0 * 2**10, 2.0 * 2**10
# On Ethernet, an upload costs 0.02 per byte, and the windows of a download 0.001.
_REST_PER_READ, _REST_PER_SENT, _REST_PER_CALL = 0.05, 0.02, 1024
_MESSAGE_BYTES = 5  # in front of each message


class Allowance:
    """Bounds what the connections of one node may send besides messages that handlers read."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._since = clock, clock()
        self._content = self._rest = 0.0  # that drain

    def received(self, content: int, rest: int) -> None:
        """Count a piece: bytes of content, and the cost of the rest."""
        self.pause()  # time that passed before it does not drain it
        self._content += content
        self._rest += rest

    def read(self, size: int) -> None:
        """Record that a handler has read a message of `size` bytes."""
        self._drain(size + _MESSAGE_BYTES, _REST_PER_READ * size)

    def sent(self, size: int) -> None:
        """Record that the peer has accepted `size` bytes, for which it may grant new windows."""
        self._drain(0.0, _REST_PER_SENT * size)

    def called(self) -> None:
        """Record that a call was admitted."""
        self._drain(0.0, _REST_PER_CALL)

    def pause(self) -> float:
        """Return the seconds until the node may send more, if nothing else is drained."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._drain(_CONTENT_PER_SECOND * seconds, _REST_PER_SECOND * seconds)
        content = (self._content - _MOST_CONTENT) / _CONTENT_PER_SECOND
        return max(0.0, content, (self._rest - _MOST_REST) / _REST_PER_SECOND)

    def _drain(self, content: float, rest: float) -> None:
        self._content = max(0.0, self._content - content)
        self._rest = max(0.0, self._rest - rest)


class Frames:
    """Separates the content of messages, in DATA frames, from everything else that HTTP/2 sends."""

    def __init__(self) -> None:
        self._left, self._is_content, self._header = _PREFACE_BYTES, False, b""

    def weigh(self, piece: bytes | bytearray) -> tuple[int, int]:
        """Return the bytes of content in the next bytes of a connection, and the rest's cost."""
        at, content, cost = 0, 0, 0
        while at < len(piece):
            if self._left:
                size = min(self._left, len(piece) - at)
                self._left -= size
                if self._is_content:
                    content += size
                else:
                    cost += size
            else:
                size = min(_HEADER_BYTES - len(self._header), len(piece) - at)
                self._header += piece[at : at + size]
                if len(self._header) == _HEADER_BYTES:
                    self._left = int.from_bytes(self._header[:3], "big")
                    self._is_content = self._header[3] == _DATA
                    self._header, cost = b"", cost + _HEADER_BYTES + _FRAME_COST
            at += size
        return content, cost


@dataclass(frozen=True, eq=False)
class Peer:
    """The other end of a connection."""

    node: str = STRANGER  # the node of the certificate
    certificate: bytes = b""  # PEM, as TLS has checked it; empty in plain text
    allowance: Allowance = field(default_factory=Allowance)
