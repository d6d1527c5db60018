"""Weights and indicators through the transport: what each user adds is `Clipping.contribution`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.engine.transport import InProcessTransport
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import UNCLIPPED
from fedpriv.privacy.gaussian_mechanism import Averaging
from fedpriv.privacy.round import add_up
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import alone, make_task, request_to_all, total_of, users_of

SIZES = [5, 0, 1, 12, 5, 1, 30, 12]
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


AVERAGINGS = {
    "equal": Averaging(),
    "by examples": Averaging(CAP, 30.0),
    "floored": Averaging(CAP, 30.0, 0.5),
}


def sent(transport: InProcessTransport, request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    """What one user learnt and measured, before it is clipped."""
    request = replace(request, users=np.array([user]))
    start = transport._trainer.begin(request)
    trainer, sizes = transport._trainer, transport.users.sizes[[user]]
    (chunk,) = transport.road(request).chunks(trainer, request.local, request.users, sizes)
    tensors = trainer.sent(request, start, chunk)
    return {name: tensor[:1][0].numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("averaging", sorted(AVERAGINGS))
@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
def test_each_user_adds_its_contribution(strategy: str, averaging: str) -> None:
    transport = make_transport()
    request = request_of(strategy, AVERAGINGS[averaging], metrics=True)
    clipping = request.clipping
    assert bool(clipping.weighted) == (averaging != "equal")
    total, clipped = np.zeros(clipping.layout.dimension, np.int64), set()
    for user, size in enumerate(SIZES):
        contribution = alone(transport, request, user)
        if size == 0 or user in (BROKEN, RAISING):
            np.testing.assert_array_equal(contribution, 0)
            continue
        weight = min(size, clipping.weight_cap)
        expected = clipping.contribution(sent(transport, request, user), weight)
        np.testing.assert_array_equal(contribution, expected)
        clipped |= {*clipping.layout.unflatten(clipping.in_units(contribution))[UNCLIPPED].tolist()}
        total += expected
    assert clipped == {-0.5, 0.5}
    np.testing.assert_array_equal(total_of(transport, request), total)


def test_metrics_and_indicator_are_not_weighted() -> None:
    transport = make_transport()
    equal, weighted = (
        request_of("flat", AVERAGINGS[name], metrics=True) for name in ("equal", "by examples")
    )
    user = SIZES.index(1)
    one, lighter = (
        request.clipping.layout.unflatten(
            request.clipping.in_units(alone(transport, request, user))
        )
        for request in (equal, weighted)
    )
    for name, tensor in one.items():
        share = 1.0 / CAP if name in equal.parameters else 1.0
        assert np.any(tensor)
        np.testing.assert_allclose(lighter[name], tensor * share, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("averaging", ["equal", "by examples"])
def test_partial_sums_carry_the_weight_of_their_users(averaging: str) -> None:
    # Users without examples, and those that raise, are in no partial sum.
    request = request_of("flat", AVERAGINGS[averaging], metrics=False)
    partials = list(make_transport().collect(request))
    assert sum(partial.users for partial in partials) == sum(size > 0 for size in SIZES) - 1
    found = add_up(partials, request.clipping, len(SIZES)).weight
    cap = CAP if averaging == "by examples" else 1
    assert found == sum(min(size, cap) for size in SIZES[:RAISING])
