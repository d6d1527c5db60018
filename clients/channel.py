"""A node's connection to the server: who it is, and a channel on which every call says so."""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

from fedpriv.errors import InvalidValueError
from fedpriv.wire import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES

METADATA_KEY = "fedpriv-node"
"""Where a plain-text call says, percent-encoded, which node makes it."""
_URI = "fedpriv:node:"
_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>[0-9]{1,5})")
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # an idle node goes on asking
    ("grpc.max_receive_message_length", NODE_RECEIVES_BYTES),
    ("grpc.max_send_message_length", SERVER_RECEIVES_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 60_000),
)


@dataclass(frozen=True)
class Certified:
    """A node with a certificate.

    Attributes:
        node: the name in it.
        ca: certificate of the authority that the server's must come from, PEM.
        certificate: the node's, PEM.
        key: of the certificate, PEM; secret.
    """

    node: str
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Named:
    """A node that proves nothing, for plain text on one machine.

    Attributes:
        node: its name.
    """

    node: str


Identity = Certified | Named


def identity_of(certificates: Path | None, node: str | None) -> Identity:
    """Who this node is.

    Args:
        certificates: folder with ca.pem, node.pem and node.key.
        node: name of a node that speaks in plain text; exactly one of both is given.

    Raises:
        InvalidValueError: both or none are given, a file cannot be read, the certificate names no
            node or several, or the name is not legal.
    """
    if certificates is not None and node is None:
        return _certified(certificates)
    if certificates is None and node is not None:
        return Named(_legal(node))
    raise InvalidValueError(
        f"certificates is {certificates} and node is {node!r}; exactly one of both must be given"
    )


def _certified(folder: Path) -> Certified:
    try:
        ca, certificate, key = (
            (folder / name).read_bytes() for name in ("ca.pem", "node.pem", "node.key")
        )
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    return Certified(_name_in(folder / "node.pem", certificate), ca, certificate, key)


def _name_in(path: Path, pem: bytes) -> str:
    """The name that the server will read: the one URI of ours, else the common name."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        alternatives = [
            extension.value.get_values_for_type(x509.UniformResourceIdentifier)
            for extension in certificate.extensions
            if isinstance(extension.value, x509.SubjectAlternativeName)
        ]
        uris = [uri for values in alternatives for uri in values if uri.startswith(_URI)]
        names = [unquote(uri.removeprefix(_URI), errors="strict") for uri in uris] or [
            str(part.value)
            for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        ]
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} names; it must have one")
        return _legal(names[0])
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise InvalidValueError(f"{path} is no certificate of a node: {error}") from error


def _legal(node: str) -> str:
    """The name, if a server could know it; it becomes the name of a folder."""
    legal = node.isprintable() and node == node.strip() and "/" not in node and node[:1] != "."
    if not (legal and 1 <= len(node.encode()) <= 64):
        raise InvalidValueError(
            f"the name of a node is {node!r}; it must be 1 to 64 bytes of printable text without "
            "'/', a '.' at its begin and spaces at its ends"
        )
    return node


def open_channel(server: str, identity: Identity) -> grpc.aio.Channel:
    """A channel to the server; it connects at the first call, and again when it was lost.

    Guarantees:

    * with a certificate all is TLS, and the server must have one of the same authority for its
      name;
    * without one nothing leaves this machine, whatever the name of the host resolves to later;
    * no message passes the limits of `fedpriv.wire.limits`;
    * a server that is silent is noticed within 100 seconds, also between calls.

    Args:
        server: HOST:PORT; an IPv6 address stands in brackets.
        identity: of the node; its name goes with every call.

    Raises:
        InvalidValueError: no legal HOST:PORT, or plain text and the host is not this machine.
    """
    host, port = _address(server)
    target = f"dns:///{f'[{host}]' if ':' in host else host}:{port}"
    if isinstance(identity, Certified):
        credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
        return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
    _check_loopback(host, port)
    # Plain text, and gRPC looks at each connection again: both its ends are on this machine.
    credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP)
    naming = [kind(identity.node) for kind in (_NamingUnary, _NamingResponses, _NamingRequests)]
    # A proxy on this machine would pass on to others what it is told.
    options = (*_OPTIONS, ("grpc.enable_http_proxy", 0))
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=naming)


def _address(server: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(server)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise InvalidValueError(
            f"server is {server!r}; it must be HOST:PORT with a port from 1 to 65535, as in "
            "fl.example.org:7443 or [::1]:7443"
        )
    if match["six"] is None:
        return match["host"], int(match["port"])
    try:
        return str(ipaddress.IPv6Address(match["six"])), int(match["port"])
    except ValueError as error:
        raise InvalidValueError(f"server is {server!r}, but {error}") from error


def _check_loopback(host: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidValueError(f"host {host!r} cannot be resolved: {error}") from error
    for *_, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise InvalidValueError(
                f"host {host!r} is {address[0]}, another machine perhaps; without certificates it "
                "must be this one, as in localhost:7443"
            )


@dataclass(frozen=True)
class _Naming:
    """Adds the node's name to the metadata of calls of one kind."""

    node: str

    async def intercept(
        self,
        go_on: Callable[[grpc.aio.ClientCallDetails, object], Awaitable[object]],
        details: grpc.aio.ClientCallDetails,
        request: object,
    ) -> object:
        """As gRPC's interceptors of all kinds are called."""
        metadata = details.metadata or grpc.aio.Metadata()
        metadata.add(METADATA_KEY, quote(self.node, safe=""))
        return await go_on(details._replace(metadata=metadata), request)


@grpc.aio.UnaryUnaryClientInterceptor.register
class _NamingUnary(_Naming):
    intercept_unary_unary = _Naming.intercept


@grpc.aio.UnaryStreamClientInterceptor.register
class _NamingResponses(_Naming):
    intercept_unary_stream = _Naming.intercept


@grpc.aio.StreamUnaryClientInterceptor.register
class _NamingRequests(_Naming):
    intercept_stream_unary = _Naming.intercept
