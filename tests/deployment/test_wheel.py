"""The wheel and the source archive hold one package, with server and clients inside it."""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedpriv.experiments import NAMES

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
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "simulations/*.toml",
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
    assert {f"fedpriv/experiments/{name}.toml" for name in NAMES} <= names
    templates = {path.name for path in (ROOT / "fedpriv/report/templates").iterdir()}
    assert {Path(name).name for name in names if "/templates/" in name} == templates


def test_the_source_archive_holds_files_in_place_of_links(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        members = [member for member in file.getmembers() if not member.isdir()]
    assert all(member.isfile() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert modules(names) == expected()
    assert {f"fedpriv/experiments/{name}.toml" for name in NAMES} <= names
