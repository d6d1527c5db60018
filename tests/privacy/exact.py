"""Clipping as it is defined, in fractions and without any rounding."""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

LARGEST_SQUARE = Fraction(2) ** 1024
"""Sums of squares from here on are more than float64 holds."""


def fractions(numbers: Iterable[float]) -> list[Fraction]:
    return [Fraction(float(number)) for number in numbers]


def square(numbers: Iterable[int | Fraction]) -> int | Fraction:
    """‖v‖²."""
    return sum(number * number for number in numbers)


def squares(numbers: Iterable[int]) -> int:
    """Σaᵢ² of NumPy's integers, as one of Python's."""
    return int(square(int(number) for number in numbers))


def roots_of(number: int) -> list[int]:
    """A few integers whose squares add up to a number, the largest first."""
    roots: list[int] = []
    while number:
        roots.append(math.isqrt(number))
        number -= roots[-1] ** 2
    return roots


def steps_of(clipping_norm: float) -> tuple[Fraction, int]:
    """γ and B."""
    step = Fraction(1)
    while step > Fraction(clipping_norm) / 2**24:
        step /= 2
    while 2 * step <= Fraction(clipping_norm) / 2**24:
        step *= 2
    return step, math.floor((Fraction(clipping_norm) / step) ** 2)


def clipped(
    vector: Sequence[Fraction], clipping_norm: float, weight: Fraction = Fraction(1)
) -> list[int]:
    """trunc(w·π_S(v)/γ)."""
    step, _ = steps_of(clipping_norm)
    length = square(vector) / step**2
    limit = Fraction(clipping_norm) ** 2 / step**2
    shrunk = min(Fraction(1), limit / length) if length else Fraction(1)
    # The floor of a root is the integer root of the floor.
    sizes = [math.isqrt(math.floor((weight * v / step) ** 2 * shrunk)) for v in vector]
    return [-size if v < 0 else size for v, size in zip(vector, sizes, strict=True)]


def agree(found: Sequence[int], expected: Sequence[int], *, shortened: bool) -> bool:
    """Whether integers are the exact ones but for rounding.

    That is, up to 1; and, where the vector was shortened, up to 2^-22 of them towards zero, since
    the factor has few bits.
    """
    for a, exact in zip(found, expected, strict=True):
        size = int(a) * (1 if exact >= 0 else -1)
        least = abs(exact) * (1 - Fraction(1, 2**22)) - 1 if shortened else abs(exact) - 1
        if not least <= size <= abs(exact) + 1:
            return False
    return True
