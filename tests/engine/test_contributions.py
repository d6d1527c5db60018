"""Weights and indicators through the transport: what each user adds is `Clipping.contribution`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.engine.metrics import metric
from fedpriv.engine.transport import InProcessTransport
from fedpriv.federated.aggregate import add_up
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import flat
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.weights import Averaging, Weighting
from tests.engine.everyone import assert_close, make_task, request_to_all, users_of

SIZES = [5, 0, 1, 12, 7, 3, 30, 2]
BROKEN, RAISING = 4, 7
CAP = 6


def make_transport() -> InProcessTransport:
    """Over users of whom one has NaN for data and another a class that does not exist."""
    users = users_of(SIZES)
    users.fields["x"][users.rows_of(BROKEN)] = np.nan
    users.fields["y"][users.rows_of(RAISING)] = 99
    return InProcessTransport(make_task(), users, torch.device("cpu"), 20_000)


def request_of(strategy: str, averaging: Averaging, *, metrics: bool) -> RoundRequest:
    asked = (metric("accuracy"), metric("examples", cap=10)) if metrics else ()
    local = LocalTraining(0.1, batch_size=4, steps=3)
    return request_to_all(len(SIZES), local, strategy, asked, averaging, norm=0.25)


def alone(transport: InProcessTransport, request: RoundRequest, user: int) -> np.ndarray:
    one = replace(request, users=np.array([user]))
    return add_up(transport.collect(one), one.clipping, 1).total


def unclipped_update(
    transport: InProcessTransport, request: RoundRequest, user: int
) -> dict[str, np.ndarray]:
    layout = Layout.of(request.parameters)
    plain = replace(request, clipping=Clipping(layout, flat(layout, 1e9)), metrics=())
    update = layout.unflatten(alone(transport, plain, user))
    return {name: tensor.astype(np.float32) for name, tensor in update.items()}


AVERAGINGS = {
    "equal": Averaging(),
    "by examples": Averaging(Weighting(CAP), 30.0),
    "floored": Averaging(Weighting(CAP), 30.0, 0.5),
}


@pytest.mark.parametrize("averaging", sorted(AVERAGINGS))
@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
def test_each_user_adds_its_contribution(strategy: str, averaging: str) -> None:
    transport = make_transport()
    request = request_of(strategy, AVERAGINGS[averaging], metrics=False)
    assert bool(request.clipping.weighted) == (averaging != "equal")
    total, clipped = np.zeros(request.clipping.layout.dimension), set()
    for user, size in enumerate(SIZES):
        contribution = alone(transport, request, user)
        if size == 0 or user in (BROKEN, RAISING):
            np.testing.assert_array_equal(contribution, 0.0)
            continue
        weight = min(size, CAP) / CAP if averaging != "equal" else 1.0
        update = unclipped_update(transport, request, user)
        expected = request.clipping.contribution(update, weight)
        assert_close(contribution, expected)
        clipped |= set(contribution[-len(request.clipping.indicator.groups) :])
        total += expected
    assert clipped == {-0.5, 0.5}
    together = add_up(transport.collect(request), request.clipping, len(SIZES)).total
    np.testing.assert_allclose(together, total, atol=1e-6)


def test_metrics_and_indicator_are_not_weighted() -> None:
    transport = make_transport()
    equal, weighted = (
        request_of("flat", AVERAGINGS[name], metrics=True) for name in ("equal", "by examples")
    )
    user = SIZES.index(1)
    one, lighter = (
        request.clipping.layout.unflatten(alone(transport, request, user))
        for request in (equal, weighted)
    )
    for name, tensor in one.items():
        share = 1.0 / CAP if name in equal.parameters else 1.0
        assert np.any(tensor)
        assert_close(lighter[name], tensor * share, 1e-7)


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        ("equal", sum(size > 0 for size in SIZES) - 1),
        ("by examples", sum(min(size, CAP) for size in SIZES[:RAISING]) / CAP),
    ],
)
def test_partial_sums_carry_the_weight_of_their_users(averaging: str, expected: float) -> None:
    # Users without examples, and those that raise, are in no partial sum.
    request = request_of("flat", AVERAGINGS[averaging], metrics=False)
    partials = list(make_transport().collect(request))
    assert all(0.0 <= partial.weight <= partial.users for partial in partials)
    assert sum(partial.users for partial in partials) == sum(size > 0 for size in SIZES) - 1
    assert add_up(partials, request.clipping, len(SIZES)).weight == pytest.approx(expected)
