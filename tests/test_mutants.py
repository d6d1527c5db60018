"""The list of mutants fits the code, and the runner tells those that tests notice from others."""

import ast
import tempfile
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
    text = (ROOT / mutant.file).read_text("utf-8")
    edited = mutant.applied(text)
    assert ast.dump(ast.parse(edited)) != ast.dump(ast.parse(text))
    assert mutant.tests
    for target in mutant.tests:
        file, *names = target.split("::")
        tests = (ROOT / file).read_text("utf-8")
        assert all(f" {name}(" in tests or f"class {name}" in tests for name in names), target


def test_what_to_find_is_there_once() -> None:
    for found in ("a - b", "a"):
        with pytest.raises(ListError, match="times, not once"):
            mutant(found, "b").applied(ADDING)


def mutant(find: str, replace: str, target: str = "tests/test_adding.py") -> Mutant:
    return Mutant(f"{find} is {replace}", "fedpriv/adding.py", find, replace, (target,))


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
    return root


@pytest.mark.parametrize(
    ("mutants", "code", "said"),
    [
        ([mutant("a + b", "a - b")], 0, "1 mutants killed, 0 survived, 0 wrong"),
        ([mutant("a + b", "a * b"), mutant("a + b", "0")], 1, "1 mutants killed, 1 survived"),
        ([mutant("a + b", "a +")], 2, "0 mutants killed, 0 survived, 1 wrong"),
        ([mutant("a / b", "a")], 2, "fedpriv/adding.py has what to find 0 times"),
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
