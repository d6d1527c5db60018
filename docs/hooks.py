"""What mkdocs does beside its plugins.

Links and pictures of the source tree, the list of commands, examples in docstrings as code, and no
page that loads something from another host.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import click
import griffe
from mkdocs.structure.files import File
from typer.cli import get_docs_for_click
from typer.main import get_command

from fedpriv.cli import app

_log = logging.getLogger("mkdocs.hooks.fedpriv")
_ROOT = Path(__file__).parents[1]
_COMMANDS = "<!-- every command -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/, and the place of the commands."""

    def here(picture: re.Match[str]) -> str:
        text, target = picture.groups()
        file = (_ROOT / "docs" / page.file.src_uri).parent / target
        copy = File.generated(config, f"images/{file.name}", abs_src_path=str(file.resolve()))
        if files.get_file_from_path(copy.src_uri) is None:
            files.append(copy)
        return f"![{text}]({posixpath.relpath(copy.src_uri, posixpath.dirname(page.file.src_uri))})"

    markdown = re.sub(r"!\[([^\]]*)\]\(((?:\.\./)+simulations/[^)\s]+)\)", here, markdown)
    return near_links(markdown, page.file.src_uri).replace(_COMMANDS, commands())


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn, which fails a strict build, if the page loads something from another host."""
    for address in loaded_from_afar(output):
        _log.warning(
            "%s loads %s; the site must work without a network", page.file.src_uri, address
        )
    return output


def near_links(markdown: str, page: str) -> str:
    """Links to files outside docs/ as their text, with the path shown under the pointer.

    >>> near_links("[results](../simulations/results), [data](data.md)", "speed.md")
    '<abbr title="simulations/results in the source tree">results</abbr>, [data](data.md)'
    """

    def near(link: re.Match[str]) -> str:
        text, target = link.groups()
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if "://" in target or target.startswith("#") or place.startswith("docs/"):
            return link[0]
        return f'<abbr title="{place} in the source tree">{text}</abbr>'

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", near, markdown)


def loaded_from_afar(html: str) -> list[str]:
    """Addresses on other hosts of what a browser loads with a page.

    >>> loaded_from_afar('<script src="https://a.b/c.js"></script><a href="https://d.e">d</a>')
    ['https://a.b/c.js']
    """
    found = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"([^\"]+)", html)
    return [address for address in found if re.match(r"(?:https?:)?//", address)]


def commands() -> str:
    """Every command of `fedpriv`, with its arguments and options, as Markdown."""
    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=click.Context(command), name="fedpriv")
    return text[text.index("\n## ") :]  # what comes before is said on the page


class Doctests(griffe.Extension):
    """Examples in docstrings become blocks of code; Markdown would take >>> for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    r"""The text with each paragraph that begins with >>> in a fence.

    >>> fenced("One.\n\n>>> 1 + 1\n2").split("\n")
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    paragraphs = re.split(r"\n{2,}", docstring)
    return "\n\n".join(f"```pycon\n{p}\n```" if p.startswith(">>>") else p for p in paragraphs)
