"""Signatures of a proposal by server and nodes, and the public facts that they are bound to."""

import hashlib
import json
from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedpriv.errors import InvalidValueError
from fedpriv.ledger import Head
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import event_text
from fedpriv.secure_sums.protocol import Member, Roster, key_statement
from fedpriv.wire.messages import Countersignature, RoundId, SignedHead
from fedpriv.wire.naming import MALFORMED, for_servers, has_signed, issued_by, signed


def _head_statement(population: str, attempt: RoundId, head: Head | SignedHead) -> bytes:
    """Return what the server signs: my ledger had this head when I proposed this attempt."""
    names = [population, *vars(attempt).values(), head.count, head.hash]
    return b"fedpriv ledger head" + json.dumps(names).encode()


def signed_head(
    population: str, attempt: RoundId, head: Head, certificate: x509.Certificate, private_pem: bytes
) -> SignedHead:
    """Return the head of the server's ledger, signed by its certificate's key for a proposal."""
    signature = signed(private_pem, _head_statement(population, attempt, head))
    return SignedHead(head.count, head.hash, certificate.public_bytes(Encoding.DER), signature)


def by_server(
    head: SignedHead, population: str, attempt: RoundId, authorities: Sequence[x509.Certificate]
) -> bool:
    """Return whether a server with a certificate of these authorities signed a head."""
    try:
        certificate = x509.load_der_x509_certificate(head.certificate)
        statement = _head_statement(population, attempt, head)
        issued = for_servers(certificate) and issued_by(authorities, certificate)
        return issued and has_signed(certificate, statement, head.signature)
    except MALFORMED:
        return False


def binding_of(
    population: str, attempt: RoundId, event: RoundEvent, head: SignedHead | None
) -> bytes:
    """Return SHA-256 of everything public that names an attempt at a round: 32 bytes."""
    names = [population, *vars(attempt).values(), event_text(event)]
    if head is not None:
        names += [head.count, head.hash]
    return hashlib.sha256(json.dumps(names).encode()).digest()


def countersigned(
    node: str, public: bytes, binding: bytes, certificate: x509.Certificate, private_pem: bytes
) -> Countersignature:
    """Return a node's signature of a proposal, with its public key of a secure sum, or none."""
    signature = signed(private_pem, key_statement(binding, node, public))
    return Countersignature(node, public, certificate.public_bytes(Encoding.DER), signature)


def certificate_of(of: Countersignature, binding: bytes) -> x509.Certificate:
    """Return the certificate by whose key a node has signed a proposal.

    InvalidValueError: it is malformed, or the signature is not of this proposal.
    """
    try:
        certificate = x509.load_der_x509_certificate(of.certificate)
        valid = has_signed(certificate, key_statement(binding, of.node, of.key), of.signature)
    except MALFORMED as error:
        raise InvalidValueError(f"the certificate of node {of.node!r} is malformed") from error
    if not valid:
        raise InvalidValueError(f"node {of.node!r} has not signed this attempt")
    return certificate


def roster_of(signatures: Iterable[Countersignature], binding: bytes) -> Roster:
    """Return the roster of these nodes, sorted by name."""
    members = sorted((of.node, of.key) for of in signatures)
    return Roster(binding, tuple(Member(node, public) for node, public in members))
