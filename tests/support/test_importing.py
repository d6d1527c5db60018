"""Tests of what a configuration names by import path."""

import collections
from pathlib import Path

import pytest

from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.support.importing import call_imported, check_options, import_function, raised_with


def test_functions_and_classes_are_found() -> None:
    assert import_function("it", "collections:OrderedDict", ModelError) is collections.OrderedDict
    assert (
        import_function("it", "fedpriv.support.importing:check_options", ModelError)
        is check_options
    )


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("collections", "it is not of the form package.module:function"),
        ("collections:", "it is not of the form"),
        ("collections:Orderedict", "did you mean 'OrderedDict'"),
        ("collections:__doc__", "has no function '__doc__'"),
        ("no_such_module:f", "it cannot be imported: No module named"),
        ("collections/abc:f", "it is not of the form package.module:function"),
        (".collections:f", "it is not of the form"),
        ("", "it is not of the form"),
    ],
)
@pytest.mark.parametrize("error", [DataError, ModelError])
def test_what_is_not_there_is_one_sentence_of_the_error_asked_for(path, sentence, error) -> None:
    with pytest.raises(error, match=sentence):
        import_function("it", path, error)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("\nx = 1 / 0", r"ZeroDivisionError at .*broken.py:2$"),
        ("raise ValueError('secret')", r"ValueError at .*broken.py:1$"),
        ("\nraise SystemExit(0)", r"SystemExit at .*broken.py:2$"),
        ("def net(:", "SyntaxError: .*broken.py, line 1"),
    ],
)
def test_a_module_that_does_not_run_is_one_sentence_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, sentence: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=f"it cannot be imported: {sentence}") as error:
        import_function("it", "broken:net", ModelError)
    assert "\n" not in str(error.value)


def options(first: int, *, second: int = 2) -> int:
    return first + second


def anything(**given: int) -> int:
    return len(given)


def test_options_are_those_of_the_signature() -> None:
    for function, names in [(options, ["first"]), (options, ["second", "first"]), (anything, "ab")]:
        check_options("it", function, names, ModelError)
    with pytest.raises(ModelError, match="it has no option 'secnd'"):
        check_options("it", options, ["first", "secnd"], ModelError)
    with pytest.raises(InvalidValueError, match="it needs the option 'first'"):
        check_options("it", options, [], InvalidValueError)
    check_options("it", dict, ["any"], ModelError)  # it has no signature


def raising(kind: type[BaseException]) -> int:
    raise kind("two\nlines")


def test_what_a_function_raises_is_one_sentence_that_says_where() -> None:
    assert call_imported("it", options, {"first": 1}, ModelError) == 3
    with pytest.raises(ModelError, match=r"it cannot be made: KeyError at \S*\.py:\d+$"):
        call_imported("it", raising, {"kind": KeyError}, ModelError)
    with pytest.raises(ModelError, match=r"it cannot be made: SystemExit at \S*\.py:\d+$"):
        call_imported("it", raising, {"kind": SystemExit}, ModelError)
    with pytest.raises(ModelError, match=r"it cannot be made: ValueError at .*:\d+: two lines$"):
        call_imported("it", raising, {"kind": ValueError}, ModelError, raised_with)


@pytest.mark.parametrize("kind", [InvalidValueError, FileNotFoundError, MemoryError])
def test_errors_that_have_a_sentence_of_their_own_pass(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^two\nlines$"):
        call_imported("it", raising, {"kind": kind}, ModelError)
