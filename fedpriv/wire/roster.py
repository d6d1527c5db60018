"""Nodes' keys for an attempt at a secure sum, and the public facts that they are bound to."""

import hashlib
import json
from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import event_text
from fedpriv.secure_sums.protocol import Member, Roster, key_statement
from fedpriv.wire.messages import NodeKey, RoundId
from fedpriv.wire.naming import MALFORMED, has_signed, signed


def binding_of(population: str, attempt: RoundId, event: RoundEvent) -> bytes:
    """Return SHA-256 of everything public that names an attempt at a round: 32 bytes."""
    names = [population, attempt.run, attempt.round, attempt.attempt, attempt.nonce]
    return hashlib.sha256(json.dumps([*names, event_text(event)]).encode()).digest()


def signed_key(
    node: str, public: bytes, binding: bytes, certificate: x509.Certificate, private_pem: bytes
) -> NodeKey:
    """Return a node's key for an attempt, signed by the private key of its certificate."""
    signature = signed(private_pem, key_statement(binding, node, public))
    return NodeKey(node, public, certificate.public_bytes(Encoding.DER), signature)


def certificate_of(key: NodeKey, binding: bytes) -> x509.Certificate:
    """Return the certificate by which a node's key is signed.

    InvalidValueError: it is malformed, or the signature is not of this attempt.
    """
    try:
        certificate = x509.load_der_x509_certificate(key.certificate)
        valid = has_signed(certificate, key_statement(binding, key.node, key.key), key.signature)
    except MALFORMED as error:
        raise InvalidValueError(f"the certificate of node {key.node!r} is malformed") from error
    if not valid:
        raise InvalidValueError(f"the key of node {key.node!r} is not signed for this attempt")
    return certificate


def roster_of(keys: Iterable[NodeKey], binding: bytes) -> Roster:
    """Return the roster of these nodes, sorted by name."""
    members = sorted((key.node, key.key) for key in keys)
    return Roster(binding, tuple(Member(node, public) for node, public in members))
