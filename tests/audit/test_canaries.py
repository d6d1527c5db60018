"""Canaries: who they are, what they add to a sum, and what a release says of them."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.audit.canaries import Canaries, Directions, Past, audited_groups, measure
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import (
    CONTRIBUTORS,
    Averaging,
    GaussianMechanism,
    Metric,
)
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PartialSum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.auditor import LONGER, CanaryTransport, canary_sum
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from fedpriv.wire.naming import check_node_name

KEY = bytes(range(32))
METRIC = Metric("accuracy", radius=0.5, centre=0.5)
LAYOUT = Layout(
    ("conv", "bias", "dense", METRIC.tensor, CONTRIBUTORS.tensor, "unclipped"),
    ((3, 4), (5,), (7, 6), (), (), (2,)),
)
FIRST = VectorGroup("first", ("conv", "dense"), 0.7, (1.0, 0.25))
SECOND = VectorGroup("second", ("bias",), 3.0, (1.0,))
INDICATOR = Indicator.of((FIRST, SECOND))
CLIPPING = Clipping(
    LAYOUT,
    (FIRST, SECOND, METRIC.group, CONTRIBUTORS.group, INDICATOR.group),
    INDICATOR,
    ("first", "second"),
    10,
)


def request_of(users: np.ndarray, clipping: Clipping = CLIPPING, number: int = 3) -> RoundRequest:
    local = LocalTraining(0.1, steps=1)
    return RoundRequest("run", number, 1, {}, clipping, local, users, bytes(32))


def mechanism_of(clipping: Clipping = CLIPPING, z: float = 2.0) -> GaussianMechanism:
    shares = (0.5, 0.3, 0.1, 0.05, 0.05)[: len(clipping.groups)]
    total = sum(shares)
    sampling = PoissonSampling(40, 0.5)
    return GaussianMechanism.calibrated(
        sampling, clipping, z, tuple(share / total for share in shares), Averaging(10, 25.0)
    )


@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 2**64 - 1))
def test_directions_are_unit_vectors_orthogonal_within_a_block(d: int, m: int, seed: int) -> None:
    directions = Directions(seed.to_bytes(32, "big"), m, d)
    rows = directions.rows(np.arange(m))
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    for start in range(0, m, d):
        block = rows[start : start + d]
        assert np.allclose(block @ block.T, np.eye(len(block)), atol=1e-5)


@given(st.integers(1, 40), st.integers(1, 100), st.data())
def test_what_lies_along_directions_is_their_product(d: int, m: int, data: st.DataObject) -> None:
    directions = Directions(KEY, m, d)
    vector = np.array(data.draw(st.lists(st.floats(-10, 10), min_size=d, max_size=d)))
    slow = [
        sum(a * b for a, b in zip(row, vector, strict=True))
        for row in directions.rows(np.arange(m)).tolist()
    ]
    assert np.allclose(directions.along(vector), slow, atol=1e-4)


def test_directions_of_other_blocks_and_keys_look_random() -> None:
    d, blocks = 128, 40
    one, other = (
        Directions(bytes([k]) * 32, d * blocks, d).rows(np.arange(d * blocks)) for k in (1, 2)
    )
    # Of random unit vectors of d numbers, a product has the variance 1/d.
    first = one[0]
    for rows in (one[d:], other):
        products = rows @ first
        assert np.mean(products**2) == pytest.approx(1 / d, rel=0.2)
        assert abs(np.mean(products)) < 4 / math.sqrt(d * len(rows))


def test_a_fair_secret_coin_says_who_is_there_and_never_changes() -> None:
    canaries = Canaries(4000, KEY)
    there = canaries.included
    assert stats.binomtest(int(there.sum()), 4000).pvalue > 1e-4
    assert np.array_equal(there, Canaries(4000, KEY).included)
    other = Canaries(4000, bytes(32)).included
    assert stats.binomtest(int((there == other).sum()), 4000).pvalue > 1e-4
    signs = [canaries.signs(number, attempt) for number, attempt in ((1, 0), (2, 0), (1, 1))]
    for one, two in ((there * 2.0 - 1.0, signs[0]), (signs[0], signs[1]), (signs[0], signs[2])):
        assert stats.binomtest(int((one == two).sum()), 4000).pvalue > 1e-4


def slow_total(canaries: Canaries, request: RoundRequest, drawn: list[int]) -> np.ndarray:
    """The clipped contribution of each canary that is there, one after another."""
    clipping, total = request.clipping, np.zeros(request.clipping.layout.dimension, np.int64)
    signs = canaries.signs(request.round, request.attempt)
    for canary in (each for each in drawn if canaries.included[each]):
        tensors = {
            name: np.zeros(shape)
            for name, shape in zip(clipping.layout.names, clipping.layout.shapes, strict=True)
            if name != "unclipped"
        }
        for group in (FIRST, SECOND):
            d = group.dimension(clipping.layout)
            directions = canaries.directions(group, d, request.round, request.attempt)
            row = directions.rows(np.array([canary]))[0] * signs[canary] * 10 * group.clipping_norm
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                size = clipping.layout.sizes[tensor]
                tensors[tensor] = (row[:size] * scale).reshape(tensors[tensor].shape)
                row = row[size:]
        tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
        contribution = clipping.contribution(tensors)
        contribution[clipping.layout.slices["unclipped"]] = 0
        total += contribution
    return total


def test_canaries_add_what_a_user_with_their_update_adds_and_nothing_else() -> None:
    canaries = Canaries(30, KEY)
    drawn = np.array([0, 3, 4, 11, 12, 20, 29])
    found = canary_sum(canaries, request_of(drawn), drawn)
    assert found.users == canaries.included[drawn].sum() > 0
    assert found.weight == 10 * found.users
    assert np.array_equal(found.total, slow_total(canaries, request_of(drawn), drawn.tolist()))
    for silent in (METRIC.tensor, CONTRIBUTORS.tensor, "unclipped"):
        assert not found.total[LAYOUT.slices[silent]].any()
    assert CLIPPING.admits(found.total, found.users, found.weight)


@pytest.mark.parametrize("drawn", [[0, 3, 4], []])
def test_no_node_can_have_the_name_under_which_canaries_send(drawn: list[int]) -> None:
    users = np.array(drawn, np.int64)
    with pytest.raises(InvalidValueError, match="the name of a node is"):
        check_node_name(canary_sum(Canaries(30, KEY), request_of(users), users).node)


def test_each_canary_is_clipped_to_the_norm_of_each_group() -> None:
    canaries = Canaries(12, KEY)
    assert LONGER > 1.0
    for canary in np.flatnonzero(canaries.included):
        total = canary_sum(canaries, request_of(np.array([canary])), np.array([canary])).total
        for group in (FIRST, SECOND):
            part = np.concatenate([total[span] for span in CLIPPING.spans[group.name]])
            squares = int(part @ part)
            assert 0.999 * group.squared_bound < squares <= group.squared_bound


def test_nobody_adds_nothing() -> None:
    canaries = Canaries(12, KEY)
    for drawn in (np.empty(0, np.int64), np.flatnonzero(~canaries.included)):
        found = canary_sum(canaries, request_of(drawn), drawn)
        assert (found.users, found.weight) == (0, 0)
        assert not found.total.any()


class Told(Transport):
    """Adds one for each user it is asked about, and remembers them."""

    def __init__(self) -> None:
        self.users: list[int] = []
        self.calls: list[str] = []

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        self.users += request.users.tolist()
        yield PartialSum("n", request.users.size, np.zeros(LAYOUT.dimension, np.int64), 0)

    def prepare(self, request: RoundRequest) -> None:
        self.calls.append(f"prepare round {request.round}")

    def release_resources(self) -> None:
        self.calls.append("rest")


@pytest.mark.parametrize("places", [1, 4])
def test_users_are_asked_without_canaries_and_canaries_answer_beside_them(places: int) -> None:
    inner, seen = Told(), list[np.ndarray]()
    canaries = Canaries(10, KEY)
    first = 7 * places
    transport = CanaryTransport(inner, canaries, first, places, seen.append)
    asked = request_of(np.array([0, 5, first - 1, first, first + places, first + 9 * places]))
    users, added = transport.collect(asked)
    assert (inner.users, users.users) == ([0, 5, first - 1], 3)
    assert added.users == canaries.included[[0, 1, 9]].sum()
    assert added.node != users.node
    (drawn,) = seen
    assert drawn.tolist() == [0, 1, 9]
    transport.prepare(asked)
    transport.release_resources()
    assert inner.calls == ["prepare round 3", "rest"]


def test_a_canary_of_several_places_adds_up_as_often_as_they_are_drawn() -> None:
    canaries = Canaries(10, KEY)
    there = int(np.flatnonzero(canaries.included)[0])
    once, thrice = (
        canary_sum(canaries, request_of(drawn), drawn)
        for drawn in (np.array([there]), np.array([there] * 3))
    )
    assert np.array_equal(thrice.total, 3 * once.total)
    assert thrice.users == 3


@pytest.mark.parametrize("steady", [False, True])
def test_the_score_of_a_canary_that_was_drawn_is_one_and_of_others_zero(steady: bool) -> None:
    canaries, mechanism = Canaries(5, KEY, steady), mechanism_of()
    total = canary_sum(canaries, request_of(np.arange(5)), np.arange(5)).total
    average = mechanism.query.averaged(total)
    measured, _ = measure(canaries, mechanism, average, (3, 1, 0), Past())
    # Five canaries do not disturb each other in groups of at least five numbers.
    assert np.allclose(measured.scores, canaries.included, atol=1e-4)


def test_noise_alone_has_the_law_that_is_said_of_it() -> None:
    canaries, mechanism = Canaries(40, KEY), mechanism_of()
    events = mechanism.query.events[:2]
    z = sum((event.clipping_norm / event.noise_stddev) ** 2 for event in events) ** -0.5
    scores, energies, probes, past = [], [], [], Past()
    for number in range(1, 201):
        zero = np.zeros(LAYOUT.dimension, np.int64)
        average, _ = mechanism.query.noised_average(zero, SeededEntropy(number), "noise", 0)
        found, past = measure(canaries, mechanism, average, (number, 0, 0), past)
        scores.append(found.scores / z)
        energies.append(found.energy)
        probes.append(found.probe)
        assert found.dimension == LAYOUT.dimension
    law = stats.kstest(np.ravel(scores), "norm")
    assert law.pvalue > 1e-3
    assert stats.kstest(np.ravel(scores) * 0.9, "norm").pvalue < 1e-3
    assert stats.kstest(energies, stats.chi2(LAYOUT.dimension).cdf).pvalue > 1e-3
    assert stats.kstest(np.ravel(probes), "norm").pvalue > 1e-3


def test_what_releases_have_in_common_is_not_measured() -> None:
    canaries, mechanism = Canaries(40, KEY), mechanism_of()
    users = np.zeros(LAYOUT.dimension, np.int64)
    users[LAYOUT.slices["dense"]] = 30 * int(0.7 / FIRST.granularity)
    spreads = {}
    for name, kept in {"measured": False, "left": True}.items():
        past, found = Past(), []
        for number in range(1, 61):
            average, _ = mechanism.query.noised_average(users, SeededEntropy(number), "noise", 0)
            before = past if kept else Past()
            each, past = measure(canaries, mechanism, average, (number, 0, 0), before)
            found.append(np.mean(each.scores[10:] ** 2))
        spreads[name] = np.mean(found[30:])
    assert spreads["left"] < 0.5 * spreads["measured"]


def test_past_of_noise_alone_takes_little_away() -> None:
    random, past = np.random.default_rng(0), Past()
    for _ in range(50):
        release = random.normal(size=20)
        left = past.removed_from("group", release)
        past = Past(past.releases + 1, {"group": past.with_release("group", release)})
    assert left @ left > 0.8 * (release @ release)


def test_metrics_and_counts_are_not_audited() -> None:
    assert [group.name for group in audited_groups(CLIPPING)] == ["first", "second"]


def test_a_direction_does_not_depend_on_which_others_are_made() -> None:
    directions = Directions(KEY, 500, 3)
    together = directions.rows(np.arange(500))
    alone = np.concatenate([directions.rows(np.array([k])) for k in range(500)])
    assert np.array_equal(together, alone)


def test_strategies_keep_directions_and_others_do_not() -> None:
    for steady in (False, True):
        canaries = Canaries(5, KEY, steady)
        one, two = (
            canaries.directions(SECOND, 5, number, 0).rows(np.arange(5)) for number in (1, 2)
        )
        assert np.array_equal(one, two) == steady
