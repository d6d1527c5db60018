"""A raw update is what `collect` would clip: clipping it gives what `collect` gives."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data.store import UserStore
from fedpriv.engine.metrics import metric
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.federated.aggregate import add_up
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.privacy.metrics import Metric
from fedpriv.privacy.weights import Averaging, Weighting
from tests.engine.everyone import assert_close, make_task, request_to_all

EXAMPLES = 7
CAP = 10
HOSTED = 5
POPULATION = 8


def one_user(examples: int = EXAMPLES) -> UserStore:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((examples, 6)).astype(np.float32)
    return UserStore({"x": x, "y": rng.integers(0, 3, examples)}, np.array([0, examples]))


def transport_of(users: UserStore) -> InProcessTransport:
    """Over the user that the population has at position HOSTED."""
    hosted = np.arange(HOSTED, HOSTED + users.population)
    return InProcessTransport(make_task(), users, torch.device("cpu"), 20_000, hosted)


def request_of(
    strategy: str = "flat",
    metrics: Sequence[Metric] = (),
    *,
    norm: float = 0.2,
    weighted: bool = False,
    adaptive: bool = False,
) -> RoundRequest:
    return request_to_all(
        POPULATION,
        LocalTraining(0.1, batch_size=4, epochs=2),
        strategy,
        metrics,
        Averaging(Weighting(CAP), 30.0) if weighted else Averaging(),
        norm=norm,
        adaptive=adaptive,
    )


def collected(transport: InProcessTransport, request: RoundRequest) -> np.ndarray:
    return add_up(transport.collect(request), request.clipping, 1).total


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
def test_clipping_it_gives_what_collect_gives(
    strategy: str, weighted: bool, adaptive: bool
) -> None:
    transport = transport_of(one_user())
    for metrics in ((), (metric("accuracy"), metric("examples", cap=10))):
        for norm in (0.01, 100.0):  # clipped, and not
            request = request_of(strategy, metrics, norm=norm, weighted=weighted, adaptive=adaptive)
            clipping = request.clipping
            tensors, weight = transport.raw_update(request)
            assert weight == (EXAMPLES / CAP if weighted else 1.0)
            indicator = {clipping.indicator.tensor} if adaptive else set()
            assert [*tensors, *indicator] == list(clipping.layout.names)
            assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
            expected = collected(transport, request)
            contribution = clipping.contribution(tensors, weight)
            assert np.any(contribution)
            assert_close(contribution, expected)


def test_it_is_not_clipped() -> None:
    tensors, _ = transport_of(one_user()).raw_update(request_of(norm=1e-3))
    assert np.linalg.norm(np.concatenate([t.ravel() for t in tensors.values()])) > 0.1


def test_metrics_are_without_their_centres() -> None:
    request = request_of(metrics=(metric("accuracy"), metric("examples", cap=CAP)))
    tensors, _ = transport_of(one_user()).raw_update(request)
    assert tensors["metrics/examples"] == EXAMPLES - CAP / 2


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.floats(1e-4, 10.0), st.booleans())
def test_it_agrees_with_collect_for_any_norm_and_size(
    examples: int, norm: float, weighted: bool
) -> None:
    transport = transport_of(one_user(examples))
    request = request_of(norm=norm, weighted=weighted)
    expected = collected(transport, request)
    contribution = request.clipping.contribution(*transport.raw_update(request))
    assert_close(contribution, expected)


def test_what_is_not_finite_is_left_to_whoever_clips() -> None:
    users = one_user()
    users.fields["x"][:] = np.nan
    transport, request = transport_of(users), request_of()
    tensors, weight = transport.raw_update(request)
    assert not all(np.isfinite(tensor).all() for tensor in tensors.values())
    np.testing.assert_array_equal(request.clipping.contribution(tensors, weight), 0.0)


def test_failing_training_raises() -> None:
    users = one_user()
    users.fields["y"][:] = 99
    with pytest.raises((IndexError, RuntimeError)):
        transport_of(users).raw_update(request_of())


def test_only_one_user_can_send_one() -> None:
    users = UserStore(one_user().fields, np.array([0, 3, EXAMPLES]))
    with pytest.raises(InvalidValueError, match="the store has 2 users"):
        transport_of(users).raw_update(request_of())


def test_the_user_must_be_in_the_request_and_have_examples() -> None:
    request = request_of()
    with pytest.raises(InvalidValueError, match="not in the request"):
        transport_of(one_user()).raw_update(replace(request, users=np.array([HOSTED - 1])))
    with pytest.raises(InvalidValueError, match="no examples"):
        transport_of(one_user(0)).raw_update(request)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="unknown metric"):
        transport_of(one_user()).raw_update(request_of(metrics=(Metric("shoe size"),)))
