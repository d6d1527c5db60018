"""Abadi et al. 2016, Figure 2: ε over epochs by moments and by strong composition, and exactly.

    python -m simulations.papers.abadi_curve

q = 0.01, σ = 4 and δ = 1e-5, so an epoch is 100 rounds. Prints a table.
"""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.rdp import composed_rdp
from simulations.papers.abadi import EXAMPLE, ORDERS, Setting, published_composition
from simulations.papers.claims import epsilon_from_rdp_2016

EPOCHS = (1, 5, 10, 20, 50, 100, 150, 200, 250, 300, 350, 400)
ROUNDS_PER_EPOCH = 100


def after(epochs: int) -> Setting:
    """Return the paper's example after this number of epochs."""
    return replace(EXAMPLE, rounds=epochs * ROUNDS_PER_EPOCH)


def moments(setting: Setting) -> float:
    """Return ε of the moments accountant with the conversion of the paper."""
    rdp = composed_rdp(setting.composed, ORDERS)
    return epsilon_from_rdp_2016(ORDERS, rdp, setting.delta)


def curve_table() -> Table:
    """Return a table with a line per number of epochs."""
    table = Table(title="Abadi et al. 2016, Figure 2: ε at q = 0.01, σ = 4, δ = 1e-5")
    for column in ("epochs", "moments accountant", "strong composition", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for epochs in EPOCHS:
        setting = after(epochs)
        low, up = setting.exact
        numbers = (f"{moments(setting):.4f}", f"{published_composition(setting):.4f}")
        table.add_row(str(epochs), *numbers, f"{low:.4f}–{up:.4f}")
    return table


def main() -> None:
    """Print the table."""
    Console().print(curve_table())


if __name__ == "__main__":
    main()
