"""Where a server listens: HOST:PORT, and whether that is this machine alone."""

import ipaddress
import socket
from dataclasses import dataclass
from typing import Self

from fedpriv.errors import InvalidValueError


@dataclass(frozen=True)
class Address:
    """A place to listen.

    Attributes:
        host: DNS name or IP address, without brackets.
        port: from 0 to 65535; 0 takes one that is free.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, key: str) -> Self:
        """Read "host:port", "192.0.2.7:7443" or "[::1]:7443".

        Args:
            text: what to read.
            key: how messages call it.

        Raises:
            InvalidValueError: it is none.
        """
        host, separator, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        legal = _is_ipv6(host[1:-1]) if bracketed else host and ":" not in host
        number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 2**16
        if not (separator and legal and number < 2**16):
            shown = text if len(text) <= 100 else f"{text[:100]}…"
            raise InvalidValueError(f"{key} is {shown!r}; it must be HOST:PORT or [IPv6]:PORT")
        return cls(host[1:-1] if bracketed else host, number)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def on_loopback(self) -> bool:
        """Whether nobody but this machine can reach it."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # unknown, or no name at all
            return False
        # A scope such as "%lo" may follow an IPv6 address.
        addresses = {str(entry[4][0]).partition("%")[0] for entry in found}
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
