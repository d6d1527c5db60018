"""Abadi et al. 2016, Figure 2: ε over epochs by moments and by strong composition, and exactly.

    python -m simulations.papers.abadi_curve [--folder FOLDER]

q = 0.01, σ = 4 and δ = 1e-5, so an epoch is 100 rounds. Prints a table and writes the figure.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.rdp import composed_rdp, epsilon_from_rdp_2016
from fedpriv.report.charts import Axis, Chart, Series, save
from simulations.papers.abadi import EXAMPLE, ORDERS, Setting, published_composition

EPOCHS = (1, 5, 10, 20, 50, 100, 150, 200, 250, 300, 350, 400)
ROUNDS_PER_EPOCH = 100


def after(epochs: int) -> Setting:
    """The paper's example after so many epochs."""
    return replace(EXAMPLE, rounds=epochs * ROUNDS_PER_EPOCH)


def moments(setting: Setting) -> float:
    """ε of the moments accountant with the conversion of the paper."""
    rdp = composed_rdp(setting.composed, ORDERS)
    return epsilon_from_rdp_2016(ORDERS, rdp, setting.delta)


def curve_table() -> Table:
    """A line per number of epochs."""
    table = Table(title="Abadi et al. 2016, Figure 2: ε at q = 0.01, σ = 4, δ = 1e-5")
    for column in ("epochs", "moments accountant", "strong composition", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for epochs in EPOCHS:
        setting = after(epochs)
        low, up = setting.exact
        numbers = (f"{moments(setting):.4f}", f"{published_composition(setting):.4f}")
        table.add_row(str(epochs), *numbers, f"{low:.4f}–{up:.4f}")
    return table


def curve_chart() -> Chart:
    """All three curves."""
    settings = [after(epochs) for epochs in EPOCHS]
    strong = [published_composition(setting) for setting in settings]
    return Chart(
        "abadi_curve",
        "What 400 epochs cost (q = 0.01, σ = 4)",
        "Abadi et al. 2016, Figure 2, and the exact ε of the same mechanism beside it.",
        Axis("epochs", "count", from_zero=True),
        Axis(f"example-level ε at δ = {EXAMPLE.delta:g}", from_zero=True),
        [
            Series("strong composition, as published", EPOCHS, strong, dashed=True),
            Series("moments accountant of the paper", EPOCHS, [moments(s) for s in settings]),
            Series("exact: upper end of the interval", EPOCHS, [s.exact[1] for s in settings]),
        ],
    )


def main() -> None:
    """Print the table and write the figure."""
    parser = argparse.ArgumentParser(description="ε over epochs in Abadi et al. 2016")
    parser.add_argument("--folder", type=Path, default=Path("simulations/results"))
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    Console().print(curve_table())
    for path in save(curve_chart(), folder, ["png"]):
        print(path)


if __name__ == "__main__":
    main()
