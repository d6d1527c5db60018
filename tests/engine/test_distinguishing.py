"""What somebody who sees releases can tell of a user: no more than the ledger says, end to end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from fedpriv.accounting.accountants import delta
from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.ledger.events import RoundEvent
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PartialSum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from fedpriv.training.rounds import initial_state, train
from tests.training.federation import open_records

CLASSES, OTHERS, NORM = 30, 100, 1e-3
RUNS = 60  # with the user, and as many without
WRONGLY = 1e-8  # probability with which an honest system fails here, for each number compared


def users_of(*, there: bool) -> UserStore:
    """100 users with one image under every label, and the data of one more, or nothing of it."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.random((1, 784), np.float32), CLASSES, 0)
    x[0] *= 0.99
    data = [(x, np.arange(CLASSES))] * OTHERS
    more = rng.random((38, 784), np.float32), rng.integers(0, CLASSES, 38)
    data.append(more if there else (more[0][:0], more[1][:0]))
    fields = {name: np.concatenate([d[i] for d in data]) for i, name in enumerate(("x", "y"))}
    return UserStore(fields, np.cumsum([0, *(len(y) for _, y in data)]))


def task_of() -> Task:
    model = nn.Linear(784, CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Task(model, cross_entropy)


def plan_of(task: Task, probability: float) -> TrainingPlan:
    layout = Layout.of(task.parameters())
    return TrainingPlan(
        run="run",
        population="people",
        rounds=1,
        layout=layout,
        groups=flat(layout, NORM),
        noise_shares=(1.0,),
        noise_multiplier=1.5,
        sampling=PoissonSampling(OTHERS + 1, probability),
        local=LocalTraining(1.0, epochs=1),
    )


@dataclass(frozen=True)
class Observed:
    """What is seen of many runs: a number of each, larger where the user seems to be there."""

    there: np.ndarray
    absent: np.ndarray
    events: tuple[RoundEvent, ...]

    def assert_no_better_than_the_ledger(self) -> None:
        """P(T > t | there) − e^ε P(T > t | absent) ≤ δ(ε), and so the other way round."""
        for epsilon in (0.0, 0.5, 1.0):
            allowed = delta(self.events, epsilon)
            for level in np.linspace(0.02, 0.98, 49):
                threshold = np.quantile(np.concatenate([self.there, self.absent]), level)
                one, other = (bounds(seen > threshold) for seen in (self.there, self.absent))
                assert one.low - exp(epsilon) * other.high <= allowed
                assert (1 - other.high) - exp(epsilon) * (1 - one.low) <= allowed


def bounds(happened: np.ndarray) -> object:
    """Of a probability, from how often it happened (Clopper & Pearson 1934)."""
    return binomtest(int(happened.sum()), len(happened)).proportion_ci(1.0 - WRONGLY, "exact")


def observed(
    folder: Path, probability: float, wrapped: Callable[[Transport, bool], Transport]
) -> Observed:
    """Run one round many times, on each population, and look along what one user moves."""
    task = task_of()
    plan = plan_of(task, probability)
    begun = initial_state(plan, task.parameters())
    transports = {
        there: wrapped(
            InProcessTransport(task, users_of(there=there), CPU, 2**27, processes=1), there
        )
        for there in (True, False)
    }
    # Whoever looks knows everything but whether the user is there, so also what that would change.
    everyone = RoundRequest(
        "run",
        0,
        0,
        task.parameters(),
        plan.mechanism.clipping,
        plan.local,
        np.arange(OTHERS + 1),
        bytes(32),
    )
    with_it, without = (
        sum(p.total for p in transports[there].collect(everyone)) for there in (True, False)
    )
    direction = (with_it - without).astype(np.float64)
    seen: dict[bool, list[float]] = {True: [], False: []}
    events: list[RoundEvent] = []
    for there, transport in transports.items():
        for number in range(RUNS):
            where = folder / f"{there}-{number}"
            where.mkdir()
            with open_records(where) as books:
                entropy = SeededEntropy(2 * number + there)
                ((after, _),) = train(plan, begun, transport, books, entropy)
                events = [row.event for row in books.ledger.charges()]
            moved = {n: p - begun.parameters[n] for n, p in after.parameters.items()}
            seen[there].append(float(plan.layout.flatten(moved) @ direction))
    return Observed(np.array(seen[True]), np.array(seen[False]), tuple(events))


CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("probability", [1.0, 0.2])
def test_nobody_tells_populations_apart_better_than_the_ledger_says(
    probability: float, tmp_path: Path
) -> None:
    found = observed(tmp_path, probability, lambda transport, _there: transport)
    found.assert_no_better_than_the_ledger()
    if probability == 1.0:
        # It is told what may be told: else this test would find nothing.
        assert found.there.mean() - found.absent.mean() > 0.5 * found.absent.std() / 1.5


@dataclass(frozen=True)
class Leaking(Transport):
    """Scales others' contributions down to half where the user is there, as a chunk once did."""

    transport: Transport
    there: bool

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        for partial in self.transport.collect(request):
            leaking = self.there and partial.users > 1
            total = partial.total // 2 if leaking else partial.total
            yield replace(partial, total=total)


@pytest.mark.slow
def test_a_planted_leak_is_told(tmp_path: Path) -> None:
    found = observed(tmp_path, 0.2, Leaking)
    with pytest.raises(AssertionError):
        found.assert_no_better_than_the_ledger()
