"""Nodes that verify a real ledger over TLS: what travels, and what two runs may do to it."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.accountants import epsilon
from fedpriv.clients.connection import Backoff, FederationStub, identity_of
from fedpriv.clients.journal import Journal
from fedpriv.clients.ledger_check import Examined, LedgerVerifier, charged_already
from fedpriv.errors import UntrustedLedgerError
from fedpriv.ledger.events import PrivacyBudget, Randomness
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import Head
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.server.deployment import prices
from fedpriv.training.rounds import initial_state
from fedpriv.wire import RoundId, RoundOffer, TaskDescription, Welcome
from tests.opening import open_round
from tests.server.loopback import Site, site
from tests.training.federation import PARAMETERS, make_plan
from tests.wire.examples import small_offer

DELTA = 1e-5
BUDGET = PrivacyBudget(1e9, DELTA, lambda events, delta: epsilon(events, delta).epsilon)
PLANS = {run: make_plan(run=run) for run in ("one", "two")}
PLAN = PLANS["one"]
TASK = TaskDescription("m", {}, 0, "cross-entropy")
WELCOME = Welcome(PLAN.population, PLAN.sampling.population, np.array([1]), TASK)


class Shared:
    """A ledger that two runs charge; `asked` are the heads that nodes said they know."""

    def __init__(self, records: PrivacyRecords) -> None:
        self.records, self.ledger = records, records.ledger
        self.asked: list[Head | None] = []
        self.sent: list[int] = []

    def since(self, head: Head | None) -> tuple[int, Iterator[str]] | None:
        self.asked.append(head)
        found = self.ledger.since(head)
        self.sent.append(found[0] if found else 0)
        return found

    def offer(self, run: str, number: int) -> RoundOffer:
        plan = PLANS[run]
        request = open_round(plan, initial_state(plan, PARAMETERS), 0, OperatingSystemEntropy())
        price = prices(plan, self.records, Randomness.OPERATING_SYSTEM)(request)
        at = RoundId(run, number, 0)
        return replace(small_offer(), id=at, price=price, users=np.array([1]))

    def charge(self, run: str, number: int) -> None:
        event = PLANS[run].mechanism.event
        proposed = ProposedCharge(run, number, 0, Randomness.OPERATING_SYSTEM, event, "0" * 64)
        self.records.ledger.charge(proposed)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    files = tmp_path / "ledger.sqlite", tmp_path / "who"
    with PrivacyRecords.open(*files, PLAN.population, BUDGET) as records:
        yield Shared(records)


@pytest.fixture
def running(tmp_path: Path, shared: Shared) -> Iterator[Site]:
    with site(tmp_path, {"node": ["a"]}, ledger=shared.since) as made:
        yield made


@contextmanager
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal") as opened:
        yield opened


class Node:
    """A node of its own process, as far as it verifies the ledger."""

    def __init__(self, running: Site, book: Journal) -> None:
        self._identity = identity_of(running.certs / "nodes" / "node", None)
        self._target, self._book = running.target, book
        self._verifier: LedgerVerifier | None = None

    async def __aenter__(self) -> "Node":
        self._stub = FederationStub.open(self._target, self._identity)
        self._verifier = LedgerVerifier(self._stub, self._book, Backoff(0.01, 0.05))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stub.channel.close()

    async def examine(self, offer: RoundOffer | None = None) -> Examined:
        assert self._verifier is not None
        return await self._verifier.examined(WELCOME, DELTA, offer)


def test_two_runs_that_share_a_ledger_are_believed_by_nodes_of_both(
    tmp_path: Path, shared: Shared, running: Site
) -> None:
    async def act(book: Journal) -> None:
        async with Node(running, book) as first, Node(running, book) as second:
            for number in range(3):
                one = shared.offer("one", number)
                two = shared.offer("two", number)
                # The node of run two has read the ledger after the charge of run one, and before.
                await second.examine(two)
                book.record(PLAN.population, one, datetime.now(UTC))
                shared.charge("one", number)
                found = await second.examine(two)
                assert charged_already(found, two) is None
                shared.charge("two", number)
                late = await first.examine(one)
                assert charged_already(late, one) is not None
                assert found.epsilon < late.epsilon

    with journal(tmp_path) as book:
        asyncio.run(act(book))


def test_only_what_is_new_travels(tmp_path: Path, shared: Shared, running: Site) -> None:
    async def act(book: Journal) -> None:
        async with Node(running, book) as node:
            for number in range(4):
                shared.charge("one", number)
                found = await node.examine(shared.offer("one", number + 1))
                assert found.ledger.head == shared.ledger.head
                assert (
                    found.epsilon == epsilon([PLAN.mechanism.event] * (number + 1), DELTA).epsilon
                )
        async with Node(running, book) as restarted:
            await restarted.examine()

    with journal(tmp_path) as book:
        asyncio.run(act(book))
        heads = [Head(row.position, row.hash) for row in shared.ledger.charges()]
    assert shared.asked == [None, *heads[:3], None]
    assert max(shared.sent[1:4]) < shared.sent[0] < shared.sent[4]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_ledger_that_was_set_back_is_not_believed(
    tmp_path: Path, shared: Shared, running: Site, restarted: bool
) -> None:
    shared.charge("one", 0)
    kept = shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "kept.sqlite")
    shared.charge("one", 1)

    async def act(book: Journal) -> None:
        async with Node(running, book) as node:
            await node.examine()
            with Ledger.open(kept) as shared.ledger:
                with pytest.raises(
                    UntrustedLedgerError, match="its former head of 2 charges with hash"
                ):
                    await node.examine()
                if restarted:
                    async with Node(running, book) as again:
                        with pytest.raises(
                            UntrustedLedgerError, match="its former head of 2 charges"
                        ):
                            await again.examine()
            shared.ledger = shared.records.ledger
            assert len((await node.examine()).ledger.rows) == 2

    with journal(tmp_path) as book:
        asyncio.run(act(book))
