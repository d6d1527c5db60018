"""Writing and reading of results over several seeds: a table and numbers with the same name."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from fedpriv.report.tables import Table, print_table


def mean_of(shares: Sequence[float], sign: str = "") -> str:
    """Return the mean and, if there are several, the standard deviation in percent.

    With the sign "+", a plus precedes a positive mean.
    """
    end = f" ± {stdev(shares):.2%}" if len(shares) > 1 else ""
    return f"{fmean(shares):{sign}.2%}{end}"


def read_results(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows that `write_results` wrote to `name`.json; none if there is no such file."""
    path = folder / f"{name}.json"
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))
    return rows


def write_results(table: Table, content: object, folder: Path, name: str) -> None:
    """Print a table; write it as `name`.txt, and the content as `name`.json."""
    write_numbers(content, folder, name)
    print_table(table)
    with (folder / f"{name}.txt").open("w", encoding="utf-8") as file:
        print_table(table, Console(file=file, width=120))


def write_numbers(content: object, folder: Path, name: str) -> None:
    """Write the content as `name`.json, in a folder that need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
