"""Parameters of a secure sum: the graph of its nodes, the noise of a share, and δ′.

**Theorem.** Let K_i = round(η_i) with independent η_i ~ N(0, s²), i = 1…m. Let G ~ N(0, m·s²) and
the sum V of m − 1 uniforms on (−½, ½) be independent. If s ≥ 4, the law of ΣK_i is that of
round(G + V) up to a total variation of δ₁ ≤ 20·m²·s²·exp(−π²s²/2).

For an integer a, a + round(G + V) = round(a + G + V) is post-processing of a + G, the Gaussian
mechanism. So the nodes' noise costs what Gaussian noise of variance m·s² costs, up to δ₁ for each
number that is released. `docs/secure-sums.md` has the proof.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256

import numpy as np

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import LEAST_SHARE, RoundEvent, SecureSum
from fedpriv.privacy.noise import words
from fedpriv.support.checks import require, text_up

MOST_COMPLETE = 32  # in a round of at most this many nodes each masks with each other
_LEAST_STDDEV = 4.0  # of the theorem
_WORDS_AT_ONCE = 1 << 10


@dataclass(frozen=True)
class Graph:
    """The graph of a round: nodes that are linked mask each other and keep each other's shares.

    `of` is safe and live for every choice of t nodes that collude and d that drop out. It relies on
    no chance: the server, which drops nodes as it likes and may try many rosters, knows the graph.

    1. *Secrecy.* At most t of a node's neighbours collude, fewer than the threshold τ = t + 1.
    2. *Liveness.* At least k − d ≥ τ of a node's neighbours do not drop out.
    3. *Connection.* The graph stays connected without any t + 2d nodes, see `of`.
    """

    degree: int  # k, the neighbours of a node
    threshold: int  # τ, the shares that restore a secret

    @classmethod
    def of(cls, nodes: int, secure: SecureSum) -> "Graph":
        """Return the graph of a roster of n nodes: k = n − 1 up to 32 nodes, else about t + 2d + 1.

        Raises InvalidValueError for fewer nodes than the event's.
        """
        # Nodes on a circle with k/2 neighbours on either side stay connected without any k − 1 of
        # them: to separate two arcs, k/2 successive nodes must be gone on both sides. (Harary 1962
        # shows that no graph with as few links is connected better.)
        #
        # Let honest nodes open shares for the list S of sharers and U ⊆ S of survivors. No others
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
        if nodes <= MOST_COMPLETE or degree >= nodes - 1:
            degree = nodes - 1
        return cls(degree, t + 1)


@lru_cache(maxsize=4)  # in a simulation, every node of a round asks
def neighbours(digest: bytes, nodes: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each node's neighbours, ascending; a node is its neighbours' too.

    The nodes are placed on a circle in an order that follows from the roster's 32-byte digest,
    each of the n! with equal probability if the digest is random, and each is linked to the k/2
    nearest on either side. k is even or n − 1. Raises InvalidValueError for other degrees.
    """
    valid = 0 < degree == nodes - 1 or (0 < degree < nodes and degree % 2 == 0)
    limit = f"of {nodes} nodes it must be even and less than {nodes}, or {nodes - 1}"
    require(valid, f"the degree is {degree}; {limit}")
    if degree == nodes - 1:
        return tuple((*range(node), *range(node + 1, nodes)) for node in range(nodes))
    circle = _shuffled(digest, nodes)
    linked: list[tuple[int, ...]] = [()] * nodes
    for place, node in enumerate(circle):
        sides = range(place - degree // 2, place + degree // 2 + 1)
        linked[node] = tuple(sorted(circle[at % nodes] for at in sides if at != place))
    return tuple(linked)


def _shuffled(digest: bytes, nodes: int) -> list[int]:
    """Return a permutation by the method of Fisher and Yates."""
    order, numbers = list(range(nodes)), _numbers(sha256(b"fedpriv circle" + digest).digest())
    for last in range(nodes - 1, 0, -1):
        choices = last + 1
        # The largest multiple of the choices below 2^64: what lies above would favour some.
        whole = 2**64 - 2**64 % choices
        place = next(number for number in numbers if number < whole) % choices
        order[last], order[place] = order[place], order[last]
    return order


def _numbers(key: bytes) -> Iterator[int]:
    """Yield the words of a key."""
    start = 0
    while True:
        yield from words(key, _WORDS_AT_ONCE, start=start).tolist()
        start += _WORDS_AT_ONCE


def share_stddev(stddev_steps: float, nodes: int, secure: SecureSum) -> float:
    """Return s, the standard deviation of a node's noise in steps: σ/√(n − t − d), rounded up.

    The shares of the honest nodes in every total have at least the variance σ² of the event. Raises
    InvalidValueError if s is below 2^10, for which δ′ is not negligible by proof.
    """
    sharing = secure.sharing(nodes)
    least = LEAST_SHARE * math.sqrt(sharing)  # as the event checks it
    if not least <= stddev_steps < math.inf:
        problem = f"the noise of a group is {stddev_steps} steps"
        limit = f"if {sharing} nodes share it, it must be finite and at least {text_up(least)}"
        raise InvalidValueError(f"{problem}; {limit}")
    share = max(LEAST_SHARE, stddev_steps / math.sqrt(sharing))
    while sharing * Fraction(share) ** 2 < Fraction(stddev_steps) ** 2:
        share = math.nextafter(share, math.inf)
    return share


def share_stddevs(event: RoundEvent, nodes: int) -> tuple[float, ...]:
    """Return the standard deviations of a node's shares of an event's noise, in steps, by group.

    InvalidValueError: the event trusts its server, or a share is too small.
    """
    if event.secure_sum is None:
        raise InvalidValueError("the event trusts its server, which adds the noise")
    steps = (query.noise_stddev / (query.granularity or math.inf) for query in event.queries)
    return tuple(share_stddev(stddev, nodes, event.secure_sum) for stddev in steps)


def rounding_excess(least_share: float, nodes: int) -> float:
    """Return ln δ₁ for n shares of s steps each, s ≥ 4: ln(20·n²·s²) − π²s²/2.

    δ₁ itself is below every float for the shares that are allowed. Raises InvalidValueError for s
    below 4, which the theorem does not cover.
    """
    limit = f"it must be finite and at least {_LEAST_STDDEV:.0f}"
    valid = _LEAST_STDDEV <= least_share < math.inf
    require(valid, f"the share of the noise is {least_share} steps; {limit}")
    require(nodes >= 1, f"there are {nodes} nodes; there must be at least one")
    return math.log(20) + 2 * math.log(nodes * least_share) - (math.pi * least_share) ** 2 / 2


def excess_delta(log_excess: float, epsilon: float, numbers: int, rounds: int) -> float:
    """Return ln δ′ of rounds that are (ε, δ)-DP with Gaussian noise: δ′ = (1 + e^ε)·D·T·δ₁.

    `log_excess` is ln δ₁ of `rounding_excess`, D the numbers that a round releases and T the
    rounds. Both worlds' releases differ from the Gaussian's by at most D·T·δ₁ in total variation:
    P(R) ≤ P̃(R) + DTδ₁ ≤ e^ε·P̃′(R) + δ + DTδ₁ ≤ e^ε·(P′(R) + DTδ₁) + δ + DTδ₁.
    """
    return float(np.logaddexp(0.0, epsilon)) + math.log(numbers) + math.log(rounds) + log_excess
