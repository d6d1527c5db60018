"""`fedpriv price`: what settings of other tools cost, and which of their claims hold."""

import json
import math
from pathlib import Path

import mpmath
import pytest
from dp_accounting.pld import privacy_loss_distribution

from fedpriv.accounting.accountants import PrivacyLoss, epsilon
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.experiment.build import simulated
from fedpriv.experiment.config import load_config
from fedpriv.run.price import ForeignSetting, verdict_on
from fedpriv.support.checks import epsilon_down, epsilon_up
from tests.commandline import printed, refused, table

ROOT = Path(__file__).parents[2]
SETTINGS = json.loads((ROOT / "simulations" / "other_tools.json").read_text("utf-8"))
PAGE = ROOT / "docs" / "other-tools.md"
NOISE = ["price", "--noise-multiplier", "1.2"]
USERS = ["--cohort", "120", "--population", "3383"]
ROUNDS = ["--rounds", "100", "--delta", "1e-5"]
PFL = """
dataset: cifar10
# central_epsilon: 8.0
cohort_size: 50  # a comment
noise_cohort_size: 1000
population: 1e6
central_num_iterations: 1500
central_epsilon: 2.0
central_delta: '1e-6'
central_privacy_clipping_bound: 0.4
"""


def priced(*arguments: str | Path) -> list[dict]:
    return json.loads(printed(*arguments, "--json"))["prices"]


def between(loss: PrivacyLoss) -> str:
    low, up = epsilon_down(loss.epsilon_low), epsilon_up(loss.epsilon)
    return up if loss.epsilon <= 1.001 * loss.epsilon_low else f"{low} to {up}"


def cells(given: dict) -> list[str]:
    """The row of a setting in the page: its name, the claim, three prices, the verdict."""
    setting = ForeignSetting(**given["setting"])
    losses = {name: epsilon([event], setting.delta) for name, _, event in setting.readings()}
    by_kind = {name.split()[0].strip(","): loss for name, loss in losses.items()}
    coins = by_kind.get("Poisson") or by_kind["every"]
    shown = [coins, by_kind.get("exactly"), by_kind.get("users")]
    claimed = setting.claimed_epsilon
    verdict = verdict_on(claimed, by_kind.get("exactly", coins)) or ""
    claim = "none" if claimed is None else f"{claimed:g}"
    return [given["name"], claim, *("" if x is None else between(x) for x in shown), verdict]


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: given["name"])
def test_the_page_has_the_exact_prices(given: dict) -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {given['name']} |")]
    *shown, last = [cell.strip() for cell in line.strip("|").split("|")]
    *expected, verdict = cells(given)
    assert shown == expected
    assert last.partition(":")[0] == verdict if verdict else ":" not in last


def test_the_page_has_all_twelve_settings() -> None:
    assert len({given["name"] for given in SETTINGS}) == 12
    assert all(given["source"] for given in SETTINGS)


def delta_of_a_gaussian(z: float, at: float) -> mpmath.mpf:
    """δ of one Gaussian at ε, as Balle & Wang 2018, equation (6), has it."""
    with mpmath.workdps(60):
        z, at = mpmath.mpf(z), mpmath.mpf(at)
        half, shift = 1 / (2 * z), at * z
        return mpmath.ncdf(half - shift) - mpmath.exp(at) * mpmath.ncdf(-half - shift)


def test_a_claim_of_ten_can_be_two_hundred_million() -> None:
    command = ["price", "--clip", "1", "--noise-stddev", "4.845e-5", "--cohort", "1"]
    (price,) = priced(*command, "--rounds", "1", "--delta", "1e-5", "--claimed-epsilon", "10")
    assert price["verdict"] == "does not hold"
    assert price["epsilon"] == pytest.approx(2.1e8, rel=0.02)
    assert delta_of_a_gaussian(4.845e-5, price["epsilon"]) <= 1e-5
    assert delta_of_a_gaussian(4.845e-5, price["epsilon_low"]) >= 1e-5


def test_the_readings_of_an_unknown_draw() -> None:
    coins, everybody = priced(*NOISE, *USERS, *ROUNDS, "--claimed-epsilon", "2")
    assert coins["epsilon"] == epsilon([poisson_gaussian(120 / 3383, 1.2, 100)], 1e-5).epsilon
    # A hundred rounds of everybody are one Gaussian with a tenth of the noise.
    assert delta_of_a_gaussian(0.12, everybody["epsilon"]) <= 1e-5
    assert delta_of_a_gaussian(0.12, everybody["epsilon_low"]) >= 1e-5
    assert coins["verdict"].startswith("holds, loose by a factor of 1.1")
    assert everybody["verdict"] == "does not hold"


def test_the_readings_of_cohorts_of_a_fixed_size() -> None:
    coins, exact = priced(*NOISE, *USERS, *ROUNDS, "--sampling", "fixed-size")
    assert coins["relation"] == "add-or-remove-one"
    assert exact["relation"] == "replace-one"
    assert coins["verdict"] is exact["verdict"] is None
    # Replacing costs at least as much as adding a user to Poisson samples with half of the noise.
    half = epsilon([poisson_gaussian(120 / 3383, 0.6, 100)], 1e-5)
    assert exact["epsilon_low"] == pytest.approx(half.epsilon_low)
    assert exact["epsilon"] >= half.epsilon


def test_users_who_are_there_have_less_noise_than_is_claimed() -> None:
    scaled = ["--noise-cohort", "1200", "--enrolled", "500", "--sampling", "poisson"]
    _, there = priced(*NOISE, *USERS, *ROUNDS, *scaled)
    alone = epsilon([poisson_gaussian(120 / 500, 0.12, 100)], 1e-5)
    assert there["epsilon"] == pytest.approx(alone.epsilon)
    assert (there["sampling_probability"], there["noise_multiplier"]) == (0.24, pytest.approx(0.12))
    # The same noise on the sum of those 120 users, as a number.
    stddev = ["price", "--noise-stddev", "0.06", "--clip", "0.5"]
    for one, other in zip(
        priced(*NOISE, *USERS, *ROUNDS, *scaled),
        priced(*stddev, *USERS, *ROUNDS, *scaled),
        strict=True,
    ):
        assert one["epsilon"] == pytest.approx(other["epsilon"], rel=1e-9)


def test_verdicts() -> None:
    loss = epsilon([poisson_gaussian(0.01, 1.0, 1000)], 1e-5)
    assert verdict_on(None, loss) is None
    assert verdict_on(math.nextafter(loss.epsilon_low, 0.0), loss) == "does not hold"
    middle = (loss.epsilon_low + loss.epsilon) / 2
    assert verdict_on(middle, loss) == "not proved, and not refuted"
    assert verdict_on(loss.epsilon, loss) == "holds"
    nothing = epsilon([poisson_gaussian(0.01, 1e300)], 1e-5)
    assert verdict_on(1.0, nothing) == "holds, loose by a factor of inf"
    assert verdict_on(3.001 * loss.epsilon, loss) == "holds, loose by a factor of 3"


@pytest.fixture
def pfl(tmp_path: Path) -> Path:
    path = tmp_path / "pfl.yaml"
    path.write_text(PFL, encoding="utf-8")
    return path


def test_a_benchmark_of_pfl(pfl: Path) -> None:
    text = printed("price", "--pfl", pfl, "--enrolled", "1000", "--json")
    setting, prices = json.loads(text).values()
    z = setting.pop("noise_multiplier")
    assert setting == {
        "cohort": 50,
        "noise_cohort": 1000,
        "population": 10**6,
        "enrolled": 1000,
        "rounds": 1500,
        "delta": 1e-6,
        "clip": 0.4,
        "sampling": "fixed-size",
        "claimed_epsilon": 2.0,
    }
    # pfl searches for this δ by the privacy loss distribution of dp-accounting.
    loss = privacy_loss_distribution.from_gaussian_mechanism(z, sampling_prob=1e-3)
    assert loss.self_compose(1500).get_delta_for_epsilon(2.0) == pytest.approx(1e-6, rel=0.02)
    assert [price["verdict"] for price in prices] == ["holds", "does not hold", "does not hold"]


@pytest.mark.parametrize("enrolled", ["60", "1000", "1000000"])
def test_a_written_projection_has_the_noise_of_pfl(pfl: Path, enrolled: str) -> None:
    z, file = 0.7, pfl.with_name("written.toml")
    given = ["--noise-multiplier", str(z), "--enrolled", enrolled, "--rounds", "20"]
    prices = priced("price", "--pfl", pfl, *given, "--write", file)
    experiment, _ = simulated(load_config(file), "run")
    # GaussianMechanism of pfl: z·clip·cohort/noise cohort on a sum, which it divides by the cohort.
    (stddev,) = {*experiment.plan.mechanism.tensor_stddevs.values()}
    assert stddev == pytest.approx(z * 0.4 * (50 / 1000) / 50, rel=1e-6)
    assert experiment.plan.sampling.expected_cohort_size == pytest.approx(50)
    plan = json.loads(printed("plan", file, "--json"))
    assert plan["projected_epsilon"] == pytest.approx(prices[0]["epsilon"], rel=1e-9)
    assert plan["noise_multiplier"] == z
    assert plan["rounds"] == 20


@pytest.mark.parametrize(
    ("users", "key"),
    [
        (["--cohort", "20", "--population", "100"], "epsilon"),
        (["--cohort", "100"], "epsilon"),
        (USERS, "projected_epsilon"),
        (["--cohort", "5000", "--population", "763430"], "projected_epsilon"),
    ],
    ids=str,
)
def test_a_written_experiment_costs_the_same(users: list[str], key: str, tmp_path: Path) -> None:
    file = tmp_path / "written.toml"
    prices = priced(*NOISE, *users, *ROUNDS, "--clip", "0.3", "--write", file)
    plan = json.loads(printed("plan", file, "--json"))
    assert plan[key] == pytest.approx(prices[0]["epsilon"], rel=1e-9)
    (group,) = plan["groups"]
    assert group["clipping_norm"] == 0.3
    if key == "epsilon":
        assert plan["expected_cohort_size"] == pytest.approx(float(users[1]))
        assert group["noise_stddev"] == pytest.approx(1.2 * 0.3)
    assert "exists already" in refused(*NOISE, *users, *ROUNDS, "--clip", "1", "--write", file)


def test_the_table_has_the_numbers_of_the_json() -> None:
    command = [*NOISE, *USERS, *ROUNDS, "--claimed-epsilon", "2", "--sampling", "poisson"]
    (row,), (price,) = table(*command), priced(*command)
    low, up = epsilon_down(price["epsilon_low"]), epsilon_up(price["epsilon"])
    z_and_q = ["add-or-remove-one", "0.03548", "1.2"]
    assert row == ["Poisson, about 120 of 3,383", *z_and_q, low, up, price["verdict"]]
    assert "by its own secret coin" in printed(*command)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["price", *USERS, *ROUNDS], "noise_multiplier is absent; --noise-multiplier must be"),
        ([*NOISE, *ROUNDS], "cohort is absent; --cohort must be given"),
        ([*NOISE, *USERS, "--delta", "1e-5"], "rounds is absent; --rounds must be given"),
        ([*NOISE, *USERS, "--rounds", "1"], "delta is absent; --delta must be given"),
        (["price", "--noise-stddev", "1", *USERS, *ROUNDS], "clip is absent; --clip must be given"),
        ([*NOISE, "--noise-stddev", "1", *USERS, *ROUNDS], "noise_stddev is 1.0; with noise_mult"),
        (["price", "--noise-multiplier", "0", *USERS, *ROUNDS], "noise_multiplier is 0.0; it must"),
        (["price", "--noise-multiplier", "nan", *USERS, *ROUNDS], "noise_multiplier is nan"),
        (
            ["price", "--noise-stddev", "-1", "--clip", "1", *USERS, *ROUNDS],
            "noise_stddev is -1.0; it must be positive and finite",
        ),
        ([*NOISE, *USERS, *ROUNDS, "--clip", "0"], "clip is 0.0; it must be positive and finite"),
        ([*NOISE, *USERS, *ROUNDS, "--claimed-epsilon", "inf"], "claimed_epsilon is inf; it must"),
        ([*NOISE, *USERS, "--delta", "1", "--rounds", "1"], "delta is 1.0; it must be in (0, 1)"),
        ([*NOISE, *USERS, "--delta", "0.1", "--rounds", "0"], "rounds is 0; it must be a whole"),
        ([*NOISE, *ROUNDS, "--cohort", "0"], "cohort is 0, noise_cohort 0"),
        ([*NOISE, *ROUNDS, "--cohort", "9", "--population", "8"], "population 8; it must be"),
        ([*NOISE, *USERS, *ROUNDS, "--noise-cohort", "119"], "noise_cohort 119"),
        ([*NOISE, *USERS, *ROUNDS, "--enrolled", "3384"], "enrolled 3384"),
        ([*NOISE, *USERS, *ROUNDS, "--sampling", "shuffled"], "shuffled"),
        ([*NOISE, *USERS, *ROUNDS, "--write", "x.toml"], "clip is absent; with --write it must"),
        (["price", "--pfl", "no.yaml"], "no.yaml cannot be used"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused(*arguments, cwd=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("cohort_size: 50", "cohort_size: many", "cohort_size is 'many' in"),
        ("population: 1e6\n", "", "population is absent; --population must be given"),
        ("cohort_size: 50", "cohort_size: 50.5", "cohort is 50.5; it must be a whole number"),
        ("central_epsilon: 2.0", "central_epsilon: -2", "claimed_epsilon is -2"),
    ],
)
def test_a_bad_benchmark(was: str, now: str, said: str, pfl: Path) -> None:
    pfl.write_text(PFL.replace(was, now, 1), encoding="utf-8")
    assert said in refused("price", "--pfl", pfl)
