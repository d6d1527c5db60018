"""A server that is killed at any moment goes on with what was released, and its nodes with it."""

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deployment.checking import Standing, check
from tests.deployment.sites import Site, ended, kill

KILLS = 4
# Where the server is killed in a round: what that adds to charges, to releases that are written
# down, and to rounds that are not run again.
GAINS = {
    "starting": (0, 0, 0),
    "opened": (0, 0, 0),
    "summed": (0, 0, 0),
    "half charged": (0, 0, 0),
    "charged": (1, 0, 0),
    "released": (1, 0, 0),
    "measured": (1, 1, 0),
    "half saved": (1, 1, 0),
    "saved": (1, 1, 1),
}
DRAWN = {"opened", "summed", "half charged"}
"""Where the next start charges what was drawn, but for one that is killed before it does."""


def killed_at(site: Site, place: str) -> None:
    """Start the server, and kill it as soon as it comes to a place."""
    traps = site.traps("server")
    traps.arm(place)
    with site.server() as server:
        traps.await_caught(place, server)
        kill(server)
    traps.free(place)


@pytest.mark.slow
def test_a_server_that_is_killed_between_two_steps(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    expected, owed = (0, 0, 0), 0
    with site.node("node-1", "--once") as node:
        for place in sorted(GAINS):
            killed_at(site, place)
            found = check(site)
            if place != "starting":
                expected, owed = (expected[0] + owed, *expected[1:]), 0
            expected = tuple(a + b for a, b in zip(expected, GAINS[place], strict=True))
            owed += place in DRAWN
            assert (found.charged, found.released, found.next_round) == expected, place
        with site.server("--exit") as server:
            ended(server)
            ended(node)
    found = check(site)
    assert found.next_round == 6
    assert found.charged == expected[0] + owed + 6 - expected[2]
    assert site.run.model.exists()


@pytest.mark.slow
def test_a_server_that_is_killed_when_it_writes_the_model(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    with site.node("node-1"):
        killed_at(site, "half modelled")
        found = check(site)
        assert found == Standing(dict.fromkeys(range(1, 7), 1), 6, 6)
        assert not site.run.model.exists()
        with site.server("--exit") as server:
            assert "6 of 6 rounds are released" in ended(server)
    assert check(site) == found
    assert site.run.model.exists()


@pytest.mark.slow
def test_a_server_that_is_killed_at_random_moments(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    moments = random.Random(0)
    reached = []
    with ExitStack() as stack:
        nodes = [stack.enter_context(site.node(f"node-{n}", "--once")) for n in (1, 2)]
        for number in range(KILLS):
            with site.server("--set=rounds=200") as server:
                if number % 3:  # else while it starts
                    site.await_releases(1, server)
                    time.sleep(moments.uniform(0.0, 0.3))
                else:
                    time.sleep(moments.uniform(1.0, 4.0))
                kill(server)
            reached.append(check(site).next_round)
        with site.server("--exit", "--set=rounds=200") as server:
            for program in (server, *nodes):
                ended(program)
    assert reached == sorted(reached)
    assert reached[-1] > 0
    assert check(site).next_round == 200
