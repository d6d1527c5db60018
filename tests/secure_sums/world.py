"""A roster of nodes with fresh keys, and rounds of them in one process."""

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedpriv.ledger.events import SecureSum
from fedpriv.secure_sums.protocol import KeyPair, Member, Participant, Roster, Uploaded

BINDING = bytes(range(32))
Vector = npt.NDArray[np.signedinteger]


@dataclass(frozen=True)
class World:
    secure: SecureSum
    roster: Roster
    pairs: Mapping[str, KeyPair]
    nodes: Mapping[str, Participant]

    @property
    def names(self) -> tuple[str, ...]:
        return self.roster.names

    def sealed(self, node: str, senders: Iterable[str]) -> dict[str, bytes]:
        """Messages to a node."""
        return {
            sender: self.nodes[sender].sealed[node]
            for sender in senders
            if node in self.nodes[sender].sealed
        }

    def masked(
        self, node: str, total: Vector, sharers: Sequence[str]
    ) -> tuple[npt.NDArray[np.unsignedinteger], Uploaded]:
        return self.nodes[node].masked(total, sharers, self.sealed(node, sharers))


def roster_of(pairs: Mapping[str, KeyPair], binding: bytes = BINDING) -> Roster:
    return Roster(binding, tuple(Member(name, pairs[name].public) for name in sorted(pairs)))


def begun(pairs: Mapping[str, KeyPair], secure: SecureSum, binding: bytes = BINDING) -> World:
    roster = roster_of(pairs, binding)
    nodes = {name: Participant.begin(roster, name, pair, secure) for name, pair in pairs.items()}
    return World(secure, roster, pairs, nodes)


@lru_cache(maxsize=64)
def world(nodes: int, colluding: int, dropouts: int, which: int = 0) -> World:
    """A world that tests share: all its values are frozen."""
    pairs = {f"node-{number:03}": KeyPair.fresh() for number in range(nodes)}
    return begun(pairs, SecureSum(nodes, colluding, dropouts), bytes([which]) * 32)


def totals_of(
    names: Iterable[str], dimension: int, seed: int, dtype: npt.DTypeLike = np.int64
) -> dict[str, Vector]:
    """Sums of nodes, the total of which fits for up to 2^13 nodes in 64 bits, 2^5 in 32."""
    most, generator = 2 ** (50 if dtype == np.int64 else 26), np.random.default_rng(seed)
    return {name: generator.integers(-most, most, dimension, dtype) for name in names}


def sign(node: str, statement: bytes) -> bytes:
    """In place of a certificate's signature: no test forges one."""
    return hmac.digest(node.encode(), statement, "sha256")


def verify(node: str, statement: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(sign(node, statement), signature)


def opened_by(
    uploaded: Mapping[str, Uploaded], survivors: Sequence[str], signers: Iterable[str]
) -> dict[str, Mapping[str, bytes]]:
    """Shares that the signers open to each other's signatures."""
    signatures = {name: sign(name, uploaded[name].statement(survivors)) for name in signers}
    return {name: uploaded[name].opened(survivors, signatures, verify) for name in signatures}
