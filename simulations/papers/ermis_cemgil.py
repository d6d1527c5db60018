"""Ermiş & Cemgil, *Differentially Private Dropout*: σ = 10.88 and σ = 3.23 for ε = 0.5 on MNIST.

    python -m simulations.papers.ermis_cemgil

Section 5 of the paper: ν = 0.01, 200 epochs, so T = 20,000 rounds, δ = 1e-4. DPD-AC is advanced
composition, DPD-zCDP composes by zCDP and then amplifies. σ is in units of the sensitivity, which
the paper takes as 2C for gradients clipped to C.
"""

import math

from scipy.optimize import brentq, minimize_scalar

from fedpriv.accounting.accountants import poisson_pairs, tightest_epsilon
from simulations.papers.claims import Argument, Claim, print_claims

NU, ROUNDS, DELTA, EPSILON = 0.01, 20_000, 1e-4, "0.5"
SIGMA_AC, SIGMA_ZCDP = 10.88, 3.23

NOTES = (
    "The printed formulas give neither σ. Those of DPD-AC leave the split of δ open, and no split "
    "brings ε = 0.5 at σ = 10.88; those of DPD-zCDP leave δ' open, and δ' = δ asks for the least "
    "noise.",
    "DPD-zCDP goes (ε, δ) → zCDP → (ε, δ) and amplifies what comes out. zCDP has no "
    "amplification by subsampling, and (ε, δ) does not give back the zCDP that it came from.",
    "Read most kindly, noise of 2Cσ against users who contribute at most C, z is 2σ = 6.46, and "
    "σ = 3.23 is still not enough.",
)


def composition_epsilon(sigma: float, nu: float = NU, rounds: int = ROUNDS) -> float:
    """Return ε of DPD-AC by the formulas of Section 4.3, at the split of δ with the smallest ε.

    With σ' the ε of one amplified round, √(2T·log(1/δ'))·σ' + T·σ'²: the paper prints 1/σ' in the
    first term, which cannot be meant.
    """

    def at(share: float) -> float:
        tail, per_round = share * DELTA, (1 - share) * DELTA / (rounds * nu)
        epsilon = math.log1p(nu * math.expm1(math.sqrt(2 * math.log(1.25 / per_round)) / sigma))
        return math.sqrt(2 * rounds * math.log(1 / tail)) * epsilon + rounds * epsilon**2

    return float(minimize_scalar(at, bounds=(1e-3, 1 - 1e-3), method="bounded").fun)


def amplified_zcdp_epsilon(sigma: float, nu: float = NU, rounds: int = ROUNDS) -> float:
    """Return ε of DPD-zCDP by equations (6) and (7), solved for ε, with δ' = δ."""
    epsilon = math.sqrt(2 * math.log(1.25 * nu / DELTA)) / sigma
    amplified = math.log1p(nu * math.expm1(epsilon))
    variance = 2 * math.log(1.25 / DELTA) / amplified**2
    return zcdp_epsilon(rounds / (2 * variance))


def zcdp_epsilon(rho: float) -> float:
    """Return ε of ρ-zCDP at δ (Bun & Steinke 2016, Proposition 1.3)."""
    return rho + 2 * math.sqrt(-rho * math.log(DELTA))


def needed_noise_multiplier() -> tuple[float, float]:
    """Return a certified interval of the least z that gives ε = 0.5."""

    def excess(z: float, end: int) -> float:
        return tightest_epsilon(poisson_pairs({(NU, z): ROUNDS}), DELTA)[end] - float(EPSILON)

    low, up = (float(brentq(excess, 2.0, 50.0, args=(end,), xtol=1e-4)) for end in (0, 1))
    return low - 1e-4, up + 1e-4


def claims() -> tuple[Claim, ...]:
    """Return claims of ε = 0.5 at each printed σ, under both readings, and of the noise."""
    composed, concentrated = ({(NU, s): ROUNDS} for s in (SIGMA_AC, SIGMA_ZCDP))
    exact_ac, exact_zcdp = (
        tightest_epsilon(poisson_pairs(r), DELTA) for r in (composed, concentrated)
    )
    kind = tightest_epsilon(poisson_pairs({(NU, 2 * SIGMA_ZCDP): ROUNDS}), DELTA)
    by_chain = amplified_zcdp_epsilon(SIGMA_ZCDP)
    unamplified = zcdp_epsilon(ROUNDS / (2 * SIGMA_ZCDP**2))
    flaw, proof = Argument.FLAW, Argument.PROOF
    by_ac = composition_epsilon(SIGMA_AC)
    return (
        Claim("ε of DPD-AC, σ = 10.88", EPSILON, by_ac, exact_ac, flaw),
        Claim("ε of DPD-zCDP, σ = 3.23", EPSILON, by_chain, exact_zcdp, flaw),
        Claim("the same read most kindly, z = 2σ", EPSILON, by_chain, kind, flaw),
        Claim("the same, zCDP without amplification", "", unamplified, exact_zcdp, proof),
        Claim("σ for ε = 0.5", str(SIGMA_ZCDP), _sigma_by_chain(), needed_noise_multiplier(), flaw),
    )


def main() -> None:
    """Print the table."""
    title = f"Ermiş & Cemgil: MNIST, ν = {NU}, T = {ROUNDS}, δ = {DELTA:g}"
    print_claims(title, claims(), NOTES)


def _sigma_by_chain() -> float:
    """Return the σ at which equations (6) and (7) give ε = 0.5."""
    return float(brentq(lambda sigma: amplified_zcdp_epsilon(sigma) - float(EPSILON), 1.0, 100.0))


if __name__ == "__main__":
    main()
