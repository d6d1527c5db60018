"""What only simulations may know: true, asked for, and never on the way to a server."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.measuring import SimulationOnlyDiagnostics
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import alone, users_of

SIZES = [5, 0, 1, 12, 5, 1, 30, 12]
BROKEN, RAISING = 4, 7
GOOD = [user for user, size in enumerate(SIZES) if size and user not in (BROKEN, RAISING)]
LOSS = metric("loss", bound=1.6)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def make_transport(memory: int = 20_000) -> tuple[InProcessTransport, list]:
    users = users_of(SIZES, scale=4.0)
    users.fields["x"][users.rows_of(BROKEN)] = np.nan
    users.fields["y"][users.rows_of(RAISING)] = 99
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    seen: list[SimulationOnlyDiagnostics] = []
    task = Task(model, cross_entropy)
    return InProcessTransport(task, users, torch.device("cpu"), memory, None, seen.append), seen


def make_request(transport: InProcessTransport, clipping_norm: float) -> RoundRequest:
    parameters = transport.task.parameters()
    layout = Layout.of(parameters)
    clipping = Clipping(
        Layout((*layout.names, LOSS.tensor), (*layout.shapes, ())),
        (*flat(layout, clipping_norm), LOSS.group),
    )
    local, users = LocalTraining(0.1, batch_size=4, steps=3), np.arange(len(SIZES))
    return RoundRequest("run", 3, 1, parameters, clipping, local, users, bytes(32), (LOSS,))


def test_figures_are_true() -> None:
    transport, seen = make_transport()
    request = make_request(transport, 8.0)
    lengths, losses, by_layer = [], [], {"0": [], "3": []}
    model = transport.task.evaluated().model
    for user in GOOD:
        data = transport.users.examples_of(user)
        x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
        losses.append(float(functional.cross_entropy(model(x).detach().double(), y)))
    for user in GOOD:
        sent = request.clipping.in_units(alone(transport, request, user))
        lengths.append(float(np.linalg.norm(sent[:-1])))
        parts = request.clipping.layout.unflatten(sent)
        for layer, norms in by_layer.items():
            both = (parts[f"{layer}.weight"].ravel(), parts[f"{layer}.bias"])
            norms.append(float(np.linalg.norm(np.concatenate(both))))
    seen.clear()
    norm = float(np.median(lengths)) * 1.001
    list(transport.collect(make_request(transport, norm)))
    (diagnostics,) = seen
    assert (diagnostics.round, diagnostics.attempt) == (3, 1)
    assert diagnostics.simulation_only_cohort_size == len(SIZES)
    assert diagnostics.simulation_only_contributors == len(GOOD)
    assert diagnostics.simulation_only_train_loss == pytest.approx(np.mean(losses), rel=1e-5)
    clipped = diagnostics.simulation_only_clipped
    assert clipped["update"] == pytest.approx(np.mean(np.array(lengths) > norm))
    assert 0.0 < clipped["update"] < 1.0
    found = diagnostics.simulation_only_group_norms["update"]
    assert found == pytest.approx(np.mean(lengths), rel=1e-5)
    for layer, norms in by_layer.items():
        found = diagnostics.simulation_only_update_norms[layer]
        assert found == pytest.approx(np.mean(norms), rel=1e-5)
    # A loss cannot leave its ball, so it is never clipped; but it is bounded, and here it shows.
    assert clipped["metrics/loss"] == 0.0
    assert max(losses) > 1.6


def test_nobody_contributing_gives_nan() -> None:
    transport, seen = make_transport()
    request = make_request(transport, 1.0)
    for users in ([], [1], [RAISING], [BROKEN]):
        list(transport.collect(replace(request, users=np.array(users, np.int64))))
        diagnostics = seen.pop()
        assert diagnostics.simulation_only_cohort_size == len(users)
        assert diagnostics.simulation_only_contributors == 0
        assert math.isnan(diagnostics.simulation_only_train_loss)
        for averages in (
            diagnostics.simulation_only_clipped,
            diagnostics.simulation_only_group_norms,
            diagnostics.simulation_only_update_norms,
        ):
            assert averages
            assert all(math.isnan(average) for average in averages.values())


@pytest.mark.parametrize("memory", [1, 20_000, 10**6])
def test_looking_changes_nothing(memory: int) -> None:
    transport, seen = make_transport(memory)
    blind = replace(transport, observer=None)
    request = make_request(transport, 0.1)
    for mine, theirs in zip(transport.collect(request), blind.collect(request), strict=True):
        np.testing.assert_array_equal(mine.total, theirs.total)
        assert (mine.users, mine.weight, mine.node) == (theirs.users, theirs.weight, theirs.node)
    assert len(seen) == 1


def test_diagnostics_have_no_place_in_what_is_sent() -> None:
    # The fields of a partial sum are these; a new one must be a query of the round.
    assert [f.name for f in dataclasses.fields(PartialSum)] == ["node", "users", "total", "weight"]
    private = [f.name for f in dataclasses.fields(SimulationOnlyDiagnostics)]
    assert all(name in ("round", "attempt") or "simulation_only" in name for name in private)


def test_indicators_are_not_among_the_groups() -> None:
    transport, seen = make_transport()
    request = make_request(transport, 1.0)
    indicator = Indicator.of(request.clipping.groups[:1])
    layout = request.clipping.layout
    layout = Layout((*layout.names, indicator.tensor), (*layout.shapes, (1,)))
    groups = (*request.clipping.groups, indicator.group)
    list(transport.collect(replace(request, clipping=Clipping(layout, groups, indicator))))
    assert set(seen[0].simulation_only_clipped) == {"update", "metrics/loss"}
    assert set(seen[0].simulation_only_group_norms) == {"update", "metrics/loss"}
    assert set(seen[0].simulation_only_update_norms) == {"0", "3"}
