"""Transfers: so many at once, each for so long, one per node, and all of them end when told to."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic

import pytest

from fedpriv.server.service import Transfers

LONG = 60.0


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Scene:
    """Tasks that hold turns until they are told to let go."""

    def __init__(self, turns: Transfers) -> None:
        self.turns, self.holding, self.most = turns, [], 0
        self.let_go = asyncio.Event()

    async def hold(self, node: str, until: float | None = None) -> str:
        async with self.turns.turn(node, until):
            self.holding.append(node)
            self.most = max(self.most, len(self.holding))
            try:
                await self.let_go.wait()
            finally:
                self.holding.remove(node)
        return node

    def begin(self, node: str, until: float | None = None) -> asyncio.Task[str]:
        return asyncio.create_task(self.hold(node, until))


def played(scene: Callable[[], Coroutine[object, object, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LONG):
            await scene()

    asyncio.run(limited())


async def ended(task: Awaitable[str]) -> None:
    with pytest.raises(TimeoutError):
        await task


@pytest.mark.parametrize("places", [1, 2, 5])
def test_never_more_than_the_places_are_held_and_all_get_their_turn(places: int) -> None:
    async def scene() -> None:
        it = Scene(Transfers(places, LONG))
        tasks = [it.begin(str(number)) for number in range(20)]
        await settled()
        assert it.holding == [str(number) for number in range(places)]
        it.let_go.set()
        assert await asyncio.gather(*tasks) == [str(number) for number in range(20)]
        assert it.most == places

    played(scene)


def test_who_holds_its_turn_for_too_long_loses_it_and_the_next_one_goes_on() -> None:
    async def scene() -> None:
        it = Scene(Transfers(1, 0.1))
        slow, next_one = it.begin("slow"), it.begin("next")
        await ended(slow)
        await settled()
        assert it.holding == ["next"]
        it.let_go.set()
        assert await next_one == "next"

    played(scene)


def test_waiting_for_a_place_does_not_count() -> None:
    async def scene() -> None:
        it = Scene(Transfers(1, 0.2))
        waits = [it.begin(str(number)) for number in range(3)]
        await ended(waits[0])
        await ended(waits[1])
        it.let_go.set()
        assert await waits[2] == "2"

    played(scene)


def test_a_newer_turn_of_a_node_ends_the_older_whether_it_holds_or_waits() -> None:
    async def scene() -> None:
        it = Scene(Transfers(1, LONG))
        holds, other = it.begin("a"), it.begin("b")
        await settled()
        newer, newest = it.begin("a"), it.begin("a")
        await ended(holds)
        await ended(newer)
        await settled()
        assert it.holding == ["b"]
        it.let_go.set()
        assert await asyncio.gather(other, newest) == ["b", "a"]

    played(scene)


def test_a_turn_ends_at_its_time_even_while_it_waits() -> None:
    async def scene() -> None:
        it = Scene(Transfers(1, LONG))
        holds = it.begin("a", monotonic() + 0.2)
        waits = it.begin("b", monotonic() + 0.1)
        await ended(waits)
        assert it.holding == ["a"]
        await ended(holds)
        it.let_go.set()
        assert await it.begin("c", monotonic() + LONG) == "c"

    played(scene)


def test_all_end_when_told_to_and_later_ones_go_on() -> None:
    async def scene() -> None:
        it = Scene(Transfers(2, LONG))
        tasks = [it.begin(str(number)) for number in range(5)]
        await settled()
        it.turns.end_all()
        it.turns.end_all()
        for task in tasks:
            await ended(task)
        it.let_go.set()
        assert await it.begin("0") == "0"

    played(scene)


def test_a_task_that_is_cancelled_or_fails_gives_its_place_back() -> None:
    async def scene() -> None:
        it = Scene(Transfers(1, LONG))
        for _ in range(3):
            task = it.begin("a")
            await settled()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ValueError, match="failed"):
                async with it.turns.turn("a"):
                    raise ValueError("failed")
        it.let_go.set()
        assert await it.begin("b") == "b"

    played(scene)


def test_who_is_excused_is_ended_by_nothing() -> None:
    async def scene() -> None:
        newest, let_go = Transfers(1, LONG), asyncio.Event()

        async def excused() -> str:
            async with newest.newest("a", monotonic() + 0.05) as limit:
                newest.excuse("a", limit)
                await let_go.wait()
            return "done"

        async def newer() -> str:
            async with newest.newest("a"):
                await asyncio.sleep(LONG)
            return "never"

        first = asyncio.create_task(excused())
        await settled()
        second = asyncio.create_task(newer())
        await asyncio.sleep(0.1)
        newest.end_all()
        await ended(second)
        let_go.set()
        assert await first == "done"

    played(scene)


def test_who_is_excused_as_a_newer_one_comes_is_ended_by_nothing_and_the_newer_one_is() -> None:
    async def scene() -> None:
        newest, arrived = Transfers(1, LONG), asyncio.Event()

        async def excused() -> str:
            async with newest.newest("a") as limit:
                await arrived.wait()
                newest.excuse("a", limit)
                await settled()
            return "done"

        async def newer() -> str:
            async with newest.newest("a"):
                await asyncio.sleep(LONG)
            return "never"

        first = asyncio.create_task(excused())
        await settled()
        second = asyncio.create_task(newer())  # begins before the first goes on
        arrived.set()
        assert await first == "done"
        newest.end_all()
        await ended(second)

    played(scene)
