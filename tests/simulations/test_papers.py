"""Papers' tables: every expected number is printed in the paper or was computed by other tools."""

import math
from types import ModuleType

import numpy as np
import pytest

from fedpriv.accounting import gaussian
from fedpriv.accounting.gaussian import clt_mu
from fedpriv.accounting.rdp import composed_rdp
from simulations.papers import abadi, abadi_curve, bu, ermis_cemgil
from simulations.papers.claims import Argument, Claim, epsilon_from_rdp_2016

# Printed in Bu et al. 2020, Tables 1 to 4: μ, ε by CLT, ε by MA.
PRINTED = (
    (0.23, 0.83, 1.19),
    (0.57, 2.32, 3.01),
    (1.13, 5.07, 7.10),
    (2.00, 9.98, 13.27),
    (2.76, 14.98, 18.72),
    (4.78, 31.12, 32.40),
    (2.03, 10.20, 14.70),
    (2.07, 10.43, 15.24),
    (1.94, 10.61, 15.39),
)
# ε of the same rows by two other tools, at the epochs' rounds rounded up.
EXACT = (0.8645, 2.3817, 5.6397, 10.9499, 15.7163, 28.0460, 11.8073, 12.1522, 12.7494)


def of(claims: tuple[Claim, ...], what: str) -> Claim:
    """The one claim with those words."""
    (found,) = [claim for claim in claims if claim.what == what]
    return found


def contains(claim: Claim, exact: float, tolerance: float) -> bool:
    low, up = claim.exact
    return low * (1 - tolerance) <= exact <= up * (1 + tolerance)


def test_abadi_moments_accountant() -> None:
    claim = of(abadi.claims(), "moments accountant")
    assert claim.paper == "1.26"
    assert round(claim.recomputed, 2) == 1.26
    assert contains(claim, 0.94687, 5e-6)
    assert claim.is_valid_bound
    assert claim.verdict.startswith("valid bound, 33.1 % above")
    assert of(abadi.claims(), "moments, conversion of 2020").recomputed == pytest.approx(
        1.0355, abs=1e-4
    )


def test_abadi_strong_composition_is_no_bound() -> None:
    claim = of(abadi.claims(), "strong composition")
    assert claim.paper == "9.34"
    assert round(claim.recomputed, 2) == 9.34
    assert not claim.is_valid_bound
    assert not claim.is_below_truth
    assert claim.verdict.startswith("not a valid bound: a step fails")
    assert round(of(abadi.claims(), "strong composition, amplified validly").recomputed, 1) == 26.8


def test_abadi_formula_fails_where_one_round_is_known_in_closed_form() -> None:
    # One round: ε = log(1 + q(e^ε₀ − 1)) with q·δ(ε₀) = δ.
    setting = abadi.COUNTEREXAMPLE
    base = gaussian.epsilon(setting.delta / setting.q, setting.sigma)
    truth = math.log1p(setting.q * math.expm1(base))
    claim = of(abadi.claims(), "strong composition, σ = 0.5, T = 1")
    assert contains(claim, truth, 1e-6)
    assert claim.recomputed < truth / 5
    assert claim.is_below_truth


def test_bu_prints_what_is_recomputed() -> None:
    tables = bu.SETTINGS[:9]
    for setting, (mu, clt, moments) in zip(tables, PRINTED, strict=True):
        assert (float(setting.clt), float(setting.moments)) == (clt, moments)
        by_clt, by_moments = bu.claims_of(setting)
        assert round(clt_mu(setting.rounds), 2) == mu
        assert round(by_clt.recomputed, 2) == clt
        assert by_moments.recomputed == pytest.approx(moments, rel=5e-3)


def test_bu_clt_is_below_the_truth_in_eight_rows_of_nine() -> None:
    verdicts = []
    for setting, exact in zip(bu.SETTINGS[:9], EXACT, strict=True):
        by_clt, by_moments = bu.claims_of(setting)
        assert contains(by_clt, exact, 1e-3)
        assert by_clt.is_below_truth == (float(by_clt.paper) < exact)
        assert not by_clt.is_valid_bound
        assert by_clt.verdict.startswith("not a valid bound")
        assert by_moments.is_valid_bound
        verdicts.append(by_clt.is_below_truth)
    assert verdicts.count(True) == 8
    assert not verdicts[5]


def test_bu_figure_4() -> None:
    by_moments = of(bu.claims(), "Figure 4, σ = 1.3: MA")
    assert by_moments.paper == "1.34"
    assert by_moments.recomputed == pytest.approx(1.34, abs=0.01)
    assert by_moments.is_valid_bound
    by_clt = of(bu.claims(), "Figure 4, σ = 1.06: CLT")
    assert round(by_clt.recomputed, 2) == 1.34
    assert contains(by_clt, 1.408, 5e-4)
    assert by_clt.is_below_truth


def test_bu_advantage_is_the_complement_of_the_printed_sum_of_errors() -> None:
    claim = bu.advantage_claim()
    assert float(claim.paper) == pytest.approx(1 - 0.776)
    assert claim.recomputed == pytest.approx(1 - 0.776, rel=0.01)
    assert claim.argument is Argument.ESTIMATE


def test_ermis_cemgil() -> None:
    claims = ermis_cemgil.claims()
    composed = of(claims, "ε of DPD-AC, σ = 10.88")
    assert composed.paper == "0.5"
    assert contains(composed, 0.372, 1e-3)
    assert not composed.is_valid_bound
    assert not composed.is_below_truth
    concentrated = of(claims, "ε of DPD-zCDP, σ = 3.23")
    assert contains(concentrated, 1.505, 5e-4)
    assert concentrated.is_below_truth
    assert of(claims, "the same read most kindly, z = 2σ").is_below_truth
    needed = of(claims, "σ for ε = 0.5")
    assert needed.paper == "3.23"
    assert contains(needed, 8.374, 1e-4)
    assert needed.is_below_truth


def test_the_curve_of_abadi_passes_through_the_printed_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Figure 2 has E = 100 epochs at ε = 1.26 and 9.34; every curve grows, and the exact is lowest.
    setting = abadi_curve.after(100)
    assert round(abadi_curve.moments(setting), 2) == 1.26
    assert round(abadi.published_composition(setting), 2) == 9.34
    settings = [abadi_curve.after(epochs) for epochs in abadi_curve.EPOCHS]
    exact = [each.exact[1] for each in settings]
    moments = [abadi_curve.moments(each) for each in settings]
    assert exact == sorted(exact)
    assert moments == sorted(moments)
    assert all(low < high for low, high in zip(exact, moments, strict=True))
    abadi_curve.main()
    assert "1.2586" in capsys.readouterr().out


def test_no_printed_formula_of_ermis_and_cemgil_gives_their_noise() -> None:
    assert ermis_cemgil.composition_epsilon(10.88) > 10 * 0.5
    assert ermis_cemgil.amplified_zcdp_epsilon(3.23) > 4 * 0.5
    # With the split δ' = δ/2 written out by hand: δ_iter = 0.5e-4/(20,000·0.01) = 2.5e-7.
    one = math.log(1 + 0.01 * (math.exp(math.sqrt(2 * math.log(1.25 / 2.5e-7)) / 10.88) - 1))
    by_hand = math.sqrt(40_000 * math.log(2e4)) * one + 20_000 * one**2
    assert 0.95 * by_hand < ermis_cemgil.composition_epsilon(10.88) <= by_hand
    # With δ' = δ, δ_iter = 1e-4/0.01 = 0.01, and ρ = T/(2τ) with τ of equation (6).
    one = math.log(1 + 0.01 * (math.exp(math.sqrt(2 * math.log(125)) / 3.23) - 1))
    rho = 20_000 * one**2 / (4 * math.log(12_500))
    by_hand = rho + 2 * math.sqrt(rho * math.log(10_000))
    assert ermis_cemgil.amplified_zcdp_epsilon(3.23) == pytest.approx(by_hand, rel=1e-9)


def test_the_2016_conversion_reproduces_the_papers() -> None:
    orders = tuple(float(order) for order in range(2, 65))
    by_abadi = composed_rdp({(0.01, 4.0): 10_000}, orders)
    assert epsilon_from_rdp_2016(orders, by_abadi, 1e-5) == pytest.approx(1.2586, abs=1e-4)
    assert int(np.argmin(by_abadi - math.log(1e-5) / (np.array(orders) - 1))) == orders.index(20.0)
    # McMahan et al. 2018 print ε = 4.634 for 5,000 of 763,430 users, z = 1, T = 5,000, δ = 1e-9.
    mcmahan = composed_rdp({(5000 / 763_430, 1.0): 5000}, orders)
    assert epsilon_from_rdp_2016(orders, mcmahan, 1e-9) == pytest.approx(4.634, abs=1e-3)


@pytest.mark.parametrize("paper", [abadi, bu, ermis_cemgil], ids=lambda paper: paper.__name__)
def test_proofs_and_only_proofs_are_valid_bounds(paper: ModuleType) -> None:
    for claim in paper.claims():
        assert claim.is_valid_bound == (claim.argument is Argument.PROOF), claim


@pytest.mark.parametrize(
    ("paper", "printed"),
    [
        (abadi, ("1.26", "9.34", "26.78")),
        (bu, ("0.83", "7.10", "32.40", "0.224")),
        (ermis_cemgil, ("0.5", "3.23")),
    ],
    ids=["abadi", "bu", "ermis_cemgil"],
)
def test_tables_print_claims_and_verdicts(
    paper: ModuleType,
    printed: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    paper.main()
    table = capsys.readouterr().out
    for number in printed:
        assert number in table
    wrong = [claim for claim in paper.claims() if not claim.is_valid_bound]
    assert table.count("not a valid bound") == len(wrong) > 0


def test_a_number_is_below_only_if_all_that_print_like_it_are() -> None:
    def claim(paper: str, low: float) -> Claim:
        return Claim("", paper, 1.0, (low, low), Argument.PROOF)

    assert not claim("1.34", 1.345).is_below_truth
    assert claim("1.34", 1.3451).is_below_truth
    assert not claim("10", 10.4).is_below_truth
    assert not claim("", 1.0).is_below_truth
    assert claim("", 1.0001).is_below_truth
