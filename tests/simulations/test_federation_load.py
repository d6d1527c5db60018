"""The load benchmark: that it measures what it says, not how fast anything is."""

import resource

import pytest

from fedpriv.errors import InvalidValueError
from simulations.federation_load import Found, Load, measure, summary


@pytest.mark.slow
def test_a_small_load_is_measured() -> None:
    load = Load(nodes=6, sampled=4, parameters=300_007, rounds=2)
    found = measure(load)
    assert found.connected == [6, 6, 6]
    for seconds in (found.seconds, found.bare_seconds):
        assert len(seconds) == 2
        assert min(seconds) > 0.0
    assert 0.0 < found.peak_mebibytes <= found.peak_mebibytes_of_all


def test_the_summary_by_hand() -> None:
    load = Load(nodes=10, sampled=5, parameters=25_000, rounds=4)
    found = Found(
        seconds=[9.0, 2.0, 1.0, 4.0],
        bare_seconds=[0.1, 1.0, 1.0, 1.0],
        connected=[10, 10, 10, 10, 9],
        peak_mebibytes=100.0,
        seconds_of_all=3.0,
        peak_mebibytes_of_all=200.0,
    )
    numbers = summary(load, found)
    # 5 nodes, 100,000 bytes down and as many up.
    assert numbers["megabytes per second"] == pytest.approx(0.5)
    assert numbers["megabytes per second of a bare stream"] == pytest.approx(1.0)
    assert numbers["ratio"] == pytest.approx(0.5)
    assert numbers["the same over the bytes of the model"] == pytest.approx(200 * 2**20 / 1e5)
    assert numbers["connected nodes"] == 9


def test_too_few_open_files_are_told_before_anything_is_made() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(InvalidValueError, match=f"{hard} files may be open at once"):
        measure(Load(nodes=hard, sampled=1, parameters=1000, rounds=1))
