"""Abadi et al. 2016, *Deep Learning with Differential Privacy*: ε ≈ 1.26 against ε ≈ 9.34.

    python -m simulations.papers.abadi

Section 3.1 of the paper: q = 0.01, σ = 4, δ = 1e-5 and T = 10,000 rounds.
"""

import math
from dataclasses import dataclass

from fedpriv.accounting.accountants import poisson_pairs, tightest_epsilon
from fedpriv.accounting.gaussian import epsilon
from fedpriv.accounting.rdp import composed_rdp, epsilon_from_rdp
from simulations.papers.claims import Argument, Claim, epsilon_from_rdp_2016, print_claims

ORDERS = range(2, 34)
"""α = λ + 1 for the moments λ ≤ 32 that the paper computes."""

NOTES = (
    "9.34 multiplies ε₀ by q. Amplification by subsampling is log(1 + q·(e^ε₀ − 1)), more "
    "than twice that here, where ε₀ is 1.46; with it the same formula gives 26.8.",
    "That the published formula is no bound shows where noise is small: the row with σ = 0.5.",
)


@dataclass(frozen=True)
class Setting:
    """Rounds of the Poisson-subsampled Gaussian, and the δ of ε."""

    q: float
    sigma: float
    rounds: int
    delta: float

    @property
    def composed(self) -> dict[tuple[float, float], int]:
        """Rounds by (q, z)."""
        return {(self.q, self.sigma): self.rounds}

    @property
    def exact(self) -> tuple[float, float]:
        """Certified interval of ε."""
        return tightest_epsilon(poisson_pairs(self.composed), self.delta)

    @property
    def round_delta(self) -> float:
        """δ₀ of one round on its sample: half of δ for all rounds, the other half for the tail."""
        return self.delta / (2 * self.rounds * self.q)

    @property
    def classical_epsilon(self) -> float:
        """ε₀ of the Gaussian mechanism by Dwork & Roth 2014, Theorem 3.22, which needs ε₀ < 1."""
        return math.sqrt(2 * math.log(1.25 / self.round_delta)) / self.sigma

    def strong_composition(self, per_round: float, mean_factor: float) -> float:
        """Return √(2T·log(1/δ'))·ε + T·ε·mean_factor, δ' = δ/2 (Dwork & Roth 2014, Th. 3.20)."""
        tail = math.sqrt(2 * self.rounds * math.log(2 / self.delta)) * per_round
        return tail + self.rounds * per_round * mean_factor


EXAMPLE = Setting(q=0.01, sigma=4.0, rounds=10_000, delta=1e-5)
COUNTEREXAMPLE = Setting(q=0.01, sigma=0.5, rounds=1, delta=1e-5)


def published_composition(setting: Setting) -> float:
    """Return the result of the argument that gives 9.34: ε₀ amplified to q·ε₀. Not a bound."""
    per_round = setting.q * setting.classical_epsilon
    return setting.strong_composition(per_round, per_round)


def valid_composition(setting: Setting) -> float:
    """Return the same with amplification to log(1 + q·(e^{ε₀} − 1)) and mean ε·(e^ε − 1): a bound.

    If the classical ε₀ is below the exact one, the exact one is used.
    """
    base = max(setting.classical_epsilon, epsilon(setting.round_delta, setting.sigma))
    per_round = math.log1p(setting.q * math.expm1(base))
    return setting.strong_composition(per_round, math.expm1(per_round))


def claims() -> tuple[Claim, ...]:
    """Return the paper's claims about its example, and the results of better conversions."""
    rounds, delta, exact = EXAMPLE.composed, EXAMPLE.delta, EXAMPLE.exact
    moments = composed_rdp(rounds, ORDERS)
    by_2016 = epsilon_from_rdp_2016(ORDERS, moments, delta)
    by_2020 = epsilon_from_rdp(ORDERS, moments, delta)
    example, elsewhere = published_composition(EXAMPLE), published_composition(COUNTEREXAMPLE)
    proof, flaw = Argument.PROOF, Argument.FLAW
    return (
        Claim("moments accountant", "1.26", by_2016, exact, proof),
        Claim("moments, conversion of 2020", "", by_2020, exact, proof),
        Claim("strong composition", "9.34", example, exact, flaw),
        Claim("strong composition, σ = 0.5, T = 1", "", elsewhere, COUNTEREXAMPLE.exact, flaw),
        Claim(
            "strong composition, amplified validly", "", valid_composition(EXAMPLE), exact, proof
        ),
    )


def main() -> None:
    """Print the table."""
    title = "Abadi et al. 2016: ε at q = 0.01, σ = 4, T = 10,000, δ = 1e-5"
    print_claims(title, claims(), NOTES)


if __name__ == "__main__":
    main()
