"""The plan of a training run: everything that decides its result and its guarantee."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedpriv.errors import InvalidValueError
from fedpriv.federated.optimizers import FedAvg, ServerOptimizer
from fedpriv.federated.transport import LocalTraining
from fedpriv.privacy.allocation import noise_stddevs
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.mechanism import PoissonGaussianMechanism
from fedpriv.privacy.query import GaussianSumQuery
from fedpriv.privacy.sampling import PoissonSampling


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, on whom, for how long and under which mechanism.

    Attributes:
        run: name of the run in the ledger.
        population: name of the enrolled population, as in the ledger.
        rounds: T ≥ 1.
        layout: tensors that are trained.
        groups: how each user's update is clipped; a partition of the layout.
        noise_shares: ω_g > 0 of each group, summing to 1.
        noise_multiplier: z ≥ 0 of the whole round.
        sampling: who is enrolled and how a cohort is drawn.
        local: how each user trains.
        optimizer: how the server steps.
        description: whatever else decides the result (model, data, loss, initial parameters), in
            words or as a digest; it binds checkpoints to the plan.

    Raises:
        InvalidValueError: a field is out of range or fields do not fit together.
    """

    run: str
    population: str
    rounds: int
    layout: Layout
    groups: tuple[VectorGroup, ...]
    noise_shares: tuple[float, ...]
    noise_multiplier: float
    sampling: PoissonSampling
    local: LocalTraining
    optimizer: ServerOptimizer = FedAvg()  # noqa: RUF009 - frozen, so sharing it is safe
    description: str = ""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidValueError(f"rounds is {self.rounds}; it must be at least 1")
        if not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a name without '/'")
        _ = self.mechanism  # groups, shares and sampling that do not fit are refused here

    @cached_property
    def mechanism(self) -> PoissonGaussianMechanism:
        """The mechanism of every round."""
        stddevs = noise_stddevs(self.groups, self.noise_multiplier, self.noise_shares)
        query = GaussianSumQuery(self.layout, self.groups, stddevs)
        return PoissonGaussianMechanism.of(self.sampling, query)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan; equal plans have equal digests."""
        text = json.dumps(self._as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _as_json(self) -> Mapping[str, object]:
        optimizer = type(self.optimizer).__name__
        return {**dataclasses.asdict(self), "optimizer_class": optimizer}
