"""What `make house` counts, and the files that a round passes through."""

from pathlib import Path

import pytest

from tests import house, rooms
from tests.house import Module

SOURCE = '''"""Says what it is,

at length.
"""
import os  # a comment
# another

from package import module
from package.module import name

if TYPE_CHECKING:
    import never


class One:
    """Says so."""

    text = """one
    two"""


def _own(): return 1


def two():
    import late
'''


def module_of(folder: Path, source: str, name: str = "package.here") -> Module:
    path = folder / f"{name}.py"
    path.write_text(source)
    return Module(name, path)


def test_code_lines_are_those_that_hold_code(tmp_path: Path) -> None:
    module = module_of(tmp_path, SOURCE)
    assert module.code_lines == 11
    assert list(module.public_names) == ["One", "two"]
    imported = {"os", "package", "package.module", "package.module.name"}
    assert {*module.imported} == imported


def test_a_circle_is_found(tmp_path: Path) -> None:
    one = module_of(tmp_path, "from package.b import name", "package.a")
    other = module_of(tmp_path, "from package import c", "package.b")
    last = module_of(tmp_path, "import os", "package.c")
    face = module_of(tmp_path, "from package import a", "package")
    assert house.circle([one, other, last, face]) == []
    last = module_of(tmp_path, "import package.a", "package.c")
    assert {*house.circle([one, other, last, face])} == {"package.a", "package.b", "package.c"}


def test_the_product_is_counted_once() -> None:
    names = [module.name for module in house.product()]
    assert len(names) == len({*names})
    assert {"fedpriv.cli", "fedpriv.server.service", "fedpriv.clients.worker"} <= {*names}


@pytest.mark.slow
@pytest.mark.parametrize("where", rooms.MOST)
def test_a_round_passes_through_few_files(where: str, tmp_path: Path) -> None:
    files = rooms.files_of_a_round(where, tmp_path)
    assert 0 < len(files) <= rooms.MOST[where], files
