"""Figures of a simulated round that are not private, beside what the round releases."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from fedpriv.engine.metrics import SimulationOnlyDiagnostics
from fedpriv.engine.transport import InProcessTransport
from fedpriv.privacy.clipping import IntegerVector
from fedpriv.privacy.layout import Layout, layers
from fedpriv.privacy.round import PartialSum, RoundRequest, Transport
from fedpriv.training.plan import TrainingPlan

Row = Mapping[str, object]


@dataclass(frozen=True)
class Watched(Transport):
    """A transport of a simulation that tells what nobody may know of real users.

    What it yields is what the transport within yields.

    Attributes:
        inner: trains the users; from `watched`.
        plan: the plan of the run.
        seen: diagnostics of the round that was collected last.
        tell: is given a row for each round, whose figures are named simulation_only.
    """

    inner: InProcessTransport
    plan: TrainingPlan
    seen: list[SimulationOnlyDiagnostics]
    tell: Callable[[Row], None]

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of a round, and then tell of it."""
        total = np.zeros(request.clipping.layout.dimension, np.int64)
        for partial in self.inner.collect(request):
            total += partial.total
            yield partial
        ratios = signal_to_noise(self.plan, request, total)
        self.tell(asdict(self.seen.pop()) | {"simulation_only_signal_to_noise": ratios})


def watched(
    transport: InProcessTransport, plan: TrainingPlan, tell: Callable[[Row], None]
) -> Watched:
    """A transport that also tells `tell` of each round."""
    seen: list[SimulationOnlyDiagnostics] = []
    return Watched(replace(transport, observer=seen.append), plan, seen, tell)


def signal_to_noise(
    plan: TrainingPlan, request: RoundRequest, total: IntegerVector
) -> dict[str, float]:
    """Norm of the sum of clipped updates over the root mean square norm of its noise, by layer.

    Both are in the model's units, so that it is the same question under every way to clip.

    Args:
        plan: the plan of the run.
        request: of the round.
        total: [D] sum of the cohort's contributions, in steps.
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
