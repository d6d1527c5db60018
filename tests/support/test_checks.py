"""Checks of arguments by their annotations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import check_fields, checked_arguments


@checked_arguments
def called(
    path: Path | str | None,
    make: Path | Callable[[int], Path] = Path(),
    *,
    rows: Sequence[int] = (),
    count: int | None = None,
    word: Literal["a", "b"] = "a",
    quiet: bool = False,
) -> tuple[object, ...]:
    """Return the arguments."""
    return path, make, rows, count, word, quiet


def test_legal_arguments_arrive_unchanged() -> None:
    count, make = np.int64(3), lambda _: Path()
    given: Any = {"make": make, "rows": [1], "count": count, "quiet": True}
    assert called("x", **given) == ("x", make, [1], count, "a", True)
    assert called(None, Path("y"))[:2] == (None, Path("y"))


@pytest.mark.parametrize(
    ("positional", "named", "said"),
    [
        ((3,), {}, "path is of the type int; it must be of the type Path or str or None"),
        (("x", 3), {}, "make is of the type int; it must be of the type Path or Callable"),
        (("x",), {"rows": 3}, "rows is of the type int; it must be of the type Sequence"),
        (("x",), {"quiet": 1}, "quiet is of the type int; it must be of the type bool"),
    ],
)
def test_arguments_of_other_types_are_named(
    positional: tuple[Any, ...], named: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidValueError) as raised:
        called(*positional, **named)
    assert str(raised.value) == said


@dataclass(frozen=True)
class Held:
    """A value with fields of several types."""

    rows: Sequence[int]
    by_name: Mapping[str, int] | None = None
    count: int = 0


def test_fields_of_other_types_are_named() -> None:
    check_fields(Held([1], {}, np.int64(3)))
    check_fields(Held(3, 4), "count")  # type: ignore[arg-type]
    for held, said in (
        (Held(3), "rows is of the type int; it must be of the type Sequence"),
        (Held((), 4), "by_name is of the type int; it must be of the type Mapping or None"),
    ):
        with pytest.raises(InvalidValueError) as raised:
            check_fields(held)
        assert str(raised.value) == said
        with pytest.raises(InvalidValueError):
            check_fields(held, "rows", "by_name")


def test_unknown_arguments_are_those_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"called\(\) got an unexpected keyword argument 'rowz'"):
        called("x", rowz=[1])  # type: ignore[call-arg]
