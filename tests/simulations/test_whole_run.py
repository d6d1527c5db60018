"""A whole run of DP-SGD beside another library's: ours is one, and the table compares medians."""

from dataclasses import replace

import numpy as np

import fedpriv
from simulations.benchmarks.whole_run import Trained, ours, results_table
from simulations.papers.bu_mnist import ROWS


def test_ours_is_a_run_of_its_own_that_pays_for_its_rounds() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((500, 1, 28, 28), np.float32), rng.integers(10, size=500)
    people = fedpriv.Population.from_arrays(x, y, np.arange(500), held_out=(x[:50], y[:50]))
    few, more = (ours(people, replace(ROWS[0], epochs=epochs)) for epochs in (0.01, 0.03))
    assert 0.0 < few.epsilon < more.epsilon < 0.865
    assert few.seconds > 0.0
    assert 0.0 <= few.accuracy <= 1.0


def test_the_table_compares_medians() -> None:
    fast = [Trained(seconds, 0.9, 0.5) for seconds in (2.0, 1.0, 9.0)]
    slow = [Trained(seconds, 0.8, 0.5) for seconds in (8.0, 6.0, 7.0)]
    first, second = results_table(
        {"fedpriv": fast, "Opacus": slow}, replace(ROWS[0], epochs=1.0)
    ).rows
    assert first == ("fedpriv", "2.0", "30,000", "90.0%", "0.500", "3.5 ×")
    assert second[-1] == "1.0 ×"
