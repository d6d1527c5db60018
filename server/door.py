"""Where the server listens, and how it knows who calls."""

import logging
from dataclasses import dataclass
from pathlib import Path

import grpc

from fedpriv.errors import InvalidValueError
from fedpriv.sections import FederationSection

from .addresses import Address
from .certificates import load_ca
from .enrolment import EnrolledCertificates
from .guard import Identify, certified, declared
from .listening import Files

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Door:
    """An address, and what callers must show there.

    Attributes:
        address: where to listen.
        credentials: of TLS; None: plain text.
        identify: names the node behind a call.
    """

    address: Address
    credentials: grpc.ServerCredentials | None
    identify: Identify


def door_of(section: FederationSection, *, insecure: bool) -> Door:
    """The door that a configuration describes.

    Args:
        section: the configuration.
        insecure: plain text, where nodes are whoever they say; on loopback only.

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
        _log.warning("plain text: whoever uses this machine can say to be any node")
        return Door(address, None, declared)
    if section.certificates is None:
        raise InvalidValueError(
            "federation.certificates is absent; it must be a folder with ca.pem, server.pem "
            "and server.key, as `fedpriv certs init` makes it, or --insecure be given"
        )
    folder = Path(section.certificates)
    files = Files(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    load_ca(files.ca)
    certificates = EnrolledCertificates(Path(section.enrolment))
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs issue` prints"
        )
    return Door(address, files.credentials(), certified(certificates))
