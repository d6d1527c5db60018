"""Pages: sections of text, tables and charts as one HTML file that opens without a network."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedpriv import __version__
from fedpriv.errors import InvalidValueError
from fedpriv.report.charts import Chart, embedded, library, texts
from fedpriv.report.tables import Table
from fedpriv.support.disk import write_atomically, writing

_DOCTYPE = b"<!doctype html>"
_TEMPLATES = files("fedpriv.report") / "templates"


@dataclass(frozen=True)
class Card:
    """A number that a reader looks for first, and a note on it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PageSection:
    """A section of a page; a page omits its empty parts."""

    name: str  # identifies it in the page; letters and hyphens
    title: str
    paragraphs: Sequence[str] = ()
    answers: int = 0  # this number of first paragraphs is the main result, in larger type
    warnings: Sequence[str] = ()
    first: Sequence[Chart] = ()  # charts above the main result
    cards: Sequence[Card] = ()
    tables: Sequence[Table] = ()
    terms: Mapping[str, str] = field(default_factory=dict)  # explanations by term
    charts: Sequence[Chart] = ()
    listing: str = ""  # preformatted text

    @property
    def empty(self) -> bool:
        """Whether it has only a heading."""
        text = (self.paragraphs, self.warnings, self.cards, self.tables, self.terms)
        content = (*text, self.first, self.charts, self.listing)
        return not any(content)


@dataclass(frozen=True)
class Page:
    """A page: a heading, a line below it, and sections; empty sections are omitted."""

    title: str
    lead: str
    sections: Sequence[PageSection]


def render(page: Page) -> str:
    """Return an HTML page with everything it needs inside.

    Guarantees: the content is always escaped; browsers run no script but the two whose hashes the
    page names, and open no connection (Content Security Policy).
    """
    environment = Environment(
        autoescape=True,
        loader=PackageLoader("fedpriv.report"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["embedded"] = embedded
    script, style = (
        _TEMPLATES.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("js", "css")
    )
    scripts = [library(), script]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    sources = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.j2").render(
        page=page,
        scripts=[*map(Markup, scripts)],
        policy=policy,
        style=Markup(style),
        footer=texts()["footer"].format(version=__version__),
    )


def write_page(text: str, path: Path) -> None:
    """Write a page atomically; InvalidValueError if it would replace a file that is not HTML."""
    with writing(path):
        if path.exists() and not _begins_as_page(path):
            raise InvalidValueError(f"{path} exists already and is no HTML; it is not overwritten")
        write_atomically(path, text.encode())


def _begins_as_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_DOCTYPE)).lower() in (_DOCTYPE, b"")  # an empty file is replaced too
