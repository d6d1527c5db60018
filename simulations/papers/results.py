"""How results of several seeds are written, and read again: a table and numbers, of one name."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from fedpriv.report.tables import Table, print_table


def mean_of(shares: Sequence[float], sign: str = "") -> str:
    """Mean and, of several, standard deviation in percent; the sign "+" is shown if it is given."""
    end = f" ± {stdev(shares):.2%}" if len(shares) > 1 else ""
    return f"{fmean(shares):{sign}.2%}{end}"


def read_results(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows that `write_results` left in `name`.json; none if there is no such file."""
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
    """Write the content as `name`.json, in a folder that need not be there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
