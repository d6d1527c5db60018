"""Parameters of a secure sum: the graph of its nodes, the noise of a share, its words, and δ′.

**Theorem.** Let K_i = round(a_i + η_i) with real a_i and independent η_i ~ N(0, s²), i = 1…m. Let
G ~ N(0, m·s²) and the sum V of m − 1 uniforms on (−½, ½) be independent. If s ≥ 4, the law of ΣK_i
is that of round(Σa_i + G + V) up to a total variation of δ₁ ≤ 20·m²·s²·exp(−π²s²/2).

This is post-processing of Σa_i + G, the Gaussian mechanism. So the nodes' noise costs as much as
Gaussian noise of variance m·s², up to δ₁ for each released number. `docs/secure-sums.md` has the
proof.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import LEAST_SHARE, RoundEvent, SecureSum
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.support.checks import require, text_up

MOST_COMPLETE = 32  # in a round of at most this many nodes, all pairs of nodes mask each other
_DEVIATIONS = 16.0  # a normal exceeds this many standard deviations with probability below 10^-56
_RARE = 70.0  # −ln of a probability, below 10^-30

SignedVector = npt.NDArray[np.signedinteger]  # int32 or int64


def degree_of(nodes: int, secure: SecureSum) -> int:
    """Return k, the number of neighbours of each of n nodes: n − 1 up to n = 32, else ≈ t + 2d + 1.

    Linked nodes mask each other and keep each other's shares. The graph is safe and live for every
    choice of t colluding nodes and d dropouts. It does not rely on chance, since the server knows
    the graph, may drop any nodes and may try many rosters.

    1. *Secrecy.* At most t of a node's neighbours collude, fewer than the threshold τ = t + 1.
    2. *Liveness.* At least k − d ≥ τ of a node's neighbours do not drop out.
    3. *Connection.* The graph stays connected without any t + 2d nodes.

    Raises InvalidValueError for fewer nodes than the event's.
    """
    # Nodes on a circle with k/2 neighbours on either side stay connected without any k − 1 of
    # them: to separate two arcs, k/2 successive nodes must be gone on both sides. (Harary 1962
    # shows that no graph with as few links is connected better.)
    #
    # Let honest nodes open shares for the list S of sharers and U ⊆ S of survivors. No other lists
    # gather a quorum. A colluding neighbour's masks are known, and so are those of S \ U.
    # * A survivor that masked for S has unknown masks with its honest neighbours in U. Without
    #   the t colluding and the d dropped nodes the graph is connected, so only the total of all
    #   honest survivors is without unknown masks.
    # * A survivor that was shown another list S′ has unknown masks with all honest neighbours
    #   in S′ but those in S \ U, so t + 2d nodes are missing. That graph is connected too. It
    #   holds one of the honest nodes that signed for S: there are at least w − t of them, more
    #   than n − w ≥ d, and S′ lacks at most d nodes. Its masks for S cancel none for S′.
    # k = t + d + 1 would do for the first; the second isolates a node if k ≤ t + 2d. In the
    # complete graph the nodes that remain are linked, for every t and d.
    t, d = secure.colluding, secure.dropouts
    limit = f"the round needs at least {secure.nodes}"
    require(nodes >= secure.nodes, f"the roster has {nodes} nodes; {limit}")
    degree = t + 2 * d + 1
    degree += degree % 2
    return nodes - 1 if nodes <= MOST_COMPLETE else min(degree, nodes - 1)


def threshold_of(secure: SecureSum) -> int:
    """Return τ, the number of shares that restore a secret."""
    return secure.colluding + 1


@lru_cache(maxsize=4)  # in a simulation, every node of a round asks
def neighbours(digest: bytes, nodes: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each node's neighbours, ascending; the relation is symmetric.

    The nodes are placed on a circle in an order that follows from the roster's 32-byte digest; all
    n! orders are equally likely if the digest is random. Each node is linked to the k/2 nearest on
    either side. k is even or n − 1. Raises InvalidValueError for other degrees.
    """
    valid = 0 < degree == nodes - 1 or (0 < degree < nodes and degree % 2 == 0)
    limit = f"of {nodes} nodes it must be even and less than {nodes}, or {nodes - 1}"
    require(valid, f"the degree is {degree}; {limit}")
    if degree == nodes - 1:
        return tuple((*range(node), *range(node + 1, nodes)) for node in range(nodes))
    circle = _circle(digest, nodes)
    linked: list[tuple[int, ...]] = [()] * nodes
    for centre, node in enumerate(circle):
        sides = range(centre - degree // 2, centre + degree // 2 + 1)
        linked[node] = tuple(sorted(circle[i % nodes] for i in sides if i != centre))
    return tuple(linked)


def _circle(digest: bytes, nodes: int) -> list[int]:
    """Return the nodes in the order of their hashes."""
    prefix = b"fedpriv circle" + digest
    return sorted(range(nodes), key=lambda node: sha256(prefix + node.to_bytes(8)).digest())


def share_stddev(stddev_steps: float, nodes: int, secure: SecureSum) -> float:
    """Return s, the standard deviation of a node's noise in steps: σ/√(n − t − d), rounded up.

    The shares of the honest nodes in every total have at least the variance σ² of the event. Raises
    InvalidValueError if s is below 2^10, since δ′ is then not proved to be negligible.
    """
    sharing = secure.sharing(nodes)
    minimum = LEAST_SHARE * math.sqrt(sharing)  # as the event checks it
    if not minimum <= stddev_steps < math.inf:
        problem = f"the noise of a group is {stddev_steps} steps"
        limit = f"if {sharing} nodes share it, it must be finite and at least {text_up(minimum)}"
        raise InvalidValueError(f"{problem}; {limit}")
    share = max(LEAST_SHARE, stddev_steps / math.sqrt(sharing))
    while sharing * Fraction(share) ** 2 < Fraction(stddev_steps) ** 2:
        share = math.nextafter(share, math.inf)
    return share


def share_stddevs(event: RoundEvent, nodes: int) -> tuple[float, ...]:
    """Return the standard deviations of a node's shares of an event's noise, in steps, by group.

    InvalidValueError: the event needs a trusted server, or a share is too small.
    """
    if event.secure_sum is None:
        raise InvalidValueError("the event trusts its server, which adds the noise")
    steps = (query.noise_stddev / (query.granularity or math.inf) for query in event.queries)
    return tuple(share_stddev(stddev, nodes, event.secure_sum) for stddev in steps)


@dataclass(frozen=True)
class Grid:
    """The integers that nodes mask: 32 bits if every honest total fits, otherwise 64.

    With 32 bits, a node rounds its noised sum to coarse steps of 2^b steps, so that its share of
    the noise is from 2^10 to 2^11 coarse steps. With 64 bits, b = 0. Event and roster decide.
    """

    shifts: tuple[int, ...]  # b of each group
    dtype: np.dtype[np.int32] | np.dtype[np.int64]  # of totals

    @classmethod
    def of(cls, event: RoundEvent, nodes: int) -> "Grid":
        """Return the grid of an event whose roster has this many nodes.

        If all nodes are honest, a total exceeds 32 bits with a probability below 10^-30 for its
        users and 10^-46 for the noise of 10^10 numbers. It is then wrong, but as private as others.
        """
        stddevs, users = share_stddevs(event, nodes), event.sampling.largest_cohort(_RARE)
        shifts = tuple(math.frexp(stddev / LEAST_SHARE)[1] - 1 for stddev in stddevs)
        for query, stddev, shift in zip(event.queries, stddevs, shifts, strict=True):
            sums = users * query.clipping_norm / (query.granularity or math.inf)
            steps = sums + _DEVIATIONS * stddev * math.sqrt(nodes)
            if math.ldexp(steps, -shift) + nodes >= 2**31:  # each node rounds once
                return cls((0,) * len(shifts), np.dtype(np.int64))
        return cls(shifts, np.dtype(np.int32))

    def rounded(self, noised: IntegerVector, clipping: Clipping) -> SignedVector:
        """Return a node's noised sum [D] in coarse steps; `noised`, in steps, is overwritten."""
        # A node sends ⌊(a + round(η) + 2^(b − 1))/2^b⌋ for its exact sum a, so the sensitivity is
        # that of the sum in steps. As ⌊⌊y⌋/2^b⌋ = ⌊y/2^b⌋, it is round(a′ + η/2^b) with the real
        # number a′ = (a + ½)/2^b, as in the theorem. Rounding adds half a step to the mean and 1/12
        # to the variance in coarse steps, less than 10^-7 of that of the node's noise.
        for span, shift in self._spans(clipping):
            noised[span] += (1 << shift) >> 1
            noised[span] >>= shift
        return noised.astype(self.dtype, copy=False)

    def steps(self, total: SignedVector, clipping: Clipping) -> IntegerVector:
        """Return a total [D] in steps."""
        steps = total.astype(np.int64)
        for span, shift in self._spans(clipping):
            steps[span] <<= shift
        return steps

    def _spans(self, clipping: Clipping) -> Iterator[tuple[slice, int]]:
        for group, shift in zip(clipping.groups, self.shifts, strict=True):
            yield from ((span, shift) for span in clipping.spans[group.name])
