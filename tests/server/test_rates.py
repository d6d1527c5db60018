"""Token buckets: so many calls at once, and as many again in a minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.server.gateway import RateLimit


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("per_minute", [1, 2, 60, 600])
def test_so_many_calls_pass_at_once_and_no_more(per_minute: int) -> None:
    limit = RateLimit(per_minute, Clock())
    assert [limit.admits("a") for _ in range(per_minute + 3)] == [True] * per_minute + [False] * 3


def test_as_many_again_pass_in_every_minute_evenly() -> None:
    clock = Clock()
    limit = RateLimit(60, clock)
    for _ in range(60):
        limit.admits("a")
    for _ in range(120):
        clock.now += 1.0
        assert [limit.admits("a"), limit.admits("a")] == [True, False]


def test_a_call_that_is_refused_costs_nothing() -> None:
    clock = Clock()
    limit = RateLimit(60, clock)
    for _ in range(60):
        assert limit.admits("a")
    for _ in range(3):
        clock.now += 0.25
        assert not limit.admits("a")
    clock.now += 0.25  # a second after the last that passed
    assert limit.admits("a")


def test_calls_that_the_server_asked_for_do_not_count_and_are_not_saved_up() -> None:
    limit = RateLimit(3, Clock())
    limit.grant("a", 5)
    assert [limit.admits("a") for _ in range(4)] == [True, True, True, False]
    limit.grant("a", 2)
    assert [limit.admits("a") for _ in range(3)] == [True, True, False]
    limit.grant("a", 5)
    assert [limit.admits("a") for _ in range(4)] == [True, True, True, False]


def test_nodes_do_not_share() -> None:
    limit = RateLimit(2, Clock())
    assert [limit.admits(node) for node in "aaabbb"] == [True, True, False] * 2


@given(
    st.integers(1, 20),
    st.lists(st.integers(0, 120), min_size=1, max_size=100),
)
def test_no_stretch_of_time_has_more_than_the_bound(per_minute: int, pauses: list[int]) -> None:
    """Between any two calls, at most `per_minute` and as many a minute as passed in between."""
    clock = Clock()
    limit = RateLimit(per_minute, clock)
    passed = []
    for pause in pauses:
        clock.now += pause
        if limit.admits("a"):
            passed.append(clock.now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            minutes = (passed[last] - passed[first]) / 60.0
            assert last - first + 1 <= per_minute * (1.0 + minutes) + 1e-6


@given(st.integers(1, 20), st.lists(st.integers(0, 120), max_size=50))
def test_who_calls_no_more_often_is_never_refused(per_minute: int, pauses: list[int]) -> None:
    clock = Clock()
    limit = RateLimit(per_minute, clock)
    for pause in pauses:
        clock.now += 60.0 / per_minute * (1.0 + 1e-9) + pause
        assert limit.admits("a")
