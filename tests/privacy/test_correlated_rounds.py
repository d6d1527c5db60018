"""What a series of rounds with correlated noise releases, against the matrix mechanism itself."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import toeplitz

from fedpriv.accounting.round_counts import strategy_sensitivity
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.correlated_noise import BandedStrategy, BufferedStrategy, Strategy
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, GaussianQuery
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PartialSum, private_round
from fedpriv.privacy.sampling import (
    BandedPoissonSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    SeparatedSampling,
)
from tests.training.federation import open_records

N, B, USERS, WIDE = 10, 4, 9, 4000
BANDED = BandedStrategy((1.0, 0.5, 0.375, 0.25))
BUFFERED = BufferedStrategy((0.875, 0.5), (0.25, 0.375))
LAYOUT = Layout(("a", "b"), ((WIDE,), (3,)))
GROUPS = (VectorGroup("a", ("a",), 1.0, (1.0,)), VectorGroup("b", ("b",), 8.0, (1.0,)))
SEPARATED = SeparatedSampling(USERS, N, B)


def mechanism_of(
    strategy: Strategy, z: float = 2.0, sampling: Sampling = SEPARATED
) -> GaussianMechanism:
    clipping = Clipping(LAYOUT, GROUPS)
    return GaussianMechanism.calibrated(sampling, clipping, z, (0.5, 0.5), strategy=strategy)


def released(
    made: GaussianMechanism, folder: Path, totals: Sequence[np.ndarray] | None = None, seed: int = 1
) -> np.ndarray:
    """What a series releases as sums, in units of the contributions: [N, D]."""
    sums = []
    folder.mkdir(exist_ok=True)
    with open_records(folder, limit=1e6) as records:
        for t in range(N):
            none = np.zeros(LAYOUT.dimension, np.int64)
            total = none if totals is None else totals[t]

            def collect(_at: object, users: np.ndarray, total: np.ndarray = total) -> list:
                return [PartialSum("node", users.size, total, users.size)]

            at = SeededEntropy(seed)
            sums.append(private_round(made, "run", t + 1, collect, records, at).average)
    return np.array(sums) * made.query.denominator


def matrix(strategy: Strategy) -> np.ndarray:
    column = np.zeros(N)
    found = strategy.column(N)
    column[: len(found)] = found
    return np.tril(toeplitz(column))


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
def test_what_is_released_is_fresh_noise_of_the_charged_size_behind_the_inverse(
    strategy: Strategy, tmp_path: Path
) -> None:
    made = mechanism_of(strategy)
    fresh = matrix(strategy) @ released(made, tmp_path)
    stddev = made.query.noise_stddevs[0]
    noise = fresh[:, :WIDE].ravel() / stddev
    # False alarms of all of these together: below one in 10,000.
    assert stats.kstest(noise, "norm").pvalue > 1e-5
    for scale in (0.92, 1.08):
        assert stats.kstest(noise * scale, "norm").pvalue < 1e-5
    rounds = np.corrcoef(fresh[:, :WIDE])[np.triu_indices(N, 1)]
    assert np.abs(rounds).max() < 5.5 / np.sqrt(WIDE)
    other = matrix(BUFFERED if strategy is BANDED else BANDED) @ released(made, tmp_path / "again")
    assert np.abs(np.corrcoef(other[:, :WIDE])[np.triu_indices(N, 1)]).max() > 5.5 / np.sqrt(WIDE)
    apart = made.query.noise_stddevs[1] / made.query.noise_stddevs[0]
    assert apart == pytest.approx(8.0, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), strategy=st.sampled_from([BANDED, BUFFERED]))
def test_one_user_moves_the_matrix_mechanism_by_what_is_charged(
    data: st.DataObject, strategy: Strategy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The means C·X of two neighbours, whose difference the accountant bounds, by an enemy."""
    made = mechanism_of(strategy, 1.0)
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    others = rng.integers(-1000, 1000, (N, LAYOUT.dimension))
    cohorts = SEPARATED.draw(SeededEntropy(seed).key("sampling"))
    user = data.draw(st.integers(0, USERS - 1))
    direction = np.zeros(LAYOUT.dimension)
    direction[data.draw(st.integers(0, WIDE - 1))] = 1.0
    clip = made.clipping.groups[0]
    most = np.trunc(direction * np.floor(np.sqrt(clip.squared_bound))).astype(np.int64)
    signs = [data.draw(st.sampled_from([1, -1, 0])) for _ in range(N)]
    present = [user in cohort for cohort in cohorts]
    mine = np.array([most * sign * here for sign, here in zip(signs, present, strict=True)])
    # Equal keys: the noise is the same, and what is left is the difference of the means behind C⁻¹.
    folders = tmp_path_factory.mktemp("with"), tmp_path_factory.mktemp("without")
    with_user = released(made, folders[0], list(others + mine))
    without = released(made, folders[1], list(others))
    moved = matrix(strategy) @ (with_user - without)[:, :WIDE]
    event = made.event
    schedule = event.sampling.schedule
    assert schedule is not None
    sensitivity = strategy_sensitivity(event.strategy, N, schedule.participations, B)
    assert np.linalg.norm(moved) <= sensitivity * event.queries[0].clipping_norm * (1 + 1e-9)
    if (
        all(sign == 1 for sign in signs)
        and sum(user in c for c in cohorts) == schedule.participations
    ):
        assert np.linalg.norm(moved) >= 0.999 * sensitivity * clip.clipping_norm


def test_the_price_is_reached_by_a_user_who_sends_the_same_each_time(tmp_path: Path) -> None:
    made = mechanism_of(BANDED, 1.0)
    most = np.zeros(LAYOUT.dimension, np.int64)
    most[0] = int(np.floor(np.sqrt(made.clipping.groups[0].squared_bound)))
    totals = [most * (t % B == 0) for t in range(N)]  # of a user in the first group
    moved = released(made, tmp_path, totals) - released(made, tmp_path / "without")
    means = matrix(BANDED) @ moved[:, :WIDE]
    assert np.linalg.norm(means) == pytest.approx(
        strategy_sensitivity(BANDED.coefficients, N, 3, B), rel=1e-6
    )


@pytest.mark.parametrize(
    ("sampling", "strategy", "sentence"),
    [
        (PoissonSampling(USERS, 0.5), BANDED, "noise is correlated and sampling is poisson"),
        (RandomAllocationSampling(USERS, N), BANDED, "random-allocation sampling has"),
        (BandedPoissonSampling(USERS, N, 3, 0.5), BANDED, "at most one per group, 3"),
        (BandedPoissonSampling(USERS, N, B, 0.5), BUFFERED, "at most one per group, 4"),
    ],
)
def test_what_has_no_analysis_cannot_be_made(
    sampling: Sampling, strategy: Strategy, sentence: str
) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        mechanism_of(strategy, sampling=sampling)


def test_a_mechanism_whose_arithmetic_is_not_charged_cannot_be_made() -> None:
    made = mechanism_of(BUFFERED)
    assert min(made.query.slack) > 0.0
    query = made.query
    free = GaussianQuery(query.clipping, query.noise_stddevs, query.denominator)
    with pytest.raises(InvalidValueError, match="the arithmetic of this noise needs"):
        GaussianMechanism(made.sampling, free, BUFFERED)
