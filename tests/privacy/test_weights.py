"""Weights of users and the constants that averages are divided by."""

import math

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import MOST_WEIGHT
from fedpriv.privacy.gaussian_mechanism import Averaging


@pytest.mark.parametrize("cap", [0, -3, MOST_WEIGHT + 1])
def test_a_cap_is_from_one_to_two_to_the_31(cap: int) -> None:
    with pytest.raises(InvalidValueError, match=f"cap of the weights is {cap}"):
        Averaging(cap, 3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cap": 5}, "it must have both"),
        ({"total_weight": 3.0}, "it must have both"),
        ({"cap": 5, "total_weight": 0.0}, "total_weight is 0.0"),
        ({"cap": 5, "total_weight": -1.0}, "total_weight is -1.0"),
        ({"cap": 5, "total_weight": math.inf}, "total_weight is inf"),
        ({"cap": 5, "total_weight": math.nan}, "total_weight is nan"),
        ({"floor": 0.0}, "floor is 0.0"),
        ({"floor": 1.5}, "floor is 1.5"),
        ({"floor": math.nan}, "floor is nan"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Averaging(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"cap": 1, "total_weight": 1e-9},
        {"cap": MOST_WEIGHT, "total_weight": 1e9},
        {"floor": 1.0},
        {"cap": 5, "total_weight": 30.0, "floor": 0.5},
    ],
)
def test_what_fits_is_kept(arguments: dict[str, object]) -> None:
    averaging = Averaging(**arguments)
    for name in ("cap", "total_weight", "floor"):
        assert getattr(averaging, name) == arguments.get(name)
