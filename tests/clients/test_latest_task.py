"""The newest work takes the place of older work, and no two overlap."""

import asyncio

import pytest

from fedpriv.clients.membership import LatestTask


class Diligence:
    """Work that notes when it begins and how it ends."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.go = asyncio.Event()

    async def work(self, name: str) -> None:
        self.notes.append(f"{name} begins")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.0)  # ending takes a while
            self.notes.append(f"{name} is abandoned")
            raise
        self.notes.append(f"{name} is done")


def test_newer_work_begins_after_older_has_ended() -> None:
    async def main() -> list[str]:
        newest, diligence = LatestTask(), Diligence()
        await newest.begin(1, lambda: diligence.work("one"))
        await asyncio.sleep(0.0)
        assert not newest.idle
        await newest.begin(2, lambda: diligence.work("two"))
        await asyncio.sleep(0.0)
        await newest.stop()
        assert newest.idle
        return diligence.notes

    notes = asyncio.run(main())
    assert notes == ["one begins", "one is abandoned", "two begins", "two is abandoned"]


def test_the_same_work_goes_on_while_it_is_under_way_and_can_be_done_again() -> None:
    async def main() -> list[str]:
        newest, diligence = LatestTask(), Diligence()
        for _ in range(3):
            await newest.begin(1, lambda: diligence.work("one"))
            await asyncio.sleep(0.0)
        diligence.go.set()
        while not newest.idle:
            await asyncio.sleep(0.0)
        await newest.begin(1, lambda: diligence.work("again"))
        await asyncio.sleep(0.0)
        await newest.stop()
        return diligence.notes

    notes = asyncio.run(main())
    assert notes == ["one begins", "one is done", "again begins", "again is done"]


def test_a_failure_is_raised_by_the_next_call() -> None:
    async def fails() -> None:
        raise KeyError("a fault of ours")

    async def main() -> None:
        newest = LatestTask()
        await newest.begin(1, fails)
        await asyncio.sleep(0.0)
        with pytest.raises(KeyError, match="a fault"):
            await newest.begin(2, fails)
        assert newest.idle
        await newest.stop()

    asyncio.run(main())
