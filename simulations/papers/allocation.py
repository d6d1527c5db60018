"""Feldman & Shenfeld 2025 and 2026: random allocation against other sampling.

    python -m simulations.papers.allocation

A user is in exactly k random rounds of every pass of n. The table compares the cost of a pass with
that of Poisson sampling with the user in k rounds on average, and with that of n Gaussian rounds,
of which k known ones have the user.
"""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from fedpriv.accounting import PrivacyLoss, epsilon, poisson_gaussian, random_allocation_gaussian

NOTES = (
    "For k = 1 the intervals are of the pair of the pass itself, so the comparisons are proved.",
    "At usual δ, random allocation costs less than a Poisson sample with the same mean in every "
    "row, most where passes are few and short: no user is in two rounds of a pass by chance.",
    "That it is never worse holds at small δ, not in general. Where δ is as large as in the last "
    "row it costs more, as a Poisson sample leaves a user out of a pass with probability 1/e.",
    "For k > 1 the interval is wide. Its upper end reveals a random partition of the rounds into "
    "k blocks, its lower end shows the sum of all rounds alone.",
)


@dataclass(frozen=True)
class Setting:
    """Passes with the same sampling."""

    rounds: int  # n of a pass
    participations: int  # k of them with the user
    passes: int
    noise_multiplier: float  # z of each round
    delta: float  # δ of ε

    @property
    def allocation(self) -> PrivacyLoss:
        """ε of random allocation."""
        n, k = self.rounds, self.participations
        event = random_allocation_gaussian(n, k, self.noise_multiplier, self.passes)
        return epsilon([event], self.delta)

    @property
    def poisson(self) -> PrivacyLoss:
        """ε of Poisson sampling with probability k/n."""
        q, count = self.participations / self.rounds, self.rounds * self.passes
        return epsilon([poisson_gaussian(q, self.noise_multiplier, count)], self.delta)

    @property
    def known_rounds(self) -> PrivacyLoss:
        """ε if the user's rounds are known."""
        count = self.participations * self.passes
        return epsilon([poisson_gaussian(1.0, self.noise_multiplier, count)], self.delta)


SETTINGS = (
    Setting(10, 1, 1, 1.0, 1e-6),
    Setting(100, 1, 1, 0.5, 1e-6),
    Setting(100, 1, 10, 1.0, 1e-6),
    Setting(1000, 1, 1, 0.5, 1e-6),
    Setting(1000, 1, 1, 1.0, 1e-6),
    Setting(1000, 1, 10, 1.0, 1e-6),
    Setting(1000, 1, 100, 2.0, 1e-6),
    Setting(10_000, 1, 1, 0.7, 1e-8),
    Setting(10_000, 1, 100, 1.0, 1e-8),
    Setting(1000, 10, 1, 1.0, 1e-6),
    Setting(1000, 10, 10, 4.0, 1e-6),
    Setting(10, 1, 1, 0.5, 0.3),
)


def compared(setting: Setting) -> str:
    """Return the proved comparison of random allocation with Poisson sampling, as a phrase."""
    allocation, poisson = setting.allocation, setting.poisson
    if allocation.epsilon < poisson.epsilon_low:
        return f"at least {100 * (1 - allocation.epsilon / poisson.epsilon_low):.1f} % less"
    if allocation.epsilon_low > poisson.epsilon:
        return f"at least {100 * (allocation.epsilon_low / poisson.epsilon - 1):.1f} % more"
    return "not told apart"


def allocation_table() -> Table:
    """Return a table with one line per setting."""
    table = Table(title="ε when a user is added or removed, by how its rounds are chosen")
    columns = ("n", "k", "passes", "z", "δ", "known", "Poisson k/n", "allocation")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("allocation is")
    for setting in SETTINGS:
        allocation, poisson = setting.allocation, setting.poisson
        table.add_row(
            *(str(number) for number in (setting.rounds, setting.participations, setting.passes)),
            f"{setting.noise_multiplier:g}",
            f"{setting.delta:g}",
            f"{setting.known_rounds.epsilon:.4g}",
            f"{poisson.epsilon:.4g}",
            f"{allocation.epsilon_low:.4g}–{allocation.epsilon:.4g}",
            compared(setting),
        )
    return table


def main() -> None:
    """Print the table."""
    console = Console()
    console.print(allocation_table())
    for note in NOTES:
        console.print(f"* {note}", highlight=False)


if __name__ == "__main__":
    main()
