"""The load with hostile peers: that it measures what it says, not how fast anything is."""

import pytest

from simulations.hostile_load import Found, Load, measure, summary
from simulations.hostile_peers import KINDS


@pytest.mark.slow
def test_a_small_load_is_measured_without_and_with_hostile_peers() -> None:
    load = Load(
        nodes=8, sampled=4, hidden=500, rounds=4, hostile=30, kinds=[*KINDS], patience=120.0
    )
    quiet, hostile = measure(load)
    for found in (quiet, hostile):
        assert found.released == found.charged == load.rounds
        assert len(found.seconds) == load.rounds - 1
        assert min(found.seconds) >= 0.0
        assert found.answered > 0
        assert found.peak_mebibytes > 0.0
    assert set(quiet.begun.values()) == {0}
    assert min(hostile.begun.values()) >= load.hostile / len(KINDS)


def test_the_summary_by_hand() -> None:
    load = Load(nodes=10, sampled=5, hidden=10, rounds=4, hostile=5, kinds=[*KINDS], patience=1.0)
    kinds = dict.fromkeys(KINDS, 1)
    quiet = Found([1.0, 2.0, 3.0], 4, 4, 20, 0, 0, 100.0, kinds, None, [])
    hostile = Found([2.0, 3.0], 3, 4, 15, 1, 7, 300.0, kinds, 2, [])
    numbers = summary(load, quiet, hostile)
    assert numbers["rounds lost without hostile peers"] == 0
    assert numbers["rounds lost"] == 1
    assert numbers["ratio"] == 1.25
    assert numbers["rounds charged empty"] == 1
    assert numbers["connections of nodes lost"] == 7
    assert numbers["server's peak memory in MiB"] == 300.0
