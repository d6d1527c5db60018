"""A small federation without training, for the tests of this folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedpriv.ledger.events import PrivacyBudget, RoundEvent
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS
from fedpriv.privacy.layout import Layout, Tensors, flat
from fedpriv.privacy.round import PartialSum, PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining, RoundRequest, Transport

LAYOUT = Layout(("w", "b"), ((2, 2), (3,)))
PARAMETERS = {"w": np.ones((2, 2), np.float32), "b": np.zeros(3, np.float32)}


@dataclass(frozen=True)
class FakeTransport(Transport):
    """Each user is a node, and its update what a function says; if it raises, the user failed."""

    update_of: Callable[[RoundRequest, int], Tensors]
    weight_of: Callable[[int], int] = lambda _: 1

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        for user in request.users.tolist():
            try:
                update = dict(self.update_of(request, user))
                if CONTRIBUTORS in request.metrics:
                    update[CONTRIBUTORS.tensor] = np.ones(())
            except Exception:  # a failing user counts as zero, whatever the failure
                continue
            weight = self.weight_of(user)
            contribution = request.clipping.contribution(update, weight)
            yield PartialSum(f"user {user}", 1, contribution, weight)


def make_plan(**changes: object) -> TrainingPlan:
    plan = TrainingPlan(
        run="run",
        population="people",
        rounds=5,
        layout=LAYOUT,
        groups=flat(LAYOUT, 1.0),
        noise_shares=(1.0,),
        noise_multiplier=1.0,
        sampling=PoissonSampling(20, 0.5),
        local=LocalTraining(0.1, steps=1),
    )
    return replace(plan, **changes)


def rounds_spent(events: Sequence[RoundEvent], delta: float) -> float:
    """A price that is easy to follow: one per round."""
    del delta
    return float(sum(event.count for event in events))


@contextmanager
def open_records(
    folder: Path, limit: float = 1e9, population: str = "people"
) -> Iterator[PrivacyRecords]:
    with (
        Ledger.open_or_create(folder / "ledger.sqlite", population) as ledger,
        ParticipationRecord.open_or_create(folder / "participation.sqlite") as record,
    ):
        yield PrivacyRecords(ledger, record, PrivacyBudget(limit, 1e-5, rounds_spent))


def constant_update(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    """Each user sends a tenth of its position in every component of b."""
    del request
    return {"w": np.zeros((2, 2), np.float32), "b": np.full(3, user / 100.0, np.float32)}


CONSTANT = FakeTransport(constant_update)
