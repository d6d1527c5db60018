"""What mkdocs is told beside its plugins; `make docs-build` builds the site itself."""

import doctest
import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # CI builds the site first, which installs mkdocs
HOOKS = Path(__file__).parents[1] / "docs" / "hooks.py"


@pytest.fixture(scope="module")
def hooks() -> object:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    spec = importlib.util.spec_from_file_location("hooks", HOOKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_of_the_hooks_hold(hooks: object) -> None:
    ran = doctest.testmod(hooks)
    assert (ran.failed, ran.attempted >= 3) == (0, True)


@pytest.mark.parametrize(
    ("page", "target", "kept"),
    [
        ("start.md", "data.md", True),
        ("start.md", "#install", True),
        ("start.md", "https://arxiv.org", True),
        ("tutorials/arrays.md", "../data.md", True),
        ("start.md", "../Makefile", False),
        ("tutorials/arrays.md", "../../tests/rooms.py", False),
    ],
)
def test_a_link_is_kept_unless_it_leaves_the_pages(
    hooks: object, page: str, target: str, kept: bool
) -> None:
    link = f"[this]({target})"
    assert (hooks.near_links(link, page) == link) is kept


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://a.b/c.js"></script>',
        '<link rel="stylesheet" href="https://a.b/c.css">',
        '<link rel="preconnect" href="//a.b">',
        '<img alt="x" src="http://a.b/c.png">',
    ],
)
def test_what_is_loaded_from_another_host_is_found(hooks: object, tag: str) -> None:
    assert len(hooks.loaded_from_afar(f"<p>{tag}</p>")) == 1
    assert hooks.loaded_from_afar('<a href="https://a.b">b</a><img src="images/c.png">') == []


def test_every_command_is_in_the_reference(hooks: object) -> None:
    text = hooks.commands()
    for name in ("simulate", "compare", "serve", "join", "ledger verify", "certs sign"):
        assert f"`fedpriv {name}`" in text
