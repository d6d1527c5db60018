"""Runs under every sampling policy: nodes over TLS that verify each offer, as in one process."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from fedpriv import wire
from fedpriv.accounting.accountants import accountant_named
from fedpriv.clients.connection import Backoff, FederationStub, identity_of
from fedpriv.clients.consent import Consent
from fedpriv.clients.journal import Journal
from fedpriv.clients.ledger_check import LedgerVerifier, OfferPolicy
from fedpriv.errors import LedgerError, StoppedError
from fedpriv.ledger import Head
from fedpriv.ledger.events import NeighbouringRelation, PrivacyBudget, Randomness
from fedpriv.ledger.ledger import ChargedRow, Ledger
from fedpriv.privacy.correlated_noise import BandedStrategy
from fedpriv.privacy.gaussian_mechanism import INDEPENDENT
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PartialSum, PrivacyRecords
from fedpriv.privacy.sampling import (
    BandedPoissonSampling,
    EveryUserSampling,
    FixedSizeSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    SeparatedSampling,
)
from fedpriv.server.deployment import GrpcTransport, prices
from fedpriv.training.local import SGD
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import RoundRequest, Transport
from fedpriv.training.rounds import ServerState, Stop, initial_state, train
from fedpriv.wire import federation_pb2 as pb
from tests.server.loopback import PATIENCE, POPULATION_ID, Answering, Site, clipped, nodes, site
from tests.training.federation import PARAMETERS, FakeTransport, constant_update, make_plan

USERS = {"silo": [str(user) for user in range(6)], "one": ["6"], "two": ["7", "8"]}
N, ROUNDS, STOPPED_IN, DELTA = 9, 7, 5, 1e-2
BUDGET = PrivacyBudget(1e9, DELTA, accountant_named("tight").upper_epsilon)
POLICIES: dict[str, Sampling] = {
    "poisson": PoissonSampling(N, 0.5),
    "random allocation": RandomAllocationSampling(N, 3),
    "twice in a pass": RandomAllocationSampling(N, 3, 2),
    "fixed size": FixedSizeSampling(N, 4),
    "everybody": EveryUserSampling(N, NeighbouringRelation.REPLACE_ONE),
    "separated": SeparatedSampling(N, 4, 2),
    "within bands": BandedPoissonSampling(N, 4, 2, 0.5),
}
CORRELATED = ("separated", "within bands")


@dataclass(frozen=True)
class Biased(RandomAllocationSampling):
    """Has the first user in all rounds of a pass, and says that it is in one."""

    def draw(self, key: bytes) -> tuple[np.ndarray, ...]:
        return tuple(np.union1d(users, [0]) for users in super().draw(key))


@dataclass(frozen=True)
class Stopping(Transport):
    """Another transport, which is stopped once: when a round was collected."""

    inner: Transport

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        yield from self.inner.collect(request)
        if (request.round, request.attempt) == (STOPPED_IN, 0):
            raise StoppedError("the server was asked to stop")


@dataclass
class Told:
    """What users were asked, by round and attempt, and why nodes objected."""

    cohorts: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    objections: list[str | None] = field(default_factory=list)

    def asked(self, request: RoundRequest | wire.RoundOffer, users: np.ndarray) -> None:
        at = request.id if isinstance(request, wire.RoundOffer) else request
        self.cohorts.setdefault((at.round, at.attempt), set()).update(users.tolist())


def in_process(told: Told) -> Transport:
    def update(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
        told.asked(request, np.array([user]))
        return constant_update(request, user)

    return FakeTransport(update)


@dataclass
class Run:
    """A run whose server is stopped in the middle, and started again."""

    folder: Path
    plan: TrainingPlan
    ledger: Ledger | None = None  # of the server that runs

    def __post_init__(self) -> None:
        self.state: ServerState = initial_state(self.plan, PARAMETERS)
        self.rows: list[ChargedRow] = []

    def since(self, head: Head | None) -> tuple[int, Iterator[str]] | None:
        """What nodes read of the ledger."""
        assert self.ledger is not None
        return self.ledger.since(head)

    def play(self, transport_of: Callable[[PrivacyRecords], Transport]) -> Stop:
        """What one process of the server does, until it ends."""
        files = self.folder / "ledger.sqlite", self.folder / "who.sqlite"
        with PrivacyRecords.open(*files, POPULATION_ID, BUDGET) as records:
            self.ledger = records.ledger
            transport = Stopping(transport_of(records))
            rounds = train(self.plan, self.state, transport, records, SeededEntropy(7))
            while True:
                try:
                    self.state, _ = next(rounds)
                except StopIteration as end:
                    self.rows = list(records.ledger.charges())
                    records.ledger.verify(records.participation)
                    return end.value


async def objection(made: Site, journal: Journal, node: str, offer: wire.RoundOffer) -> str | None:
    """What a node that was just started says to an offer."""
    stub = FederationStub.open(made.target, identity_of(made.certs / "nodes" / node, None))
    enrolled = made.enrolment.users_of(node).copy()
    welcome = wire.Welcome(POPULATION_ID, N, enrolled, wire.TaskDescription("m", {}, 0, "l"))
    try:
        verifier = LedgerVerifier(stub, journal, Backoff(0.01, 0.05))
        return await OfferPolicy(journal, Consent(), verifier, enrolled).objection(welcome, offer)
    finally:
        await stub.channel.close()


def auditing(made: Site, node: str, told: Told) -> Answering:
    """A node that reads the ledger before it answers."""

    def answer(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        told.asked(offer, offer.users)
        with Journal(made.certs / f"{node}.sqlite") as journal:
            told.objections.append(asyncio.run(objection(made, journal, node, offer)))
            journal.record(POPULATION_ID, offer, datetime.now(UTC))
        return clipped(offer, *(constant_update(request, user) for user in request.users.tolist()))

    return answer


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_on_nodes_that_audit_is_the_one_in_process_and_goes_on_with_what_it_paid_for(
    tmp_path: Path, policy: str
) -> None:
    plan = make_plan(
        rounds=ROUNDS,
        population=POPULATION_ID,
        sampling=POLICIES[policy],
        local=SGD(0.1, steps=1, max_examples=1),
        strategy=BandedStrategy((1.0, 0.5)) if policy in CORRELATED else INDEPENDENT,
    )
    (tmp_path / "here").mkdir()
    here, there = Run(tmp_path / "here", plan), Run(tmp_path, plan)
    simulated, deployed = Told(), Told()
    for stop in (Stop.ASKED, Stop.ROUNDS):
        assert here.play(lambda _: in_process(simulated)) is stop
    with site(tmp_path, USERS, ledger=there.since) as made:
        patience = PATIENCE.model_copy(update={"least_nodes": len(USERS)})

        def over_grpc(records: PrivacyRecords) -> Transport:
            return GrpcTransport(
                made.server, prices(plan, records, Randomness.OPERATING_SYSTEM), patience
            )

        with nodes(made, {node: auditing(made, node, deployed) for node in USERS}):
            for stop in (Stop.ASKED, Stop.ROUNDS):
                assert there.play(over_grpc) is stop
    assert deployed.cohorts == simulated.cohorts
    assert set(deployed.objections) == {None}
    for name, tensor in here.state.parameters.items():
        np.testing.assert_array_equal(there.state.parameters[name], tensor)
        assert tensor.any()
    span = plan.sampling.rounds
    for run in (here, there):
        attempts = {STOPPED_IN: 2}
        assert [(row.round, row.attempt) for row in run.rows] == [
            (number, attempt)
            for number in range(1, ROUNDS + 1)
            for attempt in range(attempts.get(number, 1))
        ]
        assert [row.part for row in run.rows] == [at % span for at in range(ROUNDS + 1)]
        assert sum(row.pays for row in run.rows) == -(-(ROUNDS + 1) // span)


def test_who_asks_a_user_more_often_than_is_charged_is_refused_by_its_node(tmp_path: Path) -> None:
    plan = make_plan(
        rounds=3,
        population=POPULATION_ID,
        sampling=Biased(N, 3),
        local=SGD(0.1, steps=1, max_examples=1),
    )
    run, told = Run(tmp_path, plan), Told()
    with (
        site(tmp_path, USERS, ledger=run.since) as made,
        nodes(made, {node: auditing(made, node, told) for node in USERS}),
    ):
        patience = PATIENCE.model_copy(update={"least_nodes": len(USERS)})
        # Whoever has the record of who took part sees it too.
        with pytest.raises(LedgerError, match="a user in its cohort is in more than 1 of 3 rounds"):
            run.play(
                lambda records: GrpcTransport(
                    made.server, prices(plan, records, Randomness.OPERATING_SYSTEM), patience
                )
            )
    # The node of that user sees it in the second round and in the third; the others see nothing.
    said = "users would take part more often, or sooner again, than the event says"
    assert [each for each in told.objections if each is not None] == [said, said]
