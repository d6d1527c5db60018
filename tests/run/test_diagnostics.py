"""Figures of a simulated round: true, and no part of what the round is made of."""

import errno
import math

import numpy as np
import pytest

from fedpriv.experiment.build import simulated
from fedpriv.experiment.config import parse_config
from fedpriv.run.simulate import ObservedTransport
from tests.opening import open_round
from tests.studies.studying import BASE

MODEL = {"name": "mlp", "options": {"inputs": 4, "hidden": 5, "classes": 3}}
CLIPPINGS = [
    {"norm": 0.3},
    {"norm": 0.3, "strategy": "per-layer", "parts": "tensor"},
    {"norm": 0.3, "strategy": "joint"},
    {"norm": 0.3, "strategy": "joint", "adaptive": {}},
]


def test_figures_wait_for_room_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, transport = simulated(
        parse_config(BASE | {"model": MODEL, "seed": 1}, "test"), "run"
    )
    request = open_round(experiment.plan, experiment.initial_state, 0, experiment.entropy)
    told: list[object] = []

    def tell(row: object) -> None:
        told.append(row)
        if len(told) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("time.sleep", lambda _: None)
    assert list(ObservedTransport(transport, experiment.plan, tell).collect(request))
    assert told == [told[0]] * 2


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("averaging", [{}, {"floor": 0.5}], ids=str)
def test_signal_and_noise_are_those_of_the_layers(
    clipping: dict[str, object], averaging: dict[str, float]
) -> None:
    more = {"model": MODEL, "clipping": clipping, "averaging": averaging, "seed": 1}
    experiment, transport = simulated(parse_config(BASE | more, "test"), "run")
    state = experiment.initial_state
    request = open_round(experiment.plan, state, 0, experiment.entropy)
    rows: list[dict[str, object]] = []
    looking = ObservedTransport(transport, experiment.plan, rows.append)
    partials = list(looking.collect(request))
    for mine, theirs in zip(partials, transport.collect(request), strict=True):
        np.testing.assert_array_equal(mine.total, theirs.total)
    (row,) = rows
    assert all(name in ("round", "attempt") or name.startswith("simulation_only") for name in row)
    # A release is the average of the sum and of the noise alike, so their ratio is that of sums,
    # tensor by tensor, each in units of its scale.
    clipping = request.clipping
    total = clipping.layout.unflatten(clipping.in_units(sum(partial.total for partial in partials)))
    stddevs = {
        e.group: e.noise_stddev
        for e in experiment.plan.mechanism_at(state.clipping_norms).event.queries
    }
    for layer in ("1", "3"):
        signal, noise = 0.0, 0.0
        for group in request.clipping.groups:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                if tensor.startswith(f"{layer}."):
                    signal += float(np.sum(total[tensor] ** 2))
                    noise += total[tensor].size * (scale * stddevs[group.name]) ** 2
        found = row["simulation_only_signal_to_noise"]
        assert found[layer] == pytest.approx(math.sqrt(signal / noise), rel=1e-9)
