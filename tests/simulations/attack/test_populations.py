"""Kept populations: pairs that differ in one user, whatever plan they are made for."""

from dataclasses import replace

import numpy as np
import pytest

from fedpriv.data.population import UserStore
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import RoundAttempt, add_up
from fedpriv.training.rounds import round_request
from simulations.attack.populations import POPULATIONS, Crowd, KeptPopulation, UnfitError
from tests.simulations.attack.targets import crowd_of, tiny_target, words_crowd

EVERY = [*POPULATIONS.values()]
NAMES = [*POPULATIONS]
SILENT = {"illegal-labels", "not-finite", "no-rows", "late", "overstated"}
"""Populations of which the user that differs is drawn and must count as zero."""


def rows_of(store: UserStore, user: int) -> list[bytes]:
    return [column.tobytes() for column in store.examples_of(user).values()]


@pytest.mark.parametrize("kept", EVERY, ids=NAMES)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_pair_differs_in_its_last_user_alone(kept: KeptPopulation, replaced: bool) -> None:
    crowd = crowd_of(replaced=replaced)
    pair = kept.pair(crowd)
    alike = pair.with_one.population - 1
    for user in range(alike):
        assert rows_of(pair.without, user) == rows_of(pair.with_one, user)
    enrolled = crowd.users.population
    if kept.name == "undrawn":  # it is beyond all positions that are drawn
        assert (pair.without.population, alike) == (enrolled, enrolled)
    else:
        assert pair.without.population == (enrolled if replaced else enrolled - 1)
        assert alike == enrolled - 1
        assert not replaced or rows_of(pair.without, alike) != rows_of(pair.with_one, alike)
    for name, column in crowd.users.fields.items():
        for store in (pair.without, pair.with_one):
            assert store.fields[name].dtype == column.dtype
            assert store.fields[name].shape[1:] == column.shape[1:]


def last_x(name: str, crowd: Crowd | None = None) -> np.ndarray:
    store = POPULATIONS[name].pair(crowd or crowd_of()).with_one
    return np.asarray(store.examples_of(store.population - 1)["x"])


def test_populations_are_what_they_are_called() -> None:
    ordinary = np.asarray(crowd_of().last["x"])
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).smallest_normal
    assert set(np.abs(last_x("huge")).ravel()) == {largest}
    np.testing.assert_array_equal(last_x("large"), ordinary * np.float32(1e4))
    subnormal = np.abs(last_x("subnormal"))
    assert 0.0 < subnormal.max() < smallest
    assert smallest < np.abs(last_x("tiny")).max() < 1e-15
    assert not np.isfinite(last_x("not-finite")).all()
    assert len(last_x("no-rows")) == 0
    assert len(last_x("far-larger")) == len(last_x("undrawn")) == 100 * len(ordinary)
    cancelling = POPULATIONS["cancelling"].pair(crowd_of()).with_one
    np.testing.assert_array_equal(cancelling.examples_of(0)["x"], -last_x("cancelling"))
    labels = POPULATIONS["every-label"].pair(crowd_of()).with_one.examples_of(0)
    assert labels["y"].tolist() == [0, 1, 2]
    assert (labels["x"] == labels["x"][0]).all()
    full = POPULATIONS["full-chunk"].pair(crowd_of()).with_one
    assert full.sizes.tolist() == [8] * 4
    illegal = POPULATIONS["illegal-labels"].pair(crowd_of()).with_one
    assert (illegal.examples_of(3)["y"] > 2).all()
    assert POPULATIONS["alone"].pair(crowd_of()).without.rows == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("huge", "inputs are not floating-point numbers"),
        ("subnormal", "inputs are not floating-point numbers"),
        ("every-label", "a row has several targets"),
    ],
)
def test_what_does_not_fit_text_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnfitError, match=why):
        POPULATIONS[name].pair(words_crowd())
    assert POPULATIONS["far-larger"].pair(words_crowd()).with_one.sizes[-1] == 200
    illegal = POPULATIONS["illegal-labels"].pair(words_crowd()).with_one
    assert (illegal.examples_of(3)["y"] == 96).all()


def test_classes_are_needed_where_labels_are_changed() -> None:
    crowd = crowd_of()
    fields = {"x": crowd.users.fields["x"], "y": crowd.users.fields["x"][:, 0]}
    numbers = replace(crowd, users=UserStore(fields, crowd.users.offsets))
    for name in ("illegal-labels", "every-label"):
        with pytest.raises(UnfitError, match="targets are not classes"):
            POPULATIONS[name].pair(numbers)


@pytest.mark.parametrize("name", ["far-larger", "undrawn", "every-label", "full-chunk"])
def test_what_needs_more_rows_than_a_record_has_is_refused(name: str) -> None:
    with pytest.raises(UnfitError, match=r"it needs \d+ rows of a record, which has at most 1"):
        POPULATIONS[name].pair(crowd_of(most=1))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "undrawn"])
def test_what_the_server_adds_up_is_bounded_and_zero_where_it_must_be(name: str) -> None:
    """The real engine and the real checks; populations that move nothing move no bit."""
    target = tiny_target()
    pair = POPULATIONS[name].pair(target.crowd)
    users = target.crowd.users.population
    at, everyone = RoundAttempt("attack", 1, 0), np.arange(users)
    request = round_request(target.plan, target.start, at, everyone, SeededEntropy(0))
    without = target.transport(pair.without)
    with_one = pair.carried(target.transport(pair.with_one), everyone[-1:])
    totals = [
        add_up(w.collect(request), request.clipping, users).total for w in (without, with_one)
    ]
    moved = totals[1] - totals[0]
    assert bool(moved.any()) == (name not in SILENT)
    for group in request.clipping.groups:
        spans = request.clipping.spans[group.name]
        assert sum(x * x for s in spans for x in moved[s].tolist()) <= group.squared_bound
