"""Where the server listens, and what callers must show there."""

import ipaddress
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from fedpriv.config import FederationSection
from fedpriv.errors import InvalidValueError
from fedpriv.server.authentication import Identify, by_certificate, by_declaration
from fedpriv.server.certificates import load_ca
from fedpriv.server.enrolment import EnrolledCertificates

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """A place to listen.

    Attributes:
        host: DNS name or IP address, without brackets.
        port: from 0 to 65535; 0 takes a free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, key: str) -> Self:
        """Read "host:port", "192.0.2.7:7443" or "[::1]:7443".

        Raises:
            InvalidValueError: it is malformed; the message calls it `key`.
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
        """Whether only this machine can reach it."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # unknown, or not a name at all
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


@dataclass(frozen=True)
class Endpoint:
    """An address, and how callers are known there.

    Attributes:
        address: where to listen.
        credentials: of TLS; None: plain text.
        identify: names the node behind a call.
    """

    address: Address
    credentials: grpc.ServerCredentials | None
    identify: Identify


def endpoint_of(section: FederationSection, *, insecure: bool) -> Endpoint:
    """The endpoint that a configuration describes.

    Args:
        section: the configuration.
        insecure: plain text, where a node is believed to be the one it says; on loopback only.

    Raises:
        InvalidValueError: certificates are absent or cannot be used, none is enrolled, plain text
            would be seen by other machines, or the address is malformed.
    """
    address = Address.parse(section.address, "federation.address")
    if insecure:
        if not address.on_loopback:
            raise InvalidValueError(
                f"federation.address is {section.address!r}; without TLS it must be on loopback, "
                "such as 127.0.0.1:7443"
            )
        _log.warning("plain text: any process on this machine can claim to be any node")
        return Endpoint(address, None, by_declaration)
    if section.certificates is None:
        raise InvalidValueError(
            "federation.certificates is absent; it must be a folder with ca.pem, server.pem "
            "and server.key, as `fedpriv certs init` makes it, or --insecure be given"
        )
    certificates = EnrolledCertificates(Path(section.enrolment))
    credentials = tls_credentials(Path(section.certificates))
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs issue` prints"
        )
    return Endpoint(address, credentials, by_certificate(certificates))


def tls_credentials(folder: Path) -> grpc.ServerCredentials:
    """Credentials that demand a certificate of every peer.

    Args:
        folder: with server.pem and server.key to show, and ca.pem to check peers against.

    Raises:
        InvalidValueError: a file cannot be read, or ca.pem is not an authority's certificate.
    """
    load_ca(folder / "ca.pem")
    try:
        ca, certificate, key = (
            (folder / name).read_bytes() for name in ("ca.pem", "server.pem", "server.key")
        )
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
