"""Numbers as text: always rounded to the private side, and by one place in the product alone."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedpriv.accounting import epsilon, poisson_gaussian
from fedpriv.support.checks import epsilon_down, epsilon_up, percent_up, text_down, text_up
from tests.house import ROOT, product

numbers = st.floats(1e-300, 1e300)


@given(numbers, st.integers(2, 9))
@example(0.1, 3)
@example(2.0000000000000004, 6)
def test_numbers_are_rounded_up_by_less_than_their_last_digit(number: float, digits: int) -> None:
    shown = float(text_up(number, digits))
    assert number <= shown <= number * (1.0 + 10.0 ** (1 - digits))


@given(numbers)
@example(4.4509876)
@example(1.9999999999999998)
def test_noise_is_rounded_down_by_less_than_its_last_digit(number: float) -> None:
    shown = float(text_down(number))
    assert number * (1.0 - 1e-5) <= shown <= number


@given(st.floats(0.0, 1e300))
@example(1.9991)
@example(0.0009999)
def test_an_epsilon_is_between_its_two_texts(number: float) -> None:
    low, up = float(epsilon_down(number)), float(epsilon_up(number))
    assert low <= number <= up
    assert up - low <= max(1.001e-3, 0.0101 * number)


@given(st.floats(0.0, 1.0))
@example(0.57)  # 100 times this float is 56.99999999999999
def test_percentages_are_rounded_up(share: float) -> None:
    shown = percent_up(share)
    assert share <= float(shown.removesuffix("%")) / 100.0 * (1.0 + 1e-15)
    assert float(shown.removesuffix("%")) <= 101.0 * share


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (text_up, "inf"),
        (epsilon_up, "∞"),
        (epsilon_down, "∞"),
    ],
)
def test_infinity_is_a_text(text: Callable[[float], str], shown: str) -> None:
    assert text(float("inf")) == shown


@pytest.mark.parametrize("z", [4.4509876, 4.45099999, 0.870049])
def test_noise_that_is_read_from_text_is_priced_no_lower(z: float) -> None:
    charged = epsilon([poisson_gaussian(0.3, z, count=100)], 1e-3).epsilon
    read = epsilon([poisson_gaussian(0.3, float(text_down(z)), count=100)], 1e-3).epsilon
    assert charged <= read <= charged * (1.0 + 1e-4)


# Names of privacy losses, of noise, and of what prices them.
LOSSES = {"advantage", "cost", "delta", "epsilon", "epsilon_low", "epsilon_of", "spent"}
NOISE = {"mu", "mu_low", "noise_multiplier", "noise_stddev", "sigma", "z"}
PRIVATE = LOSSES | NOISE | {"q", "sampling_probability"}


def last_name(value: ast.expr) -> str:
    """The last name of an expression: c of a.b.c, of a.c() and of a.c / b."""
    match value:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Call(function):
            return last_name(function)
        case ast.BinOp(left):
            return last_name(left)
        case ast.IfExp(body):
            return last_name(body)
    return ""


def formatted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and texts of private numbers that a format rounds to nearest."""
    for node in ast.walk(tree):
        match node:
            case ast.FormattedValue(value, format_spec=ast.JoinedStr()):
                given = [value]
            case ast.Call(ast.Name("format" | "round"), [value, _]):
                given = [value]
            case ast.Call(ast.Attribute(ast.Constant(str()), "format"), given):
                pass
            case ast.BinOp(ast.Constant(str()), ast.Mod(), value):
                given = value.elts if isinstance(value, ast.Tuple) else [value]
            case _:
                continue
        for value in given:
            if last_name(value) in PRIVATE:
                yield value.lineno, ast.unparse(value)


# Not spent: the ε that somebody asks a study for, whose text is part of paths, and a key.
ASKED = {
    "target.epsilon", "self.target.epsilon", "arm.summary.target.epsilon", "cell.target.epsilon",
}  # fmt: skip


def test_no_other_place_of_the_product_rounds_such_numbers() -> None:
    found = [
        f"{module.path.relative_to(ROOT)}:{line}: {text}"
        for module in product()
        for line, text in formatted(module.tree)
        if text not in ASKED
    ]
    assert not found


def test_texts_of_reports_round_no_such_number() -> None:
    texts = Path(ROOT, "fedpriv", "report", "templates", "texts.toml").read_text("utf-8")
    rounded = re.findall(r"\{(\w+):[^}]+\}", texts)
    assert rounded
    # The ε of a chart of a study is the one asked for.
    assert PRIVATE & set(rounded) <= {"epsilon"}
    assert texts.count("{epsilon:") == 1


@pytest.mark.parametrize(
    "code",
    [
        'f"{loss.epsilon:.4g}"',
        'f"{budget.epsilon_of(spent):g}"',
        'f"{stddev} {plan.noise_multiplier / 2:.6g}"',
        'format(z, ".3f")',
        "round(event.delta, 3)",
        '"%.3f" % sigma',
        '"{:.3f}".format(cost)',
    ],
)
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert [*formatted(ast.parse(code))]
