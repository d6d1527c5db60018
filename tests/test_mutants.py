"""The list of mutants fits the code, and the runner tells those that tests notice from others."""

import ast
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import ROOT, ListError, Mutant, listed, run

MUTANTS = listed()
ADDING = '"""Adding."""\n\n\ndef added(a: int, b: int) -> int:\n    return a + b\n'
TESTS = """
from fedpriv.adding import added


def test_of_a_sum():
    assert added(2, 2) == 4
"""


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_is_another_program_and_names_tests_that_there_are(mutant: Mutant) -> None:
    text = read(mutant.file)
    assert ast.dump(ast.parse(mutant.applied(text))) != program(mutant.file)
    assert mutant.tests
    for target in mutant.tests:
        file, *names = target.split("::")
        tests = read(file)
        assert all(f" {name}(" in tests or f"class {name}" in tests for name in names), target


@cache
def read(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


@cache
def program(file: str) -> str:
    return ast.dump(ast.parse(read(file)))


def mutant(
    find: str, put: str, target: str = "tests/test_adding.py", how: str = "replace"
) -> Mutant:
    return Mutant(f"{how} {find}", "fedpriv.adding:added", how, find, put, (target,))


PLACES = """
LIMIT, SPARE = 4, 1


class Box:
    size: int = 4

    def fits(self, ε: int) -> bool:
        if (
            ε > self.size
            or ε > LIMIT
        ):
            self.size += 4
            print(4)
        return ε < 4

    class Lid:
        def fits(self) -> bool:
            return True


def twice() -> int: ...


def twice() -> int: ...
"""


CONDITION = """
            ε > self.size
            or ε > LIMIT
"""


@pytest.mark.parametrize(
    ("place", "how", "find", "put", "before", "after"),
    [
        ("LIMIT", "replace", "4", "5", "SPARE = 4", "SPARE = 5"),
        ("Box.size", "replace", "4", "5", "int = 4", "int = 5"),
        ("Box.fits", "replace", "self.size or ε", "ε", CONDITION, f"\n{12 * ' '}ε > ε > LIMIT\n"),
        ("Box.fits", "never", "LIMIT", "", CONDITION, f"\n{12 * ' '}False\n"),
        ("Box.fits", "replace", "print", "ε = 1\nprint", "print", f"ε = 1\n{12 * ' '}print"),
        ("Box.fits", "drop", "print", "", "print(4)", "pass"),
        ("Box.Lid.fits", "replace", "True", "False", "True", "False"),
    ],
)
def test_an_edit_is_made_in_its_place_alone(
    place: str, how: str, find: str, put: str, before: str, after: str
) -> None:
    edited = Mutant("of a test", f"fedpriv.boxes:{place}", how, find, put, ()).applied(PLACES)
    assert edited == PLACES.replace(before, after)


@pytest.mark.parametrize(
    ("place", "how", "find", "said"),
    [
        ("Box.fits", "replace", "ε", "4 times"),
        ("Box.fits", "replace", "size_", "0 times"),
        ("Box.fits", "replace", "siz", "0 times"),
        ("Box.lid", "replace", "True", "Box.lid is defined 0 times"),
        ("twice", "drop", "...", "twice is defined 2 times"),
        ("Box.fits", "never", "print", "no condition"),
        ("Box.fits", "delete", "print", "'delete'"),
    ],
)
def test_a_place_or_a_text_that_is_not_there_once_is_refused(
    place: str, how: str, find: str, said: str
) -> None:
    with pytest.raises(ListError, match=said):
        Mutant("of a test", f"fedpriv.boxes:{place}", how, find, "", ()).applied(PLACES)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one test; what is temporary is in a folder beside it."""
    root, scratch = tmp_path / "project", tmp_path / "scratch"
    files = {"pyproject.toml": "", "fedpriv/__init__.py": "", "fedpriv/adding.py": ADDING}
    for name, text in {**files, "tests/test_adding.py": TESTS}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each mutant starts pytest anew
    return root


@pytest.mark.parametrize(
    ("mutants", "code", "said"),
    [
        ([mutant("a + b", "a - b")], 0, "1 mutants killed, 0 survived, 0 wrong"),
        ([mutant("a + b", "a * b"), mutant("a + b", "0")], 1, "1 mutants killed, 1 survived"),
        ([mutant("a + b", "a +")], 2, "0 mutants killed, 0 survived, 1 wrong"),
        ([mutant("a / b", "a")], 2, "fedpriv.adding:added has 'a / b' 0 times"),
        ([mutant("a + b", "a", "tests/test_adding.py::test_of_none")], 2, "pytest ends with 4"),
    ],
    ids=["killed", "survived", "no program", "not found", "no test"],
)
def test_the_runner_says_what_came_of_mutants(
    project: Path,
    mutants: list[Mutant],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(project, mutants, jobs=2) == code
    assert said in capsys.readouterr().out
    assert (project / "fedpriv/adding.py").read_text() == ADDING
    assert not any((project.parent / "scratch").iterdir())


def test_tests_that_fail_without_an_edit_notice_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "fedpriv/adding.py").write_text(ADDING.replace("a + b", "a + b + 1"))
    assert run(project, [mutant("a + b", "a - b")], jobs=1) == 1
    assert "without any edit, pytest ends with 1" in capsys.readouterr().out
