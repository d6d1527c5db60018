"""Secure sums in one process: the code of real nodes and servers, with simulated drop-outs.

The nodes' signatures are left out, since one process has no one to deceive.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.clipping import IntegerVector
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, rounded_noise
from fedpriv.privacy.noise import words
from fedpriv.privacy.round import OpenedSum, PartialSum, SeriesEntropy, merge_sums
from fedpriv.privacy.sampling import Users, drawn_users
from fedpriv.secure_sums.parameters import Grid, share_stddevs
from fedpriv.secure_sums.protocol import KeyPair, Member, Participant, Roster, unmasked

_SHARING, _UPLOADING, _SIGNING, _OPENING, _NEVER = range(5)  # steps before which a node drops out
Collect = Callable[[Users], Iterable[PartialSum]]


def simulated_nodes(
    mechanism: GaussianMechanism, attempt: str, collect: Collect, key: bytes, dropout: float
) -> Callable[[], OpenedSum | None]:
    """Carry out an attempt at a round up to the charge; return the function that opens the sum.

    Users are at n nodes, in equal parts by position. `key` determines their coins and noise, and
    the nodes that drop out: each with probability `dropout`, before a step that is drawn uniformly.
    The function returns None if more nodes drop out than the mechanism allows.
    """
    if (secure := mechanism.secure_sum) is None:
        raise ValueError("the mechanism trusts its server")
    nodes = _Nodes.of(secure, attempt, SeriesEntropy(key), dropout)
    sharers, survivors = nodes.after(_SHARING), nodes.after(_UPLOADING)
    if not nodes.suffice(survivors):
        return lambda: None
    members = {n: Participant.begin(nodes.roster, n, nodes.pairs[n], secure) for n in sharers}
    clipping, grid = mechanism.clipping, Grid.of(mechanism.event, secure.nodes)
    total, uploads = np.zeros(clipping.layout.dimension, f"u{grid.dtype.itemsize}"), {}
    for name in survivors:
        received = {n: m.sealed[name] for n, m in members.items() if name in m.sealed}
        node_sum = grid.rounded(nodes.noised_sum(name, mechanism, collect), clipping)
        masked, uploads[name] = members[name].masked(node_sum, sharers, received)
        total += masked
    signatures = dict.fromkeys(nodes.after(_SIGNING), b"")

    def opened() -> OpenedSum | None:
        openers = nodes.after(_OPENING)
        if not nodes.suffice(openers):
            return None
        shares = {n: uploads[n].opened(survivors, signatures, lambda *_: True) for n in openers}
        summed = unmasked(total, nodes.roster, secure, sharers, survivors, shares)
        return OpenedSum(grid.steps(summed, clipping), len(survivors))

    return opened


@dataclass(frozen=True)
class _Nodes:
    """The nodes of one attempt."""

    secure: SecureSum
    roster: Roster
    pairs: dict[str, KeyPair]
    gone_at: dict[str, int]  # the first step that each node does not complete
    entropy: SeriesEntropy

    @classmethod
    def of(cls, secure: SecureSum, attempt: str, entropy: SeriesEntropy, dropout: float) -> Self:
        names = [f"node-{number:06d}" for number in range(secure.nodes)]
        pairs = {name: KeyPair.fresh() for name in names}
        members = tuple(Member(name, pair.public) for name, pair in pairs.items())
        roster = Roster(hashlib.sha256(attempt.encode()).digest(), members)
        coins = words(entropy.key("dropouts"), 2 * len(names)).reshape(2, -1)
        drops_out = coins[0] * 2.0**-64 < dropout
        steps = np.where(drops_out, coins[1] % np.uint64(_NEVER), _NEVER).tolist()
        return cls(secure, roster, pairs, dict(zip(names, steps, strict=True)), entropy)

    def after(self, step: int) -> list[str]:
        """Return the nodes that complete this step."""
        return [name for name, last_step in self.gone_at.items() if last_step > step]

    def suffice(self, names: Sequence[str]) -> bool:
        return len(names) >= self.secure.nodes - self.secure.dropouts

    def noised_sum(
        self, name: str, mechanism: GaussianMechanism, collect: Collect
    ) -> IntegerVector:
        """Return the sum of the node's drawn users plus its share of the noise, in steps [D]."""
        sampling, key_of = mechanism.sampling.event(), self.entropy.key
        number, n = self.roster.index(name), len(self.pairs)
        ends = [position * sampling.population // n for position in (number, number + 1)]
        users = drawn_users(sampling, ends[1] - ends[0], key_of(f"coins/{name}"))
        clipping, stddevs = mechanism.clipping, share_stddevs(mechanism.event, n)
        partials = collect(users + ends[0]) if users.size else ()
        total = merge_sums(name, partials, clipping.layout.dimension).total
        return total + rounded_noise(lambda g: key_of(f"noise/{name}/{g}"), clipping, stddevs)
