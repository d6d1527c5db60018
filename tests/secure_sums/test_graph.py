"""The graph of a round: secret, live and connected for every t and d nodes."""

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SecureSum
from fedpriv.secure_sums.parameters import (
    MOST_COMPLETE,
    _circle,
    degree_of,
    neighbours,
    threshold_of,
)


def is_connected(linked: Sequence[Iterable[int]], gone: set[int]) -> bool:
    left = {*range(len(linked))} - gone
    reached, front = set(), [min(left)]
    while front:
        node = front.pop()
        if node not in reached:
            reached.add(node)
            front += [other for other in linked[node] if other in left]
    return reached == left


@st.composite
def secure_sums(draw: st.DrawFn) -> tuple[int, SecureSum]:
    nodes = draw(st.integers(2, 300))
    colluding = draw(st.integers(0, nodes - 2))
    dropouts = draw(st.integers(0, nodes - (nodes + colluding) // 2 - 1))
    return nodes + draw(st.integers(0, 20)), SecureSum(nodes, colluding, dropouts)


@given(secure_sums())
def test_graph_is_secret_and_live_for_every_choice_of_nodes(case: tuple[int, SecureSum]) -> None:
    nodes, secure = case
    degree = degree_of(nodes, secure)
    t, d = secure.colluding, secure.dropouts
    assert t < threshold_of(secure) <= degree - d
    assert degree == nodes - 1 or (degree % 2 == 0 and degree > t + 2 * d)
    if nodes <= MOST_COMPLETE:
        assert degree == nodes - 1
    elif degree < nodes - 1:
        assert degree <= t + 2 * d + 2


def test_graphs_of_the_documented_sizes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "secure-sums.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+), (\d+), (\d+) \| (\d+), (\d+) \| × ([\d.]+) \|", page, re.MULTILINE
    )
    assert len(rows) == 3
    for n, t, d, degree, threshold, noise in rows:
        secure = SecureSum(int(n), int(t), int(d))
        assert (degree_of(int(n), secure), threshold_of(secure)) == (int(degree), int(threshold))
        assert float(noise) == round(math.sqrt(int(n) / secure.sharing(int(n))), 2)
    assert degree_of(1000, SecureSum(1000, 100, 50)) == 202
    assert degree_of(100, SecureSum(100, 33, 33)) == 99  # complete: 100 would be needed
    with pytest.raises(
        InvalidValueError, match="roster has 99 nodes; the round needs at least 100"
    ):
        degree_of(99, SecureSum(100, 10, 10))


@pytest.mark.parametrize(("nodes", "degree"), [(7, 2), (9, 4), (11, 4), (12, 6), (11, 8), (6, 5)])
def test_graph_stays_connected_without_any_nodes_but_as_many_as_neighbours(
    nodes: int, degree: int
) -> None:
    """All sets of nodes: fewer than k leave the rest connected, and k of them can cut it."""
    linked = neighbours(bytes(32), nodes, degree)
    for size in range(degree):
        for gone in combinations(range(nodes), size):
            assert is_connected(linked, {*gone})
    cuts = [
        gone
        for gone in combinations(range(nodes), degree)
        if len(gone) < nodes - 1 and not is_connected(linked, {*gone})
    ]
    assert bool(cuts) == (degree < nodes - 1)


@pytest.mark.parametrize(("n", "t", "d"), [(33, 3, 2), (60, 10, 5), (100, 10, 10)])
def test_graph_of_a_round_stays_connected_without_the_colluding_and_twice_the_drop_outs(
    n: int, t: int, d: int
) -> None:
    linked = neighbours(sha256(b"roster").digest(), n, degree_of(n, SecureSum(n, t, d)))
    generator = random.Random(n)
    for victim in range(n):  # its neighbours first, then any
        others = [node for node in range(n) if node not in (victim, *linked[victim])]
        near = generator.sample(linked[victim], len(linked[victim]))
        assert is_connected(linked, {*(near + others)[: t + 2 * d]})
        anyone = generator.sample([*linked[victim], *others], t + 2 * d)
        assert is_connected(linked, {*anyone})


@given(st.binary(min_size=32, max_size=32), st.integers(2, 60), st.data())
def test_links_are_mutual_and_follow_from_the_digest(
    digest: bytes, nodes: int, data: st.DataObject
) -> None:
    degrees = {nodes - 1, *range(2, nodes, 2)}
    degree = data.draw(st.sampled_from(sorted(degrees)))
    linked = neighbours(digest, nodes, degree)
    assert linked == neighbours(digest, nodes, degree)
    for node, others in enumerate(linked):
        assert len(others) == degree
        assert list(others) == sorted({*others} - {node})
        assert all(node in linked[other] for other in others)


def test_every_order_of_nodes_is_as_likely() -> None:
    """All 24 of four nodes, by a χ² test over digests."""
    digests = (sha256(number.to_bytes(4, "big")).digest() for number in range(4_800))
    seen = Counter(tuple(_circle(digest, 4)) for digest in digests)
    assert set(seen) == {*permutations(range(4))}
    assert stats.chisquare([*seen.values()]).pvalue > 1e-6


def test_every_circle_is_as_likely() -> None:
    """Of five nodes on a circle there are 12 graphs; a χ² test over digests."""
    count = 12_000
    seen = Counter(
        neighbours(sha256(number.to_bytes(4, "big")).digest(), 5, 2) for number in range(count)
    )
    circles = set()
    for order in permutations(range(5)):
        pairs = {frozenset((order[i], order[i - 1])) for i in range(5)}
        circles.add(
            tuple(
                tuple(sorted(o for o in range(5) if frozenset((node, o)) in pairs))
                for node in range(5)
            )
        )
    assert len(circles) == 12
    assert set(seen) == circles
    assert stats.chisquare([*seen.values()]).pvalue > 1e-6


def test_degrees_that_no_graph_has_are_refused() -> None:
    for degree in (0, -2, 3, 9, 10):
        with pytest.raises(InvalidValueError, match=f"degree is {degree}; of 9 nodes .* or 8"):
            neighbours(bytes(32), 9, degree)
    with pytest.raises(InvalidValueError, match="degree is 0"):
        neighbours(bytes(32), 1, 0)


@pytest.mark.parametrize(("n", "t", "k", "threshold"), [(100, 33, 34, 29), (1000, 100, 52, 28)])
def test_a_server_that_tries_rosters_beats_chance(n: int, t: int, k: int, threshold: int) -> None:
    """Why the graph relies on no chance: fewer neighbours are safe only from who tries once.

    That some honest node has τ colluding neighbours is improbable in a random graph. But the roster
    holds keys that colluding nodes choose last, so the server can try some 2^60 of them.
    """
    tail = sum(
        math.comb(t, hits) * math.comb(n - 1 - t, k - hits) for hits in range(threshold, k + 1)
    ) / math.comb(n - 1, k)
    assert tail == pytest.approx(stats.hypergeom(n - 1, t, k).sf(threshold - 1), rel=1e-9)
    once = n * tail
    assert once < 2.0**-30
    assert once * 2.0**60 > 1
