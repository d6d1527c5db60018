"""Checks of values, which raise InvalidValueError, and numbers as Python's own."""

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from functools import cache
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

from fedpriv.errors import InvalidValueError, known_names

Name = TypeVar("Name", bound=StrEnum)

_PLAIN = (int, float, str, bool, NoneType)  # types of values that are plain already


def check_types(**given: tuple[object, type | UnionType]) -> None:
    """Refuse the first of these values, by name and with what it must be, that is something else.

    >>> check_types(seed=(3, int | None), name=(3, str))
    Traceback (most recent call last):
    fedpriv.errors.InvalidValueError: name is of the type int; it must be of the type str
    """
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            legal = kind.__args__ if isinstance(kind, UnionType) else (kind,)
            names = ["None" if each is NoneType else each.__name__ for each in legal]
            raise InvalidValueError(
                f"{name} is {_type_of(value)}; it must be of the type {' or '.join(names)}"
            )


def _type_of(value: object) -> str:
    return "None" if value is None else f"of the type {type(value).__name__}"


def named_value(kind: type[Name], name: str, value: object) -> Name:
    """The member of an enumeration that a value is, or is the text of."""
    if not isinstance(value, str):
        raise InvalidValueError(f"{name} is {_type_of(value)}; {known_names('', kind)}")
    if value not in [*kind]:
        raise InvalidValueError(f"{name} is {value!r}; {known_names(value, kind)}")
    return kind(str(value))


def require(holds: bool, sentence: str) -> None:  # noqa: FBT001
    """Raise InvalidValueError with a sentence unless a condition holds."""
    if not holds:
        raise InvalidValueError(sentence)


def is_whole(value: object, most: float = math.inf) -> bool:
    """Whether a value is a whole number, from 1 to `most`; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def check_seed(seed: object) -> None:
    """Refuse what is no seed of torch's generator."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise InvalidValueError(f"seed is {seed!r}; it must be a whole number from 0 to 2⁶⁴ - 1")


def plain_numbers(value: Any, name: object = "a number") -> Any:
    """A value with numbers of NumPy and other libraries as Python's own, also in what it lists.

    So nothing is computed in 32 bits or wraps around, and files and messages can hold every number.
    What is no number stays as it is. A whole number that no float holds is an InvalidValueError,
    which says its `name`.
    """
    found = value
    if type(value) not in _PLAIN and not isinstance(value, str):
        if isinstance(value, Mapping):
            return {key: plain_numbers(inner, key) for key, inner in value.items()}
        if type(value) in (tuple, list):
            return type(value)(plain_numbers(each, name) for each in value)
        found = _plain_number(value)
    if type(found) is int and abs(found) > sys.float_info.max:
        raise InvalidValueError(
            f"{name} is a whole number of {found.bit_length()} bits; it must be within "
            f"±{sys.float_info.max:.2g}"
        )
    return found


def _plain_number(value: Any) -> Any:
    try:
        return index(value)  # TypeError if it is none
    except TypeError:
        return float(value) if isinstance(value, Real) else value


def hold_plain_numbers(value: object) -> None:
    """Make the fields of a frozen value `plain_numbers`, for its `__post_init__`."""
    for name, held in vars(value).items():
        if (plain := plain_numbers(held, name)) is not held:
            object.__setattr__(value, name, plain)


def hold_numbers(value: object) -> None:
    """`hold_plain_numbers`, and refuse what is no number in a field of whole or other numbers."""
    hold_plain_numbers(value)
    kind: Any = type(value)
    for name, kinds in _numeric_fields(kind):
        held = getattr(value, name)
        if type(held) not in (*kinds, int):
            legal = "a number" if float in kinds else "a whole number"
            legal += " or None" if NoneType in kinds else ""
            raise InvalidValueError(f"{name} is {held!r}; it must be {legal}")


@cache
def _numeric_fields(kind: Any) -> list[tuple[str, tuple[type, ...]]]:
    """Fields of whole or other numbers, and the types they may have: found once, as it is slow."""
    found = [(field.name, get_args(field.type) or (field.type,)) for field in fields(kind)]
    numeric = (int, float, NoneType)
    return [(name, kinds) for name, kinds in found if all(each in numeric for each in kinds)]
