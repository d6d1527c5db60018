"""Waiting between tries: how long, and for which failures."""

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.clients.connection import LOST, Backoff, persist


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "details")


@given(st.floats(1e-3, 10.0), st.floats(10.0, 1e3), st.integers(0, 10**9))
def test_a_wait_is_uniform_up_to_a_power_of_two_or_the_cap(
    base: float, cap: float, failures: int
) -> None:
    backoff = Backoff(base, cap, lambda low, high: (low, high))  # type: ignore[arg-type, return-value]
    expected = min(cap, base * 2**failures) if failures < 100 else cap
    assert backoff.wait(failures) == (0.0, expected)
    assert backoff.wait() == (0.0, cap)
    assert 0.0 <= Backoff(base, cap).wait(failures) <= expected


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_a_call_is_repeated_only_where_that_can_help(code: grpc.StatusCode) -> None:
    waits: list[float] = []

    def draw(low: float, high: float) -> float:
        waits.append(high)
        return low

    calls = iter([failure(code), failure(code), None])

    async def call() -> str:
        if (error := next(calls)) is not None:
            raise error
        return "answer"

    again = persist(call, Backoff(1.0, 60.0, draw))
    if code.name in LOST:
        assert asyncio.run(again) == "answer"
        assert waits == [1.0, 2.0]
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            asyncio.run(again)
        assert waits == []
