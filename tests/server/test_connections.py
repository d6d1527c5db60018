"""Who is connected, and what each is told: the newest offer, on the newest connection."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from fedpriv.server.collection import Connection, Connections, End
from fedpriv.wire import RoundOffer
from tests.wire.examples import small_offer

SOON = 0.01  # seconds; nothing comes in them
LONG = 30.0


Told = Callable[..., RoundOffer | End | None]


@pytest.fixture
def told() -> Iterator[Told]:
    """Says what a connection has to tell, on one event loop."""
    with asyncio.Runner() as runner:
        yield lambda connection, seconds=SOON: runner.run(connection.next(seconds))


def offers(count: int) -> list[RoundOffer]:
    return [small_offer() for _ in range(count)]


def test_of_offers_only_the_newest_waits(told: Told) -> None:
    connection, (older, newer) = Connection(), offers(2)
    connection.tell(older)
    connection.tell(newer)
    assert told(connection, LONG) is newer
    assert told(connection) is None


def test_an_offer_is_told_once_and_the_next_one_after_it(told: Told) -> None:
    connection = Connection()
    for offer in offers(3):
        connection.tell(offer)
        assert told(connection, LONG) is offer
        assert told(connection) is None


def test_an_offer_wakes_who_waits() -> None:
    async def scene() -> None:
        connection, (offer,) = Connection(), offers(1)
        waiting = asyncio.create_task(connection.next(LONG))
        await asyncio.sleep(0)
        connection.tell(offer)
        assert await waiting is offer

    asyncio.run(scene())


def test_after_its_end_a_connection_says_nothing_but_why_and_the_first_reason_stays(
    told: Told,
) -> None:
    connection, (offer,) = Connection(), offers(1)
    connection.tell(offer)
    connection.tell(End.NEWER)
    connection.tell(End.RUN_OVER)
    connection.tell(offer)
    assert [told(connection, LONG) for _ in range(3)] == [End.NEWER] * 3


class Scene:
    """Connections with a clock of its own, which counts how often it changed."""

    def __init__(self) -> None:
        self.now, self.changes = 100.0, 0
        self.connections = Connections(self._changed, lambda: self.now)

    def _changed(self) -> None:
        self.changes += 1


def test_a_newer_connection_of_a_node_ends_the_older_and_no_other(told: Told) -> None:
    connections = Scene().connections
    older, other = connections.connect("a"), connections.connect("b")
    newer = connections.connect("a")
    assert told(older, LONG) is End.NEWER
    assert told(newer) is told(other) is None
    assert connections.of("a") is newer
    assert len(connections) == 2


def test_the_end_of_an_older_connection_changes_nothing() -> None:
    scene = Scene()
    older, newer = scene.connections.connect("a"), scene.connections.connect("a")
    before = scene.changes
    scene.connections.disconnect("a", older)
    assert (scene.changes, len(scene.connections)) == (before, 1)
    assert scene.connections.of("a") is newer
    assert scene.connections.away_since("a") is None
    scene.connections.disconnect("a", newer)
    scene.connections.disconnect("a", newer)
    assert (scene.changes, len(scene.connections)) == (before + 1, 0)
    assert scene.connections.of("a") is None


def test_away_since() -> None:
    """None while there; when it went last; when the server began if it never came."""
    scene = Scene()
    scene.now = 150.0
    assert scene.connections.away_since("a") == 100.0
    first = scene.connections.connect("a")
    assert scene.connections.away_since("a") is None
    scene.now = 200.0
    scene.connections.disconnect("a", first)
    scene.now = 250.0
    assert scene.connections.away_since("a") == 200.0
    again = scene.connections.connect("a")
    assert scene.connections.away_since("a") is None
    scene.now = 300.0
    scene.connections.disconnect("a", again)
    assert scene.connections.away_since("a") == 300.0
    assert scene.connections.away_since("b") == 100.0


def test_it_says_whenever_a_node_came_or_went() -> None:
    scene = Scene()
    connection = scene.connections.connect("a")
    assert scene.changes == 1
    scene.connections.connect("b")
    assert scene.changes == 2
    scene.connections.disconnect("a", connection)
    assert scene.changes == 3
    scene.connections.connect("a")
    assert scene.changes == 4


@pytest.mark.parametrize("why", [End.RUN_OVER, End.SHUTTING_DOWN])
def test_end_all_ends_all_that_are_there_and_all_to_come(told: Told, why: End) -> None:
    connections = Scene().connections
    there = [connections.connect(node) for node in "abc"]
    connections.end_all(why)
    assert [told(connection, LONG) for connection in there] == [why] * 3
    assert told(connections.connect("d"), LONG) is why
    assert told(connections.connect("a"), LONG) is why
