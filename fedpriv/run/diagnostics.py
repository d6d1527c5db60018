"""Figures of a simulated round that are not private, beside what the round releases."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

import numpy as np

from fedpriv.engine.metrics import SimulationOnlyDiagnostics
from fedpriv.engine.transport import InProcessTransport
from fedpriv.privacy.clipping import IntegerVector
from fedpriv.privacy.layout import Layout, layers
from fedpriv.privacy.round import PartialSum, RoundRequest, Transport
from fedpriv.training.plan import TrainingPlan


class ObservedTransport(Transport):
    """A transport of a simulation that also reports figures nobody may know about real users.

    It yields what the wrapped transport yields, and calls `tell` with a row for each round, whose
    figures are named simulation_only.
    """

    def __init__(
        self,
        transport: InProcessTransport,
        plan: TrainingPlan,
        tell: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._diagnosed: list[SimulationOnlyDiagnostics] = []
        self._transport = replace(transport, observer=self._diagnosed.append)
        self._plan, self._tell = plan, tell

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of a round, then report its figures."""
        total = np.zeros(request.clipping.layout.dimension, np.int64)
        for partial in self._transport.collect(request):
            total += partial.total
            yield partial
        ratios = signal_to_noise(self._plan, request, total)
        self._tell(asdict(self._diagnosed.pop()) | {"simulation_only_signal_to_noise": ratios})


def signal_to_noise(
    plan: TrainingPlan, request: RoundRequest, total: IntegerVector
) -> dict[str, float]:
    """Norm of the sum of clipped updates over the root mean square norm of its noise, by layer.

    Both are in the model's units, so that it is the same question under every way to clip. `total`
    is the [D] sum of the cohort's contributions, in steps.
    """
    norms = [group.clipping_norm for group in request.clipping.groups[: len(plan.groups)]]
    query = plan.mechanism_at(tuple(norms)).query
    clipping = query.clipping
    average = total * clipping.steps / clipping.spread(query.divisors)
    signal, stddevs = clipping.layout.unflatten(average), query.tensor_stddevs
    ratios = {}
    for layer, tensors in layers(Layout.of(request.parameters)).items():
        energy = math.fsum(signal[name].size * stddevs[name] ** 2 for name in tensors)
        power = math.fsum(float(np.square(signal[name]).sum()) for name in tensors)
        ratios[layer] = math.sqrt(power / energy) if energy else math.inf
    return ratios
