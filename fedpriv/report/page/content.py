"""What a page is made of: sections of words, numbers, tables and charts."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.report.page.charts import Chart
from fedpriv.report.page.words import Assumption


@dataclass(frozen=True)
class Card:
    """One number that a reader looks for first.

    Attributes:
        name: what it is.
        value: the number, as text.
        note: what must be known with it.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading, with its unit if there is one.
        number: whether it holds numbers.
        long: whether it holds what may be broken anywhere, such as digests.
    """

    name: str
    number: bool = True
    long: bool = False

    @property
    def kind(self) -> str:
        """What style sheets call it."""
        return "long" if self.long else "number" if self.number else "text"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        columns: of each row.
        rows: cells as text.
        simulation_only: whether it shows what no guarantee covers.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[str]]
    simulation_only: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page; what it does not have is left out.

    Attributes:
        name: identifies it in the page; letters and hyphens.
        title: its heading.
        paragraphs: sentences.
        answers: how many of the first paragraphs are the answer that readers come for.
        warnings: what must be known before anything is believed.
        cards: numbers that readers look for first.
        tables: tables.
        words: terms and what they mean.
        charts: charts.
        listing: text as it is.
        linked: whether the list of sections names it; others follow one of their kind.
    """

    name: str
    title: str
    paragraphs: Sequence[str] = ()
    answers: int = 0
    warnings: Sequence[str] = ()
    cards: Sequence[Card] = ()
    tables: Sequence[Table] = ()
    words: Sequence[Assumption] = ()
    charts: Sequence[Chart] = ()
    listing: str = ""
    linked: bool = True


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: its heading.
        lead: a line below it.
        sections: in order.
        footer: the last line.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    footer: str
