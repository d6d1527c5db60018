"""Nodes that lie about weights, where the average is over the cohort's own: no release moves more.

With `averaging.floor` a release is A/max(m, B), B the weight that nodes say their users have. A sum
A of many users that says it weighs nothing would let the next user's arrival move the release by
all of A.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv import wire
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianQuery
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PartialSum, add_up
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import federation_pb2 as pb
from tests.server.loopback import nodes, site, summed

LAYOUT = Layout(("w",), ((6,),))
CAP, MANY = 4, 999
CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 0.3), weighted=("update",), weight_cap=CAP)
(GROUP,) = CLIPPING.groups
AHEAD = np.array([1, 0, 0, 0, 0, 0])
LONGEST = int(np.floor(np.sqrt(GROUP.squared_bound)))
HONEST = PartialSum("honest", 1, -LONGEST * AHEAD, CAP)


def query(floor: float) -> GaussianQuery:
    return GaussianQuery(CLIPPING, (0.3,), weighted_denominator=floor, floor=1.0)


def moved(floor: float, one: PartialSum, other: PartialSum) -> float:
    """How far two releases are apart that have the same noise, in units of what is charged."""
    asked, entropy = query(floor), SeededEntropy(1)
    (first, (event,)), (second, _) = (
        asked.noised_average(cohort.total, entropy, "noise", cohort.weight)
        for cohort in (one, other)
    )
    return float(np.linalg.norm(first - second)) * floor / event.clipping_norm


def arrival(floor: float, lie: PartialSum, honest: PartialSum = HONEST) -> float:
    """How far a user's arrival beside a node moves what is released."""
    sums = (add_up(partials, CLIPPING, MANY + 1) for partials in ([lie], [lie, honest]))
    return moved(floor, *sums)


def believed(lie: PartialSum) -> bool:
    return bool(add_up([lie], CLIPPING, MANY).total.any())


@pytest.mark.parametrize("floor", [0.25, 1.0, 500.0])
@pytest.mark.parametrize("weight", [0, 1, CAP, 2000, MANY * CAP - 1])
def test_a_node_of_many_users_cannot_say_that_they_weigh_less(floor: float, weight: int) -> None:
    lie = PartialSum("silo", MANY, MANY * LONGEST * AHEAD, weight)
    assert not believed(lie)
    assert arrival(floor, lie) <= 1.0
    legal = replace(lie, total=weight * LONGEST // CAP * AHEAD)
    assert believed(legal) == (weight > 0)
    assert arrival(floor, legal) <= 1.0


def test_it_would_move_the_release_if_it_were_believed() -> None:
    total = MANY * LONGEST * AHEAD
    one = PartialSum("cohort", MANY, total, 0)
    other = PartialSum("cohort", MANY + 1, total + HONEST.total, CAP)
    assert moved(0.25, one, other) > 300.0


@pytest.mark.parametrize("weight", [-1, CAP * MANY + 1, 2**63])
def test_more_or_less_weight_than_users_can_have_counts_as_zero(weight: int) -> None:
    lie = PartialSum("silo", MANY, AHEAD, weight)
    assert not believed(lie)
    assert arrival(1.0, lie) <= 1.0


directions = hnp.arrays(np.int64, 6, elements=st.integers(-9, 9)).filter(np.any)


@given(
    st.floats(0.01, 1000.0),
    directions,
    st.floats(0.0, 1.5),
    st.integers(0, MANY),
    st.integers(0, MANY * CAP),
    directions,
    st.integers(0, CAP),
)
def test_whatever_a_node_says_an_arrival_moves_no_more_than_is_charged(
    floor: float,
    direction: np.ndarray,
    share: float,
    users: int,
    weight: int,
    update: np.ndarray,
    own: int,
) -> None:
    longest = share * LONGEST * weight / CAP
    total = np.trunc(direction / np.linalg.norm(direction) * longest).astype(np.int64)
    contribution = CLIPPING.contribution({"w": update.astype(np.float64)}, own)
    lie = PartialSum("silo", users, total, weight)
    assert arrival(floor, lie, PartialSum("honest", 1, contribution, own)) <= 1.0


def test_so_it_is_with_nodes_that_are_connected(tmp_path: Path) -> None:
    lie = PartialSum("", MANY, MANY * LONGEST * AHEAD, 0)

    def lies(offer: wire.RoundOffer, _: RoundRequest) -> Iterator[pb.UploadPart]:
        return summed(offer, lie)

    def honest(offer: wire.RoundOffer, _: RoundRequest) -> Iterator[pb.UploadPart]:
        return summed(offer, HONEST)

    parameters = {"w": np.zeros(6, np.float32)}
    local = LocalTraining(0.1, steps=1, max_examples=10)
    everybody = np.arange(MANY + 1)  # of whom the first is alone
    request = RoundRequest("r", 0, 0, parameters, CLIPPING, local, everybody, bytes(32))
    sums = []
    users = {"alone": ["0"], "silo": [f"s{number}" for number in range(MANY)]}
    with site(tmp_path, users) as made, nodes(made, {"alone": honest, "silo": lies}):
        for drawn in (everybody[1:], everybody):
            asked = replace(request, users=drawn)
            partials = list(made.transport().collect(asked))
            assert len(partials) == len(drawn) - MANY  # the lie is refused
            sums.append(add_up(partials, CLIPPING, len(drawn)))
    assert moved(0.25, *sums) <= 1.0
    np.testing.assert_array_equal(sums[1].total, HONEST.total)
