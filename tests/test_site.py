"""What mkdocs is told beside its plugins; `make docs-build` builds the site itself."""

import doctest
import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import browsing

pytestmark = pytest.mark.slow  # CI builds the site first, which installs mkdocs
ROOT = Path(__file__).parents[1]
HOOKS = ROOT / "docs" / "hooks.py"
SITE = ROOT / "build" / "site"


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


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    """Where the site that was built last is served."""
    if not (SITE / "index.html").exists():
        pytest.skip("the site was not built; `make docs-build` does")
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_search_finds_pages_on_a_phone_without_another_host(address: str, tmp_path: Path) -> None:
    with browsing(tmp_path) as tab:
        size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.call("Page.navigate", url=f"{address}/index.html?q=clipping+norm")
        tab.wait_for("document.querySelectorAll('.md-search-result__item').length > 3")
        for page in ("start", "notebooks/clippings", "reference/api", "configuration"):
            tab.call("Page.navigate", url=f"{address}/{page}.html")
            there = f"location.pathname == '/{page}.html' && document.readyState == 'complete'"
            tab.wait_for(there)
            assert tab.evaluate("document.documentElement.scrollWidth") == 390, page
        assert tab.complaints() == []
        asked = [url for url in tab.requested() if not url.startswith("data:")]
        assert [url for url in asked if not url.startswith(address)] == []
