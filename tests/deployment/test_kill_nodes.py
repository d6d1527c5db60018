"""A node that is killed or hangs counts as zero, and takes part again as soon as it can."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpriv.clients.journal import Journal, TakenPart
from fedpriv.ledger.ledger import Ledger
from tests.deployment.checking import stop_and_check
from tests.deployment.sites import (
    LONG,
    Site,
    ask_to_stop,
    await_answers,
    children_of,
    ended,
    hanging,
    is_gone,
    kill,
    until,
)

PLACES = ("offered", "noted", "answering", "uploading")


def journal_of(site: Site, name: str) -> tuple[TakenPart, ...]:
    """What a node has written down, by round."""
    with Ledger.open(site.run.ledger) as ledger:
        population = ledger.population_name
    with Journal(site.folder / "state" / name / "journal.sqlite") as journal:
        return journal.remembered(population).taken_part


@contextmanager
def killed_at(site: Site, place: str) -> Iterator[None]:
    """Start node-2, and kill it as soon as it comes to a place; nothing of it is left."""
    site.traps("node-2").arm(place)
    with site.node("node-2") as node:
        site.traps("node-2").await_caught(place, node)
        children = children_of(node)
        assert children
        kill(node)
    site.traps("node-2").free(place)
    until(lambda: all(map(is_gone, children)))
    yield


@pytest.mark.slow
def test_a_node_that_is_killed_or_hangs_while_it_trains(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    with site.server(*LONG, "--set=federation.deadline_seconds=4.0") as server, site.node("node-1"):
        with killed_at(site, "training"):
            assert journal_of(site, "node-2") == ()  # it has sent nothing
            site.await_releases(2, server)
        with site.node("node-2") as node:
            await_answers(node)
            answered = journal_of(site, "node-2")

            site.traps("node-2").arm("training")
            site.traps("node-2").await_caught("training", node)
            with hanging(node):
                site.await_releases(2, server)
            site.traps("node-2").free("training")
            await_answers(node)

            site.traps("node-2").arm("training")
            site.traps("node-2").await_caught("training", node)
            children = children_of(node)
            ask_to_stop(node)
            ended(node)
            until(lambda: all(map(is_gone, children)))
        stop_and_check(site, server)
    with Ledger.open(site.run.ledger) as ledger:
        charged = {(row.run, row.round, row.attempt) for row in ledger.charges()}
    assert answered
    assert {(part.run, part.round, part.attempt) for part in answered} <= charged


@pytest.mark.slow
def test_a_node_that_is_killed_at_other_moments(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    with site.server(*LONG) as server, site.node("node-1"):
        for place in PLACES:
            with killed_at(site, place):
                site.await_releases(2, server)
        with site.node("node-2") as node:
            await_answers(node)
            kill(node)  # whatever it does
            site.await_releases(2, server)
        stop_and_check(site, server)


@pytest.mark.slow
def test_a_training_process_that_is_killed_or_hangs(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    traps = site.traps("node-2")
    waiting = "--set=federation.deadline_seconds=20.0"
    with site.server(*LONG, waiting) as server, site.node("node-1"), site.node("node-2") as node:
        traps.arm("training")
        traps.await_caught("training", node)
        until(lambda: "trained one by one" in node.text, node)  # what hangs is killed in time
        traps.free("training")
        await_answers(node)
        stop_and_check(site, server)
