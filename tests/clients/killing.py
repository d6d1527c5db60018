"""Rounds of secure sums in which nodes or the server are killed, with real journals and ledgers.

A process is killed at a point that it passes: before or after a statement of one of its files, a
call to the server, or a step of the server. From then on it writes nothing and says nothing, until
it begins anew with what its files hold.

    python -m tests.clients.killing 10000
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from fedpriv.accounting.accountants import accountant_named
from fedpriv.clients.secure import SecureSums
from fedpriv.errors import FedprivError
from fedpriv.ledger import Head
from fedpriv.ledger.database import Database
from fedpriv.ledger.events import PrivacyBudget, SecureSum
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import OpenedSum, PrivacyRecords, Release, RoundAttempt, secure_round
from fedpriv.secure_sums.parameters import Grid
from fedpriv.server.collection import Ballot, SecureCollection
from fedpriv.wire import Price, Vote
from tests.clients.secure_world import CLIPPING, SECONDS, Site, World, honest

SERVER, RECORDS = "server", "records"
VICTIMS = (SERVER, "n2", "")  # in turn
OF_A_FEDERATION = 150  # rounds, enough for each to be killed at each of its points
NODES = SecureSum(4, 1, 1)
BUDGET = PrivacyBudget(1e9, 1e-5, accountant_named("rdp").upper_epsilon)
CALLS = ("fetch_ledger", "download", "upload_masked", "exchange")
Result = TypeVar("Result")


class Killed(BaseException):
    """A process is no more."""


@dataclass
class Reaper:
    """Kills a process at one of the points that it passes."""

    victim: str = ""
    point: int = 0  # of the victim's in this round, from 1
    passed: Counter[str] = field(default_factory=Counter)
    dead: set[str] = field(default_factory=set)
    struck: bool = False  # whether the victim was killed in this round

    def begin(self, victim: str, point: int) -> None:
        """Another round, in which the victim is killed if it gets as far."""
        self.victim, self.point, self.passed, self.struck = victim, point, Counter(), False

    def at(self, process: str) -> None:
        """A process passes a point."""
        if process in self.dead:
            raise Killed
        self.passed[process] += 1
        if (process, self.passed[process]) == (self.victim, self.point):
            self.dead.add(process)
            self.struck = True
            raise Killed


@dataclass
class Federation:
    """Nodes and a server, which come back after they were killed."""

    folder: Path
    reaper: Reaper = field(default_factory=Reaper)
    released: dict[int, Release] = field(default_factory=dict)  # by round
    charged: dict[tuple[int, int], str] = field(default_factory=dict)  # hashes, by attempt
    # By node, round and attempt: the noised sum, and how often a masked one left the node.
    sums: dict[tuple[str, int, int], np.ndarray] = field(default_factory=dict)
    uploads: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    drops: dict[str, str] = field(default_factory=dict)  # why nodes left the last attempt

    def __post_init__(self) -> None:
        (self.folder / RECORDS).mkdir()
        self.world = World(
            self.folder,
            NODES.nodes,
            NODES,
            public=self._public,
            head=lambda: self.records.ledger.head,
        )
        for name in self.world.sites:
            self._watch(self.world.sites[name])
        self._stack = contextlib.ExitStack()
        self._open()

    def _open(self) -> None:
        """The server begins, with what its files hold."""
        here, name = self.folder / RECORDS, self.world.enrolment.population_id
        files = here / "ledger.sqlite", here / "participation.sqlite"
        records = PrivacyRecords.open(*files, name, BUDGET, resuming=bool(self.charged))
        self.records = self._stack.enter_context(records)

    def close(self) -> None:
        """Close all files."""
        self._stack.close()
        for site in self.world.sites.values():
            site.secure.policy.journal.__exit__()

    def revive(self) -> None:
        """Who was killed begins anew."""
        for name in sorted(self.reaper.dead):
            self.reaper.dead.discard(name)
            if name == SERVER:
                self._stack.close()
                self._open()
            else:
                self.world.sites[name].secure.policy.journal.__exit__()
                self.world.restarted(name)
                self._watch(self.world.sites[name])

    def _public(self, head: Head | None) -> Iterator[str]:
        """The lines of the ledger after a head."""
        found = self.records.ledger.since(head)
        assert found is not None
        return iter("".join(found[1]).splitlines(keepends=True))

    def _watch(self, site: Site) -> None:
        """A node passes a point before and after each call."""
        stub: Any = site.secure.server
        upload = stub.upload_masked

        def passing(call: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
            async def passed(*args: Any) -> object:
                self.reaper.at(site.name)
                if call is upload:
                    self.uploads[site.name, args[0].round, args[0].attempt] += 1
                result = await call(*args)
                self.reaper.at(site.name)
                return result

            return passed

        for name in CALLS:
            setattr(stub, name, passing(getattr(stub, name)))

    async def round(self, number: int) -> Release | None:
        """An attempt; None if it is void, or the server is killed in it."""
        loop, world = asyncio.get_running_loop(), self.world
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.drops = {}

        def waited(work: Coroutine[Any, Any, Result]) -> Result:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        def prepare(at: RoundAttempt) -> None:
            event, budget = world.mechanism.event, self.records.budget
            epsilon = self.records.ledger.epsilon(budget, event)
            count = self.records.ledger.head.count
            world.price = Price(event, 0, epsilon, budget.delta, count)
            self.reaper.at(SERVER)
            self.ballot = world.unvoted(at.round, at.attempt)
            waited(self._vote(self.ballot))

        def collect(at: RoundAttempt) -> Callable[[], OpenedSum | None]:
            collected = waited(self._collect())
            return lambda: waited(self._opened(collected, at))

        about = world.mechanism, "run", number
        try:
            release = await asyncio.to_thread(
                secure_round, *about, collect, self.records, OperatingSystemEntropy(), prepare
            )
            if release is not None:
                self.released[number] = release
            return release
        except Killed:
            for task in self.tasks.values():
                task.cancel()
            return None
        finally:
            if self.tasks:
                await asyncio.wait(self.tasks.values(), timeout=SECONDS)

    async def _vote(self, ballot: Ballot) -> None:
        """All nodes vote; who is killed meanwhile votes once it is back."""
        sent = replace(ballot.terms, id=ballot.id, head=ballot.head)
        for name in self.world.sites:
            try:
                key = await self._key(self.world.sites[name], sent)
            except Killed:
                self.revive()
                key = await self._key(self.world.sites[name], sent)
            ballot.count(name, Vote(ballot.id, "", replace(key, head=ballot.head)))

    async def _key(self, site: Site, sent: Any) -> Any:
        objection = await site.secure.policy.objection_to_proposal(site.welcome, sent)
        self.refusals += [objection] * bool(objection)
        return site.countersignature(sent)

    async def _collect(self) -> SecureCollection | None:
        collected, offer = self.world.collection(self.ballot)
        self.world.server.begin(collected, honest, {})
        answer, sent = collected.exchange.answer, collected.exchange.sent

        def answering(*args: Any) -> None:
            self.reaper.at(SERVER)
            answer(*args)

        async def sending(*args: Any) -> Any:
            self.reaper.at(SERVER)
            found = await sent(*args)
            self.reaper.at(SERVER)
            return found

        collected.exchange.answer, collected.exchange.sent = answering, sending  # type: ignore

        async def taking_part(site: Site) -> None:
            deadline = asyncio.get_running_loop().time() + SECONDS
            try:
                if objection := await site.secure.policy.objection(site.welcome, offer):
                    self.refusals.append(objection)
                await site.secure.take_part(site.welcome, offer, deadline)
            except (FedprivError, Killed) as error:
                self.drops[site.name] = str(error)
                self.world.server.gone.add(site.name)

        sites = self.world.sites
        self.tasks |= {name: asyncio.create_task(taking_part(sites[name])) for name in sites}
        if await collected.collect():
            return collected
        self._end(collected)
        return None

    def _end(self, collected: SecureCollection) -> None:
        collected.collection.abandon()
        for stage in set(collected.exchange._sent):
            if not collected.exchange._answered[stage].is_set():
                type(collected.exchange).answer(collected.exchange, stage)

    async def _opened(
        self, collected: SecureCollection | None, at: RoundAttempt
    ) -> OpenedSum | None:
        if collected is None:
            return None
        opened = await collected.open()
        self._end(collected)
        self.reaper.at(SERVER)
        if opened is not None:  # the sum of what nodes masked, to the bit
            grid = Grid.of(self.world.mechanism.event, NODES.nodes)
            own = [self.sums[name, at.round, at.attempt] for name in collected._survivors]
            plain = np.sum(own, axis=0, dtype=np.int64)
            np.testing.assert_array_equal(opened.total, grid.steps(plain, CLIPPING))
        return opened

    def check(self) -> None:
        """What holds after every round, once all are back."""
        assert self.refusals == []
        assert set(self.uploads.values()) <= {1}
        rows = list(self.records.ledger.charges())
        charges = {(row.round, row.attempt): row.hash for row in rows}
        assert len(charges) == len(rows)
        assert self.charged.items() <= charges.items()
        self.charged = charges
        for number, release in self.released.items():
            assert charges[number, release.attempt] == release.charge_hash

    def check_paid(self) -> None:
        """What holds after a round without kills: all that ever left a node is charged."""
        assert {(number, attempt) for _, number, attempt in self.uploads} <= self.charged.keys()
        for site in self.world.sites.values():
            journal, name = site.secure.policy.journal, self.world.enrolment.population_id
            taken = journal.remembered(name).taken_part
            left = {key[1:] for key in self.uploads if key[0] == site.name}
            assert left <= {(part.round, part.attempt) for part in taken}


async def rounds(made: Federation, count: int) -> Counter[str]:
    """Rounds in which the server is killed, then a node, each time a point later, then nobody.

    Returns at how many points each was killed.
    """
    points, kills = Counter[str](), dict[str, set[int]]()
    for number in range(count):
        victim = VICTIMS[number % len(VICTIMS)]
        points[victim] += bool(victim)
        made.reaper.begin(victim, points[victim])
        release = await made.round(len(made.released))
        if made.reaper.struck:
            kills.setdefault(victim, set()).add(points[victim])
        elif victim:  # it has passed all of its points
            points[victim] = 0
        if victim != SERVER:
            assert release is not None
            assert made.drops.keys() <= {victim}
        made.reaper.begin("", 0)
        made.revive()
        made.check()
        if not victim:
            made.check_paid()
    return Counter({name: len(places) for name, places in kills.items()})


@contextlib.contextmanager
def federation(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Federation]:
    """A federation, each statement of whose files, and each sum of whose nodes, is a point."""
    made = Federation(folder)
    write, noised = Database.write, SecureSums._noised_sum

    def writing(database: Database, *args: Any) -> None:
        inside = database.path.parent == folder / RECORDS
        process = SERVER if inside else database.path.stem
        made.reaper.at(process)
        write(database, *args)
        made.reaper.at(process)

    async def noting(secure: SecureSums, welcome: Any, offer: Any, deadline: float) -> Any:
        total = await noised(secure, welcome, offer, deadline)
        key = secure.identity.node, offer.id.round, offer.id.attempt
        assert key not in made.sums
        made.sums[key] = total.copy()
        return total

    patch.setattr(Database, "write", writing)
    patch.setattr(SecureSums, "_noised_sum", noting)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """So many rounds, of federations of their own."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("rounds", type=int)
    left, total = parser.parse_args().rounds, Counter[str]()
    while left > 0:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            with federation(Path(folder), patch) as made:
                total += asyncio.run(rounds(made, min(left, OF_A_FEDERATION)))
            total["released"] += len(made.released)
            total["charged"] += len(made.charged)
        left -= OF_A_FEDERATION
        print(left, dict(total), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
