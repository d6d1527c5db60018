"""Rounds with kills: no charge is lost, nobody refuses wrongly, and each total is the plain sum."""

import asyncio
from pathlib import Path

import pytest

from tests.clients.killing import OF_A_FEDERATION, SERVER, federation, rounds


def test_a_kill_at_some_points_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with federation(tmp_path, monkeypatch) as made:
        kills = asyncio.run(rounds(made, 30))
    assert kills == {SERVER: 10, "n2": 10}


@pytest.mark.slow
def test_a_kill_at_any_point_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All points are passed: another round begins with the first again."""
    with federation(tmp_path, monkeypatch) as made:
        kills = asyncio.run(rounds(made, OF_A_FEDERATION))
    assert len(made.released) > OF_A_FEDERATION / 2
    assert kills[SERVER] >= 25
    assert kills["n2"] >= 40
