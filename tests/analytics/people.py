"""People to ask, and the way from a survey to what it would release, without a ledger."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from fedpriv.analytics import (
    Answer,
    Distribution,
    Histogram,
    Mean,
    Quantiles,
    Sum,
    Survey,
)
from fedpriv.analytics.survey import collect
from fedpriv.data import UserStore
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import add_up
from fedpriv.privacy.sampling import PoissonSampling

THRESHOLDS = (-2.0, 0.0, 1.0, 2.5, 4.0, 7.0, 11.0)
QUESTIONS = (
    Mean("mean", "x", low=-3.0, high=9.0),
    Sum("sum", "x", low=-1.0, high=8.0),
    Histogram("histogram", "kind", categories=("b", "a", "c"), clipping_norm=2.0),
    Distribution("distribution", "x", THRESHOLDS),
    Quantiles("quantiles", "x", THRESHOLDS, probabilities=(0.2, 0.5, 0.9)),
)
KINDS = ("a", "b", "c", "d")
Person = Mapping[str, Sequence[float] | Sequence[str]]


def store(people: Sequence[Person]) -> UserStore:
    """A store of people with numbers x and as many texts kind."""
    offsets = np.cumsum([0, *(len(person["x"]) for person in people)])
    x = np.array([value for person in people for value in person["x"]], dtype=np.float64)
    kind = np.array([value for person in people for value in person["kind"]], dtype="<U1")
    return UserStore({"x": x, "kind": kind}, offsets)


def some_people(count: int, seed: int = 0) -> UserStore:
    """People of zero to three finite records."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 4, count)
    return store(
        [{"x": rng.normal(2.0, 3.0, n), "kind": rng.choice(KINDS, n)} for n in sizes.tolist()]
    )


def survey(population: int, q: float = 1.0, z: float = 0.0, **changes: object) -> Survey:
    given = {"questions": QUESTIONS, **changes}
    return Survey("run", sampling=PoissonSampling(population, q), noise_multiplier=z, **given)


def total(asked: Survey, users: UserStore, cohort: Sequence[int]) -> np.ndarray:
    """Sum of what a cohort contributes, in steps: int64[D]."""
    positions = np.asarray(cohort, dtype=np.int64)
    clipping = asked.mechanism.clipping
    return add_up(collect(asked, users, positions), clipping, positions.size).total


def average(asked: Survey, users: UserStore, cohort: Sequence[int]) -> np.ndarray:
    """What a cohort contributes over its expected size, without noise, in the questions' units."""
    query = asked.mechanism.query
    return query.clipping.in_units(total(asked, users, cohort)) / query.denominator


def exact(asked: Survey, users: UserStore) -> dict[str, Answer]:
    """Answers without noise and with everybody in the cohort."""
    plain = survey(users.population, questions=asked.questions)
    of_all = average(plain, users, range(users.population))
    return {answer.question: answer for answer in plain.answers(of_all)}


def released(asked: Survey, users: UserStore, seed: int) -> dict[str, Answer]:
    """What a seeded round releases."""
    entropy = SeededEntropy(seed)
    cohort = asked.mechanism.sampling.draw(entropy.key("sampling"))[0]
    noised, _ = asked.mechanism.query.noised_average(total(asked, users, cohort), entropy, "noise")
    return {answer.question: answer for answer in asked.answers(noised)}


def follows(errors: np.ndarray, scale: float) -> bool:
    """Whether errors can be N(0, scale²), with a false alarm in a million."""
    return bool(stats.kstest(errors / scale, "norm").pvalue > 1e-6)
