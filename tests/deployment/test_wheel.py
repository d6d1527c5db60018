"""The wheel and the source archive hold one package, with server and clients inside it."""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedpriv.experiment.bundled import NAMES

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta

folder = sys.argv[1]  # which building replaces
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from what the repository tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "--",
            "MANIFEST.in",
            "CHANGELOG.md",
            "CITATION.cff",
            "SECURITY.md",
            "constraints.txt",
            "tests/test_docs.py",
            "pyproject.toml",
            "README.md",
            "LICENSE",
            *PACKAGES,
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            copy.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD, out], cwd=source, capture_output=True, check=True)
    return out


PACKAGES = ("fedpriv", "server", "clients")


def expected() -> set[str]:
    return {
        f"fedpriv/{top}/{path.name}" for top in PACKAGES[1:] for path in (ROOT / top).glob("*.py")
    }


def modules(names: Iterable[str]) -> set[str]:
    tops = ("fedpriv/server/", "fedpriv/clients/")
    return {name for name in names if name.startswith(tops) and name.endswith(".py")}


def test_the_wheel_holds_one_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedpriv"}
    assert modules(names) == expected()
    assert {f"fedpriv/experiment/bundled/{name}.toml" for name in NAMES} <= names
    templates = {path.name for path in (ROOT / "fedpriv/report/templates").iterdir()}
    assert {Path(name).name for name in names if "/templates/" in name} == templates


def test_the_source_archive_holds_files_in_place_of_links(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        members = [member for member in file.getmembers() if not member.isdir()]
    assert all(member.isfile() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert modules(names) == expected()
    assert {f"fedpriv/experiment/bundled/{name}.toml" for name in NAMES} <= names
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "constraints.txt"} <= names
    tops = {name.partition("/")[0] for name in names if "/" in name}
    assert tops == {"fedpriv", "fedpriv.egg-info"}
    assert max(member.size for member in members) < 100_000


def needed(wheel: Path) -> list[Distribution]:
    """The installed packages that a wheel requires, and those that they require, without extras."""
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        text = file.read(metadata).decode()
    found: dict[str, Distribution] = {}
    waiting = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    for required in map(Requirement, waiting):
        wanted = required.marker is None or required.marker.evaluate({"extra": ""})
        if wanted and required.name.lower() not in found:
            found[required.name.lower()] = package = distribution(required.name)
            assert required.specifier.contains(package.version, prereleases=True), required
            waiting += package.requires or []
    return list(found.values())


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it requires, and nothing else."""
    (wheel,) = built.glob("*.whl")
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    for package in needed(wheel):
        tops = {file.parts[0] for file in package.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(package.locate_file(top))).resolve())
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    return python


def says(clean: Path, folder: Path, *arguments: str | Path) -> str:
    """What a program of the environment prints in a folder; it must succeed."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "120"}
    done = subprocess.run(
        [clean.with_name(str(arguments[0])), *arguments[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_start_works_with_the_wheel_alone(clean: Path, tmp_path: Path) -> None:
    place = says(clean, tmp_path, "python", "-c", "import fedpriv; print(fedpriv.__file__)")
    assert Path(place.strip()).is_relative_to(clean.parents[1])
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    last = says(clean, tmp_path, "python", "mine.py").splitlines()[-1]
    accuracy = re.fullmatch(r"accuracy ([0-9.]+)% at ε = 2\.00", last)
    assert accuracy
    assert float(accuracy[1]) > 80
    assert "report.html" in says(clean, tmp_path, "fedpriv", "report", "runs/first")
    assert "intact: 50 charges" in says(
        clean, tmp_path, "fedpriv", "ledger", "verify", "runs/first/ledger.sqlite"
    )
    few = ("--set", "rounds=2", "--out", "run")
    printed = says(clean, tmp_path, "fedpriv", "simulate", "digits", *few)
    assert re.search(r"user-level \(ε, δ\) +│ \((2\.000|1\.99\d), 0\.001\)", printed)
