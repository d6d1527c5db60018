"""One round's messages of a secure sum, as pure functions of values.

    pair = KeyPair.fresh()                              # its public part goes to the server, signed
    node = Participant.begin(roster, name, pair, secure)    # node.sealed goes to the neighbours
    upload, uploaded = node.masked(total, sharers, sealed)  # to the server
    statement = uploaded.statement(survivors)               # sign once; the journal comes first
    shares = uploaded.opened(survivors, signatures, verify) # to the server
    total = unmasked(sum_of_uploads, roster, secure, sharers, survivors, opened)    # at the server

An upload is y_i = a_i + PRG(b_i) + Σ_{j > i} PRG(s_ij) − Σ_{j < i} PRG(s_ij), mod 2^32 or 2^64 as
a_i is int32 or int64, with j the neighbours that sealed shares, s_ij a secret of the pair and b_i
one of the node. The pairs' masks cancel in the sum. The neighbours' Shamir shares (Shamir 1979)
open the rest: shares of b_j for nodes that uploaded, or of the key behind s_ij for nodes that did
not, and never of both.

A node has **two X25519 keys**. The server learns the masking key of a node that it reports as
dropped. If that key also sealed messages, the server could open them, find the shares of b_j, and
with both secrets read the upload of a node that it only claims to have lost.

The public key contains the hash of b_i, so a false share of either secret is detected.

The guarantee is void unless the caller does this:

* use a key pair for one `begin`, and send only one upload for an attempt, ever;
* sign only one statement for an attempt, ever. A key that is only in memory cannot sign a second
  one after a restart; a key in a file needs a journal that records the statement before the
  signature is sent;
* check the signature of each key in the roster (`key_statement`) against the certificates of the
  enrolment that the node's consent pins.

A node that the list of survivors leaves out signs nothing and opens nothing. Its upload stays
masked for ever, but the charge in the ledger still counts for its users.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Self

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.noise import keystream
from fedpriv.secure_sums.parameters import SignedVector, degree_of, neighbours, threshold_of
from fedpriv.support.checks import require

MaskedVector = npt.NDArray[np.unsignedinteger]  # uint32 or uint64
Verify = Callable[[str, bytes, bytes], bool]  # node, statement, signature

PUBLIC_BYTES = 96  # sealing key, masking key, hash of the seed of the self-mask
_PRIME = 2**256 + 297  # of the field of shares
_SECRET_BYTES, _SHARE_BYTES, _NONCE_BYTES = 32, 33, 12
_BLOCK = 1 << 15  # numbers of a mask that are added at once; they fit in a core's cache


def _encoded(*parts: bytes) -> bytes:
    """Join the parts, each after its length, so that different lists give different bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _names(names: Iterable[str]) -> bytes:
    return _encoded(*(name.encode() for name in names))


def _digest(sharers: Iterable[str]) -> bytes:
    return sha256(_names(sharers)).digest()


def _derived(secret: bytes, *purpose: bytes) -> bytes:
    """Derive a 32-byte key for one purpose from a secret (HKDF-SHA-256, RFC 5869)."""
    info = _encoded(b"fedpriv secure sum", *purpose)
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _shared(private: bytes, public: bytes, owner: str) -> bytes:
    """Return the secret that the holder of a private key shares with the owner of a public one."""
    key = X25519PublicKey.from_public_bytes(public)
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError as error:  # a point of small order: anybody would know the secret
        raise InvalidValueError(f"the public key of node {owner!r} is not valid") from error


def _seed_hash(seed: bytes) -> bytes:
    return sha256(b"fedpriv seed of a self-mask" + seed).digest()


@dataclass(frozen=True)
class KeyPair:
    """Secrets of a node for one attempt, and their public part. For one `begin` only."""

    public: bytes  # both public keys and the hash of b_i, PUBLIC_BYTES
    sealing: bytes = field(repr=False)  # X25519 key of the messages to neighbours; never shared
    masking: bytes = field(repr=False)  # X25519 key of the masks with neighbours
    seed: bytes = field(repr=False)  # b_i, the secret of the node's own mask

    @classmethod
    def fresh(cls) -> Self:
        """Draw a pair from the operating system's CSPRNG."""
        sealing, masking, seed = (secrets.token_bytes(_SECRET_BYTES) for _ in range(3))
        public = _public(sealing) + _public(masking) + _seed_hash(seed)
        return cls(public, sealing, masking, seed)


@dataclass(frozen=True)
class Member:
    """A node that agreed to a round, and its public key of the attempt."""

    node: str
    key: bytes  # PUBLIC_BYTES, signed by the certificate's key

    def __post_init__(self) -> None:
        size = f"the public key of node {self.node!r} has {len(self.key)} bytes"
        require(len(self.key) == PUBLIC_BYTES, f"{size}; it must have {PUBLIC_BYTES}")

    @property
    def sealing(self) -> bytes:
        """Public key of sealed messages."""
        return self.key[:32]

    @property
    def masking(self) -> bytes:
        """Public key of masks."""
        return self.key[32:64]

    @property
    def seed_hash(self) -> bytes:
        """Hash of b_i."""
        return self.key[64:]


@dataclass(frozen=True)
class Roster:
    """The nodes that agreed to an attempt, in the order of their names."""

    binding: bytes  # 32 bytes: the hash of everything public that names the attempt
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        size = f"the binding has {len(self.binding)} bytes; it must have 32"
        require(len(self.binding) == 32, size)
        ordered = all(a < b for a, b in zip(self.names, self.names[1:], strict=False))
        require(ordered, "the roster must name each node once, in the order of names")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes, ascending."""
        return tuple(member.node for member in self.members)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the binding and of all names and keys."""
        keys = (member.key for member in self.members)
        return sha256(_encoded(b"roster", self.binding, _names(self.names), *keys)).digest()

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def index(self, node: str) -> int:
        """Return a node's position; raises InvalidValueError if it is not in the roster."""
        require(node in self._places, f"node {node!r} is not in the roster of this attempt")
        return self._places[node]

    def member(self, node: str) -> Member:
        """Return a node's entry; raises InvalidValueError if it is not in the roster."""
        return self.members[self.index(node)]

    def neighbours(self, secure: SecureSum) -> dict[str, tuple[str, ...]]:
        """Return the neighbours of each node; raises InvalidValueError for too few nodes."""
        return {name: self.neighbours_of(name, secure) for name in self.names}

    def neighbours_of(self, node: str, secure: SecureSum) -> tuple[str, ...]:
        """Return the neighbours of a node, ascending."""
        count = len(self.members)
        linked = neighbours(self.digest, count, degree_of(count, secure))
        return tuple(self.names[place] for place in linked[self.index(node)])

    def listed(self, nodes: Sequence[str], secure: SecureSum) -> tuple[str, ...]:
        """Return a list of at least n − d nodes in their order, or raise InvalidValueError."""
        ordered = sorted(nodes, key=self.index)
        minimum = len(self.members) - secure.dropouts
        problem = f"a list names {len(ordered)} of {len(self.members)} nodes"
        require(len(set(ordered)) == len(ordered), f"{problem}; it must name each only once")
        require(len(ordered) >= minimum, f"{problem}; it must name at least {minimum}")
        return tuple(ordered)


def key_statement(binding: bytes, node: str, public: bytes) -> bytes:
    """Return the bytes that a node's certificate signs: "this is my public key in this attempt"."""
    return _encoded(b"fedpriv secure sum: key", binding, node.encode(), public)


def list_statement(roster: Roster, sharers: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Return the bytes to sign: "I masked for these sharers; open the sum of these survivors".

    The order of the names does not matter.
    """
    lists = (_names(sorted(names, key=roster.index)) for names in (sharers, survivors))
    return _encoded(b"fedpriv secure sum: lists", roster.digest, *lists)


@dataclass(frozen=True)
class Participant:
    """A node after its vote: it knows the roster and has sealed shares for its neighbours."""

    roster: Roster
    node: str
    pair: KeyPair
    secure: SecureSum
    sealed: Mapping[str, bytes]  # by neighbour: two shares that only the neighbour can open

    @classmethod
    def begin(cls, roster: Roster, node: str, pair: KeyPair, secure: SecureSum) -> Self:
        """Share both secrets with the neighbours, any τ of whom can restore them.

        Raises InvalidValueError for a roster that lacks the node with this key, or is too short.
        """
        limit = f"the roster has another key of node {node!r}; it must be the node's own"
        require(roster.member(node).key == pair.public, limit)
        linked = roster.neighbours_of(node, secure)
        points = [roster.index(neighbour) + 1 for neighbour in linked]
        shares_of_secrets = [
            _shares(secret, threshold_of(secure), points) for secret in (pair.masking, pair.seed)
        ]
        sealed = {}
        for neighbour, *shares in zip(linked, *shares_of_secrets, strict=True):
            key = _sealing_key(roster, pair, node, neighbour, sender=True)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sealed[neighbour] = nonce + AESGCM(key).encrypt(nonce, b"".join(shares), None)
        return cls(roster, node, pair, secure, sealed)

    def masked(
        self, total: SignedVector, sharers: Sequence[str], sealed: Mapping[str, bytes]
    ) -> tuple[MaskedVector, "Uploaded"]:
        """Return the masked sum [D], to upload once, and the node's state after the upload.

        `total` is the sum of the node's users and its share of the noise, int32 or int64 [D];
        `sealed` are the messages by sender. To anyone who lacks one of its masks, the upload is
        uniform on all vectors of such words. Raises InvalidValueError, and the node must drop out,
        unless the list names the node and at least n − d nodes, and `sealed` has a valid message
        from each neighbour in the list.
        """
        listed = self.roster.listed(sharers, self.secure)
        problem = f"node {self.node!r} shared its secrets; the list of sharers must name it"
        require(self.node in listed, problem)
        linked = [name for name in self.sealed if name in set(listed)]
        texts = {name: self._text(name, sealed.get(name, b"")) for name in linked}
        purpose = _digest(listed)
        added = [_self_key(self.roster, purpose, self.node, self.pair.seed)]
        subtracted: list[bytes] = []
        for name in linked:
            key = _pair_key(self.roster, purpose, (self.node, self.pair.masking), name)
            (added if self.node < name else subtracted).append(key)
        masked = total.astype(f"u{total.itemsize}")
        _add_masks(masked, added, subtracted)
        shares = {name: (text[:_SHARE_BYTES], text[_SHARE_BYTES:]) for name, text in texts.items()}
        return masked, Uploaded(self.roster, self.node, self.secure, listed, shares)

    def _text(self, sender: str, message: bytes) -> bytes:
        """Open a neighbour's message."""
        key = _sealing_key(self.roster, self.pair, self.node, sender, sender=False)
        nonce, ciphertext = message[:_NONCE_BYTES], message[_NONCE_BYTES:]
        try:
            text = AESGCM(key).decrypt(nonce, ciphertext, None)
        except (InvalidTag, ValueError) as error:
            problem = f"the message of node {sender!r} to {self.node!r} cannot be opened"
            limit = "it must be sealed for this roster"
            raise InvalidValueError(f"{problem}; {limit}") from error
        problem = f"the message of node {sender!r} has {len(text)} bytes; it must hold two shares"
        require(len(text) == 2 * _SHARE_BYTES, problem)
        return text


@dataclass(frozen=True)
class Uploaded:
    """A node after its upload. It opens shares only for lists that a quorum has signed."""

    roster: Roster
    node: str
    secure: SecureSum
    sharers: tuple[str, ...]  # the nodes that its masks are for
    # By neighbour: its share of the masking key and of the seed.
    shares: Mapping[str, tuple[bytes, bytes]] = field(repr=False)

    def statement(self, survivors: Sequence[str]) -> bytes:
        """Return the statement to sign if the server has the uploads of exactly these nodes.

        **Sign no other for this attempt.** Raises InvalidValueError for a list that lacks this
        node, names a node that is not a sharer, or names fewer than n − d.
        """
        listed = self.roster.listed(survivors, self.secure)
        strangers = sorted(set(listed) - set(self.sharers))
        require(not strangers, f"survivors include {strangers}; they must be among the sharers")
        problem = f"node {self.node!r} uploaded its sum; the list of survivors must name it"
        require(self.node in listed, problem)
        return list_statement(self.roster, self.sharers, listed)

    def opened(
        self, survivors: Sequence[str], signatures: Mapping[str, bytes], verify: Verify
    ) -> Mapping[str, bytes]:
        """Return one share of each neighbour: of the seed of a survivor, else of its masking key.

        They open only the total of the survivors. Raises InvalidValueError unless
        w = ⌊(n + t)/2⌋ + 1 survivors signed this node's own statement. Two statements cannot both
        have w signatures: 2w − n > t nodes would have signed both, one of them honest. Call it only
        for the statement that the node signed.
        """
        statement = self.statement(survivors)
        listed, quorum = set(survivors), self.secure.quorum(len(self.roster.members))
        signed = (verify(name, statement, signatures[name]) for name in listed & set(signatures))
        valid = sum(map(bool, signed))
        problem = f"{valid} survivors signed the list that node {self.node!r} was shown"
        require(valid >= quorum, f"{problem}; at least {quorum} must")
        return {
            name: seed if name in listed else masking
            for name, (masking, seed) in self.shares.items()
        }


def unmasked(
    masked_total: MaskedVector,
    roster: Roster,
    secure: SecureSum,
    sharers: Sequence[str],
    survivors: Sequence[str],
    opened: Mapping[str, Mapping[str, bytes]],
) -> SignedVector:
    """Return the total of the survivors' sums [D] from the sum of their uploads, in as many bits.

    `opened` are the shares by sender and owner. They suffice if at most d nodes dropped out, before
    or after the upload. False shares are harmless as long as τ successive neighbours, by name, send
    true ones. Otherwise InvalidValueError names the node whose secret cannot be restored.
    """
    shared, survived = roster.listed(sharers, secure), set(roster.listed(survivors, secure))
    strangers = sorted(survived - set(shared))
    require(not strangers, f"survivors include {strangers}; they must be among the sharers")
    linked, purpose = roster.neighbours(secure), _digest(shared)
    threshold = threshold_of(secure)
    added: list[bytes] = []
    subtracted: list[bytes] = []
    for owner in shared:
        shares = {
            roster.index(sender) + 1: opened.get(sender, {}).get(owner, b"")
            for sender in linked[owner]
        }
        secret = _restored(roster.member(owner), shares, threshold, masking=owner not in survived)
        if owner in survived:
            subtracted.append(_self_key(roster, purpose, owner, secret))
            continue
        for name in survived.intersection(linked[owner]):
            key = _pair_key(roster, purpose, (owner, secret), name)
            (subtracted if name < owner else added).append(key)
    total = masked_total.copy()
    _add_masks(total, added, subtracted)
    return total.view(f"i{total.itemsize}")


def _sealing_key(roster: Roster, pair: KeyPair, node: str, other: str, *, sender: bool) -> bytes:
    """Return the key of the messages from `node` to `other`, or in the opposite direction."""
    secret = _shared(pair.sealing, roster.member(other).sealing, other)
    direction = (node, other) if sender else (other, node)
    return _derived(secret, b"shares", roster.digest, _names(direction))


def _self_key(roster: Roster, sharers: bytes, node: str, seed: bytes) -> bytes:
    """Return the key of a node's own mask, for sharers with this digest."""
    return _derived(seed, b"self-mask", roster.digest, sharers, node.encode())


def _pair_key(roster: Roster, sharers: bytes, holder: tuple[str, bytes], other: str) -> bytes:
    """Return the key of the mask of two nodes, from the name and private key of one.

    Masks of two nodes that were shown different lists of sharers do not cancel.
    """
    node, masking = holder
    secret = _shared(masking, roster.member(other).masking, other)
    return _derived(secret, b"pair", roster.digest, sharers, _names(sorted((node, other))))


def _add_masks(vector: MaskedVector, added: Sequence[bytes], subtracted: Sequence[bytes]) -> None:
    """Add and subtract the masks of keys in place, by blocks; a mask is a key's first words."""
    little_endian = vector.dtype.newbyteorder("<")
    for start in range(0, vector.size, _BLOCK):
        block = vector[start : start + _BLOCK]
        size, place = block.nbytes, start * block.itemsize
        for key in added:
            block += keystream(key, size, start=place).view(little_endian)
        for key in subtracted:
            block -= keystream(key, size, start=place).view(little_endian)


def _shares(secret: bytes, threshold: int, points: Sequence[int]) -> list[bytes]:
    """Return values of a random polynomial of degree τ − 1 whose value at 0 is the secret."""
    coefficients = [secrets.randbelow(_PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    shares = []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % _PRIME
        shares.append(value.to_bytes(_SHARE_BYTES, "big"))
    return shares


def _restored(
    member: Member, shares: Mapping[int, bytes], threshold: int, *, masking: bool
) -> bytes:
    """Return a node's masking key, or else its seed, from shares by point.

    It is restored from the first τ successive shares whose result matches the public key.
    """
    points = [(x, int.from_bytes(y, "big")) for x, y in shares.items() if len(y) == _SHARE_BYTES]
    for start in range(len(points) if len(points) >= threshold else 0):
        number = _at_zero([points[(start + offset) % len(points)] for offset in range(threshold)])
        if number < 2**256:
            secret = number.to_bytes(_SECRET_BYTES, "big")
            if masking and _public(secret) == member.masking:
                return secret
            if not masking and _seed_hash(secret) == member.seed_hash:
                return secret
    kind = "masking key" if masking else "self-mask"
    problem = f"the {kind} of node {member.node!r} cannot be restored from {len(points)} shares"
    raise InvalidValueError(f"{problem}; {threshold} true ones are needed")


def _at_zero(points: Sequence[tuple[int, int]]) -> int:
    """Return the value at 0 of the lowest-degree polynomial through points (Lagrange)."""
    value = 0
    for x, y in points:
        top = bottom = 1
        for point, _ in points:
            if point != x:
                top, bottom = top * point % _PRIME, bottom * (point - x) % _PRIME
        value += y * top * pow(bottom, -1, _PRIME)
    return value % _PRIME
