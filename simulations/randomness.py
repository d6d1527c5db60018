"""Speed of drawing noise and cohorts: `python -m simulations.randomness`.

Time is the processor time of the whole process, so a rate is a rate per core even if a library
were to start threads. NumPy's own generator, which is not cryptographic, runs in turn with ours.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from fedpriv.privacy.noise import rounded_gaussian, words
from fedpriv.privacy.sampling import PoissonSampling

_REPEATS = 15
_NORMALS = 4_000_000
_STDDEV = 2.0**24  # in steps, as for a noise multiplier of about 1
_POPULATION = 10_000_000


def _median_seconds(*tasks: Callable[[], object]) -> list[float]:
    """Return the median processor time of each task; tasks take turns, after one untimed turn."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for repeat in range(_REPEATS + 1):
        for task, times in zip(tasks, seconds, strict=True):
            start = time.process_time()
            task()
            if repeat > 0:
                times.append(time.process_time() - start)
    return [statistics.median(times) for times in seconds]


def main() -> None:
    """Print millions of numbers per second and milliseconds per cohort, both on one core."""
    numpy_generator = np.random.default_rng()
    key = os.urandom(32)
    seconds = _median_seconds(
        lambda: words(key, _NORMALS),
        lambda: rounded_gaussian(key, _NORMALS, _STDDEV),
        lambda: numpy_generator.standard_normal(_NORMALS),
    )
    print(f"float64 or 64-bit numbers, {_NORMALS:,} at a time    million/s per core")
    labels = ("words", "rounded normals", "standard normals of numpy.random.Generator")
    for label, median in zip(labels, seconds, strict=True):
        print(f"  {label:<46}{_NORMALS / median / 1e6:>8.0f}")

    print(f"cohort of {_POPULATION:,} users                          ms per draw")
    probabilities = (1e-4, 0.01, 0.3, 1.0)
    draws = [partial(PoissonSampling(_POPULATION, q).draw, key) for q in probabilities]
    seconds = _median_seconds(*draws)
    for q, median in zip(probabilities, seconds, strict=True):
        print(f"  q = {q:<42}{1e3 * median:>8.1f}")


if __name__ == "__main__":
    main()
