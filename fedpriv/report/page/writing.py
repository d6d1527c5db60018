"""Writing a page: templates, the plotting library inside, and no way out to a network."""

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fedpriv.errors import InvalidValueError
from fedpriv.report.page.content import Page

_TEMPLATES = files("fedpriv.report.page") / "templates"


def render(page: Page) -> str:
    """One HTML page with all that it needs inside.

    Guarantees: text of the content is text, whatever it holds; browsers run no script but the
    library and ours, whose hashes the page names, and open no connection (Content Security Policy).
    """
    environment = Environment(
        autoescape=True,
        loader=PackageLoader("fedpriv.report.page"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["as_data"] = lambda text: Markup(_as_data(text))
    scripts = [get_plotlyjs(), _TEMPLATES.joinpath("page.js").read_text(encoding="utf-8")]
    return environment.get_template("page.html.j2").render(
        page=page,
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        style=Markup(_TEMPLATES.joinpath("page.css").read_text(encoding="utf-8")),
    )


def write_page(text: str, path: Path) -> None:
    """Write a page, whole or not at all; a file that is there is replaced.

    Raises:
        InvalidValueError: it cannot be written.
    """
    try:
        with NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(text)
        written = Path(file.name)
        written.chmod(0o644)
        written.replace(path)
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be written: {error.strerror}") from error


def _policy(scripts: list[str]) -> str:
    """A policy under which only these scripts run, and nothing is fetched."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _as_data(text: str) -> str:
    """JSON that can stand in a page: nothing in it can end the element around it."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
