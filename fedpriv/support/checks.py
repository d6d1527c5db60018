"""Checks that raise InvalidValueError, and conversion of numbers to Python's own types and to text.

Only this module turns privacy losses and noise into text. Rounding never makes a release look more
private than it is: ε, δ, probabilities and norms are rounded up; noise and lower bounds down.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from enum import StrEnum
from functools import cache, reduce, wraps
from inspect import signature
from numbers import Real
from operator import index, or_
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from fedpriv.errors import InvalidValueError, known_names

Name = TypeVar("Name", bound=StrEnum)
_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_PLAIN = (int, float, str, bool, NoneType)  # types that need no conversion


def check_types(**values: tuple[object, type | UnionType]) -> None:
    """Raise InvalidValueError for the first named value that is not of its type.

    >>> check_types(seed=(3, int | None), name=(3, str))
    Traceback (most recent call last):
    fedpriv.errors.InvalidValueError: name is of the type int; it must be of the type str
    """
    for name, (value, kind) in values.items():
        if not isinstance(value, kind):
            kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
            names = ["None" if t is NoneType else t.__name__ for t in kinds]
            raise InvalidValueError(
                f"{name} is {_type_of(value)}; it must be of the type {' or '.join(names)}"
            )


def checked_arguments(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Check arguments by their annotations, as `check_types` does, before a function is called.

    It does not check numbers, since NumPy's are legal too, nor types of elements.
    """
    kinds = {p.name: _kind_of(p.annotation) for p in signature(function).parameters.values()}

    @wraps(function)
    def checking(*args: _P.args, **options: _P.kwargs) -> _Result:
        for name, value in {**dict(zip(kinds, args, strict=False)), **options}.items():
            if (kind := kinds.get(name)) is not None:
                check_types(**{name: (value, kind)})
        return function(*args, **options)

    return checking


def check_fields(value: Any, *names: str) -> None:
    """Check some fields of a value, by default all, as `checked_arguments` checks arguments."""
    kinds = {f.name: _kind_of(f.type) for f in fields(value) if not names or f.name in names}
    check_types(**{name: (getattr(value, name), kind) for name, kind in kinds.items() if kind})


def _kind_of(annotation: Any) -> Any:
    """Return the classes of an annotation; None if it includes numbers, or is not a class."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = [get_origin(member) or member for member in members]
    checkable = all(isinstance(kind, type) and kind not in (int, float) for kind in kinds)
    return reduce(or_, kinds) if checkable else None


def _type_of(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    kind, home = type(value), type(value).__module__.partition(".")[0]
    place = "" if home in ("builtins", "fedpriv") else f" of {home}"
    return "None" if value is None else f"of the type {kind.__name__}{place}"


def named_value(kind: type[Name], name: str, value: object) -> Name:
    """Return the member of an enumeration with this value; InvalidValueError if there is none."""
    if not isinstance(value, str):
        raise InvalidValueError(f"{name} is {_type_of(value)}; {known_names('', kind)}")
    if value not in [*kind]:
        raise InvalidValueError(f"{name} is {value!r}; {known_names(value, kind)}")
    return kind(str(value))


def require(condition: bool, message: str) -> None:  # noqa: FBT001
    """Raise InvalidValueError with a message unless a condition holds."""
    if not condition:
        raise InvalidValueError(message)


def is_whole(value: object, most: float = math.inf) -> bool:
    """Return whether a value is a whole number from 1 to `most`; bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


_RANGES = {
    "whole": "a whole number of at least 1",
    "(0, inf)": "positive and finite",
    "[0, inf)": "finite and not negative",
}


def check_range(name: str, number: Any, legal: str) -> None:
    """Raise InvalidValueError unless a number is legal: in an interval, or "whole" and at least 1.

    A question mark at the end also allows None.

    >>> check_range("momentum", 1.0, "[0, 1)")
    Traceback (most recent call last):
    fedpriv.errors.InvalidValueError: momentum is 1.0; it must be in [0, 1)
    """
    if number is None and legal.endswith("?"):
        return
    legal = legal.removesuffix("?")
    if legal == "whole":
        valid = is_whole(number)
    else:
        low, high = map(float, legal[1:-1].split(","))
        closed = {"[": low}.get(legal[0]), {"]": high}.get(legal[-1])
        valid = isinstance(number, Real) and not isinstance(number, bool)
        valid = valid and (low < number < high or number in closed)
    require(valid, f"{name} is {number!r}; it must be {_RANGES.get(legal, f'in {legal}')}")


def check_ranges(value: object, of: str = "", **ranges: str) -> None:
    """Check fields of a value as `check_range` does; messages put `of` after their names."""
    for name, legal in ranges.items():
        check_range(f"{name}{of}", getattr(value, name), legal)


def check_seed(seed: object) -> None:
    """Raise InvalidValueError unless a value can seed torch's generator."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise InvalidValueError(f"seed is {seed!r}; it must be a whole number from 0 to 2⁶⁴ - 1")


def plain_numbers(value: Any, name: object = "a number") -> Any:
    """Convert numbers of NumPy and other libraries to Python's own, also in collections.

    This avoids 32-bit arithmetic and wrap-around, and lets files and messages hold every number.
    Other values are returned unchanged. A whole number outside the range of float raises
    InvalidValueError, which states `name`.
    """
    result = value
    if type(value) not in _PLAIN and not isinstance(value, str):
        if isinstance(value, Mapping):
            return {key: plain_numbers(content, key) for key, content in value.items()}
        if type(value) in (tuple, list):
            return type(value)(plain_numbers(element, name) for element in value)
        result = _plain_number(value)
    if type(result) is int and abs(result) > sys.float_info.max:
        raise InvalidValueError(
            f"{name} is a whole number of {result.bit_length()} bits; it must be within "
            f"±{sys.float_info.max:.2g}"
        )
    return result


def _plain_number(value: Any) -> Any:
    try:
        return index(value)  # TypeError unless it is whole
    except TypeError:
        return float(value) if isinstance(value, Real) else value


def hold_plain_numbers(value: object) -> None:
    """Apply `plain_numbers` to the fields of a frozen value, in its `__post_init__`."""
    for name, content in vars(value).items():
        if (number := plain_numbers(content, name)) is not content:
            object.__setattr__(value, name, number)


def hold_numbers(value: object) -> None:
    """Call `hold_plain_numbers` and raise InvalidValueError if a numeric field has no number."""
    hold_plain_numbers(value)
    kind: Any = type(value)
    for name, kinds in _numeric_fields(kind):
        number = getattr(value, name)
        if type(number) not in (*kinds, int):
            limit = "a number" if float in kinds else "a whole number"
            limit += " or None" if NoneType in kinds else ""
            raise InvalidValueError(f"{name} is {number!r}; it must be {limit}")


@cache
def _numeric_fields(kind: Any) -> list[tuple[str, tuple[type, ...]]]:
    """Return the numeric fields and their legal types; cached, since the lookup is slow."""
    types = [
        (f.name, get_args(f.type) if isinstance(f.type, UnionType) else (f.type,))
        for f in fields(kind)
    ]
    numeric = (int, float, NoneType)
    return [(name, kinds) for name, kinds in types if all(t in numeric for t in kinds)]


def text_up(value: float, digits: int = 6) -> str:
    """Return a number to some significant digits, rounded up: δ, a probability or a norm.

    >>> text_up(1.2341e-6, 3), text_up(1 / 3), text_up(0.1)
    ('1.24e-06', '0.333334', '0.1')
    """
    return _text(value, digits, ROUND_CEILING)


def text_down(value: float) -> str:
    """Return a noise multiplier or standard deviation to six digits, rounded down.

    The price of the printed noise is never below the price of the noise itself.

    >>> text_down(4.4509876), text_down(0.5)
    ('4.45098', '0.5')
    """
    return _text(value, 6, ROUND_FLOOR)


def percent_up(share: float) -> str:
    """Return a probability as a percentage of three digits, rounded up.

    >>> percent_up(0.63312), percent_up(0.00229), percent_up(1.0)
    ('63.4%', '0.229%', '100%')
    """
    return f"{_text(float(share), 3, ROUND_CEILING, scale=2)}%"


def epsilon_up(epsilon: float) -> str:
    """Return ε to three decimals, or to three digits if it is tiny or huge, rounded up.

    >>> epsilon_up(1.9991), epsilon_up(0.0), epsilon_up(math.inf), epsilon_up(1.2341e-9)
    ('2.000', '0.000', '∞', '1.24e-09')
    """
    return _epsilon(epsilon, ROUND_CEILING)


def epsilon_down(epsilon: float) -> str:
    """Return a lower bound on ε, or the ε left in a budget, as `epsilon_up` but rounded down.

    >>> epsilon_down(1.9999), epsilon_down(5.678e-4), epsilon_down(-0.5)
    ('1.999', '0.000567', '0.000')
    """
    return _epsilon(max(epsilon, 0.0), ROUND_FLOOR)


def _epsilon(value: float, rounding: str) -> str:
    if math.isinf(value):
        return "∞"
    if value and not 0.001 <= value < 1e9:
        return _text(value, 3, rounding)
    return str(Decimal(repr(float(value))).quantize(Decimal("0.001"), rounding))


def _text(value: float, digits: int, rounding: str, scale: int = 0) -> str:
    # Digits are cut off exactly from the shortest text that reads as this float.
    number = Decimal(repr(float(value))).scaleb(scale)
    return f"{float(Context(prec=digits, rounding=rounding).plus(number)):.{digits}g}"
