"""Enrolment: the users of a population, the node that hosts each, and the nodes' certificates."""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from cryptography import x509
from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from fedpriv.data.population import plain_id
from fedpriv.errors import FedprivError, InvalidValueError
from fedpriv.experiment.config import Section, checked, read_toml
from fedpriv.support.checks import require
from fedpriv.wire import EnrolledNode
from fedpriv.wire.messages import Positions
from fedpriv.wire.naming import MALFORMED, check_node_name, check_user_id, fingerprint_of

_ID = re.compile("[0-9a-f]{32}")
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_LONGEST_SUBJECT = 200  # characters
_REFUSED = "the certificate is refused: it"
_SETTLED_NANOSECONDS = 2_000_000_000  # age from which a file's times are trusted


@dataclass(frozen=True, eq=False)
class Enrolment:
    """The users of a population, each at one node.

    Guarantees:
        * `user_ids[i]` is the user at position i. The ids are sorted by code points, so positions
          do not depend on the order in the file.
        * Each user has one position and one node. An id that occurs twice is refused, at one node
          or at two, in equal or different Unicode forms. Otherwise the user's updates at each node
          would be clipped separately, which would void the privacy statement.
        * repr shows numbers, but no ids.

    The ledger refers to the population by its id, 32 lower-case hexadecimal digits that were drawn
    at random when the users were enrolled. The id is not a digest of the users' ids, because the
    ledger is public: such a digest would let readers test guesses of who is enrolled.
    """

    population_id: str
    users: Mapping[str, Sequence[str]]  # node → ids of its users, at least one
    # Node → SHA-256 of its certificate, in hexadecimal; empty for nodes without one.
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.population_id):
            condition = "it must be 32 lower-case hexadecimal digits, drawn at random"
            raise InvalidValueError(f"population is {self.population_id!r}; {condition}")
        require(bool(self.users), "nodes: there is none; there must be at least one")
        users = {node: tuple(self.users[node]) for node in sorted(self.users)}
        node_of: dict[str, str] = {}
        for node, ids in users.items():
            check_node_name(node)
            require(bool(ids), f"nodes.{node}.users is empty; it must have at least one")
            for number, user in enumerate(ids):
                key = f"nodes.{node}.users.{number}"
                check_user_id(user, key)
                if (plain := plain_id(user)) in node_of:
                    raise InvalidValueError(
                        f"{key} is {user!r}, who is enrolled at node {node_of[plain]!r} already; "
                        "a user must be enrolled once, because updates of one user from several "
                        "nodes are not summed before clipping"
                    )
                node_of[plain] = node
        object.__setattr__(self, "users", users)

    def __repr__(self) -> str:
        return f"Enrolment(population={self.population}, nodes={len(self.nodes)})"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an enrolment from TOML in the format of docs/identity.md.

        InvalidValueError: the file cannot be read, or its content is invalid.
        """
        content = _read(path)
        users = {name: node.users for name, node in content.nodes.items()}
        fingerprints = {node: fingerprint for fingerprint, node in content.certificates.items()}
        try:
            return cls(content.population, users, fingerprints)
        except InvalidValueError as error:
            raise InvalidValueError(f"{path}: {error}") from error

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, sorted."""
        return tuple(self.users)

    @property
    def population(self) -> int:
        """N, the number of enrolled users, connected or not."""
        return len(self.user_ids)

    @cached_property
    def user_ids(self) -> tuple[str, ...]:
        """Ids of all users, sorted by code points; `user_ids[i]` is the user at position i."""
        return tuple(sorted(user for ids in self.users.values() for user in ids))

    @property
    def enrolled(self) -> tuple[EnrolledNode, ...]:
        """All nodes, for nodes to pin: InvalidValueError if one has no certificate."""
        if nodes := sorted(set(self.users) - set(self.fingerprints)):
            raise InvalidValueError(
                f"nodes.{nodes[0]}.certificate is absent; where the server is not trusted, each "
                "node must have one"
            )
        return tuple(
            EnrolledNode(node, bytes.fromhex(self.fingerprints[node]), len(ids))
            for node, ids in self.users.items()
        )

    def users_of(self, node: str) -> Positions:
        """Return the positions of a node's users, ascending, read-only; InvalidValueError if none.

        The error names no other node.
        """
        require(node in self._positions, f"node {node!r} is not enrolled")
        return self._positions[node]

    def drawn(self, users: Positions) -> dict[str, Positions]:
        """Return the drawn users of each node that hosts any; positions, ascending."""
        numbers = self._numbers[users]
        order = np.argsort(numbers, kind="stable")
        hosts, starts = np.unique(numbers[order], return_index=True)
        parts = np.split(users[order], starts[1:])
        return {self.nodes[n]: part for n, part in zip(hosts.tolist(), parts, strict=False)}

    def log_name(self, node: str) -> str:
        """Return a name for logs, which does not identify a user."""
        return "a node of one user" if len(self.users.get(node, ())) == 1 else node

    @cached_property
    def _numbers(self) -> Positions:
        """Index in `nodes` of the node of each user, by position: [N]."""
        number_of = {user: n for n, ids in enumerate(self.users.values()) for user in ids}
        return np.array([number_of[user] for user in self.user_ids], np.int64)

    @cached_property
    def _positions(self) -> dict[str, Positions]:
        positions = self.drawn(np.arange(self.population))
        for users in positions.values():
            users.flags.writeable = False
        return positions


class UnknownPeerError(FedprivError):
    """A caller does not identify itself as a node; the message is for the caller.

    `node` is the node at which its certificate is or was enrolled, if any; `subject` describes the
    certificate in logs.
    """

    def __init__(self, sentence: str, node: str | None = None, subject: str = "") -> None:
        super().__init__(sentence)
        self.node, self.subject = node, subject


class EnrolledCertificates:
    """The certificates that identify nodes, read again whenever the enrolment file changes.

    Guarantees:
        * A certificate that is removed from the file is refused from the next call on.
        * While the file cannot be read, every certificate is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] | None = None
        self._nodes: dict[str, str] = {}
        self._history: dict[str, str] = {}  # includes certificates that were removed later

    def nodes(self) -> Mapping[str, str]:
        """Return fingerprint → node from the current file; InvalidValueError if it is unusable."""
        stamp = _stamp_of(self.path)
        if stamp is None or stamp != self._stamp:
            self._stamp = None  # in case the file cannot be read
            self._nodes = _read(self.path).certificates
            self._stamp = stamp
            self._history |= self._nodes
        return self._nodes

    def node_of(self, certificate_pem: bytes, now: datetime) -> str:
        """Return the node at which a certificate is enrolled; TLS has checked the peer's key.

        UnknownPeerError: it cannot be parsed, is not enrolled, or is not valid at `now`.
        InvalidValueError: the enrolment file cannot be used.
        """
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            subject = certificate.subject.rfc4514_string()[:_LONGEST_SUBJECT]
        except MALFORMED as error:
            raise UnknownPeerError(f"{_REFUSED} cannot be parsed") from error
        fingerprint = fingerprint_of(certificate)
        node = self.nodes().get(fingerprint)
        if node is None:
            sentence = f"{_REFUSED} is not enrolled, or was struck off the enrolment"
            former_node = self._history.get(fingerprint)
            raise UnknownPeerError(sentence, former_node, f", {subject} {fingerprint}")
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begin <= now <= end:
            sentence = f"{_REFUSED} is valid from {begin} to {end}; it is {now}"
            raise UnknownPeerError(sentence, node)
        return node


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return a value that differs after every change of the file; None if changes may be missed."""
    try:
        status = path.stat()
    except OSError:
        return None
    # Two changes within one tick of the file system's clock have equal times. If a time lies in the
    # future, the clock has been set back since.
    settled = abs(time.time_ns() - status.st_ctime_ns) >= _SETTLED_NANOSECONDS
    return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns) if settled else None


def _fingerprint(text: str) -> str:
    digits = text.replace(":", "").lower()  # OpenSSL prints upper case with colons
    if not _FINGERPRINT.fullmatch(digits):
        sentence = "It must be the SHA-256 fingerprint of a certificate, 64 hexadecimal digits"
        raise PydanticCustomError("fingerprint", "{sentence}", {"sentence": sentence})
    return digits


class _Node(Section):
    users: list[str]
    certificate: Annotated[str, AfterValidator(_fingerprint)] | None = None


class _EnrolmentFile(Section):
    population: str
    nodes: dict[str, _Node]

    @property
    def certificates(self) -> dict[str, str]:
        """Fingerprint → name of each node that has a certificate."""
        return {node.certificate: name for name, node in self.nodes.items() if node.certificate}

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        names: dict[str, str] = {}
        for name, node in self.nodes.items():
            if node.certificate and (owner := names.setdefault(node.certificate, name)) != name:
                shared = f"nodes.{name}.certificate is that of node {owner!r}"
                raise ValueError(f"{shared}; each must have its own")
        return self


def _read(path: Path) -> _EnrolmentFile:
    """Return the content of an enrolment file; InvalidValueError if it is unreadable or invalid."""
    table = read_toml(path)
    if "population" not in table:
        raise InvalidValueError(
            f"{path}: key population is absent; it names the enrolled users in the ledger and is "
            "drawn once for all runs: put "
            f'population = "{secrets.token_hex(16)}" in front of all tables'
        )
    return checked(_EnrolmentFile, table, str(path))
