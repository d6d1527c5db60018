"""Series of rounds with correlated noise, through whole runs: files, Python, and what goes on."""

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

import fedpriv
from fedpriv.accounting import epsilon as priced
from fedpriv.ledger.ledger import Ledger, paid_events
from tests.commandline import printed, refused

USERS, ROUNDS, SEPARATION, NORM = 20, 12, 4, 0.5
KINDS = {
    "banded": (fedpriv.Separated(ROUNDS, SEPARATION), fedpriv.BandedNoise()),
    "buffered": (fedpriv.Separated(ROUNDS, SEPARATION), fedpriv.BufferedNoise(2)),
    "within-bands": (fedpriv.BandedPoisson(0.5, ROUNDS, SEPARATION), fedpriv.BandedNoise()),
}


def people(users: int = USERS, wide: int = 3) -> fedpriv.Population:
    rng, rows = np.random.default_rng(0), 2 * users
    x = rng.normal(size=(rows, wide)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return fedpriv.Population.from_arrays(x, y, np.arange(rows) // 2, held_out=(x, y))


def task(wide: int = 3) -> fedpriv.Task:
    torch.manual_seed(0)
    return fedpriv.Task(torch.nn.Linear(wide, 2))


def mechanism(kind: str, **changes: Any) -> fedpriv.Mechanism:
    sampling, noise = KINDS[kind]
    made = fedpriv.Mechanism(sampling, fedpriv.Flat(NORM), noise=noise, **changes)
    return made.calibrate(epsilon=8.0, delta=1e-2, rounds=ROUNDS)


def run(kind: str, out: Path, **changes: Any) -> fedpriv.Run:
    given: dict[str, Any] = {"local": fedpriv.SGD(0.5, epochs=1), "server": fedpriv.FedAvg(1.0)}
    given |= {"quiet": True, "rounds": ROUNDS, "seed": 1, **changes}
    return fedpriv.simulate(people(), task(), mechanism(kind), out=out, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_a_series_is_charged_once_within_its_budget(kind: str, tmp_path: Path) -> None:
    done = run(kind, tmp_path / "run")
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        rows = list(ledger.charges())
    (event,) = paid_events(rows)
    assert [row.part for row in rows] == list(range(ROUNDS))
    assert len(event.strategy) > 1
    assert 7.9 < done.epsilon <= 8.0
    assert {result.epsilon for result in done.rounds} == {done.epsilon}
    assert priced([event], 1e-2).epsilon == done.epsilon


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_interrupted_goes_on_to_the_same_model(kind: str, tmp_path: Path) -> None:
    whole = run(kind, tmp_path / "whole")

    def interrupt(result: fedpriv.RoundResult) -> None:
        if result.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kind, tmp_path / "parts", trackers=[interrupt])
    parts = run(kind, tmp_path / "parts", resume=True)
    with Ledger.open(tmp_path / "parts" / "ledger.sqlite") as ledger:
        rows = list(ledger.charges())
    # The fifth was released before the failure, and is not asked for again.
    assert [row.part for row in rows] == list(range(ROUNDS))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name


def test_a_plan_keeps_the_strategy_that_was_found(tmp_path: Path) -> None:
    for kind in ("banded", "buffered"):
        run(kind, tmp_path / kind)
        noise = tomllib.loads((tmp_path / kind / "plan.toml").read_text())["noise"]
        assert noise["correlation"] == kind
        strategy = mechanism(kind).noise
        held = {
            key: list(getattr(strategy, key))
            for key in noise["options"]
            if key in ("coefficients", "decays", "weights")
        }
        assert held
        assert held == {key: noise["options"][key] for key in held}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["sampling={}"], "noise is correlated and sampling is poisson"),
        *(
            ([f"noise.options={{bands = {bands}}}"], f"bands is {said}")
            for bands, said in ((40, 40), (0, 0), (1.5, 1.5), ("true", True), ("'two'", "'two'"))
        ),
        *(
            ([f"noise.options={{coefficients = {given}}}"], "coefficients of the noise is")
            for given in ("1.0", "['a']", "'a'")
        ),
        (["noise.options={momentum = 'a'}"], "momentum is 'a'"),
        (
            ["noise.options={objective = 3}"],
            "objective is of the type int",
        ),
        (["noise.options={coefficients = [1.0, 0.3]}"], "coefficient 1 is 0.3"),
        (
            ["noise.options={objective = 'worst'}"],
            "objective is 'worst'",
        ),
        (["noise.options={buffers = 2}"], "noise.correlation 'banded' has no option 'buffers'"),
        (["sampling.options={rounds = 12, separation = 13}"], "separation of the schedule is 13"),
        (["sampling.options={rounds = 12, separation = 4.0}"], "separation of the schedule is 4.0"),
        (["sampling.options={rounds = '12', separation = 4}"], "the schedule has '12' rounds"),
        (["sampling.options={rounds = 12}"], "sampling.policy 'separated' needs the option"),
        (["clipping.adaptive={}"], "clipping norms adapt"),
        (["privacy.sampling_probability=0.5"], "sampling_probability is 0.5"),
        (
            ["noise.correlation=buffered", "noise.options={decays = [1.0], weights = [0.1]}"],
            "a decay is 1.0",
        ),
        (
            ["noise.correlation=buffered", "noise.options={decays = 'a', weights = 'b'}"],
            "decays of the noise is 'a'",
        ),
        (
            ["noise.correlation=buffered", "noise.options={buffers = 1.5}"],
            "buffers is 1.5",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_nothing_is_left(
    changes: list[str], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(FILE, encoding="utf-8")
    given = [each for change in changes for each in ("--set", change)]
    assert sentence in refused("simulate", file, "--out", tmp_path / "run", *given)
    assert not (tmp_path / "run").exists()


FILE = """
name = "series"
rounds = 12
[data]
name = "digits"
options = { users = 20 }
[model]
name = "softmax"
options = { inputs = 64, classes = 10 }
[local]
[clipping]
norm = 0.5
[sampling]
policy = "separated"
options = { rounds = 12, separation = 4 }
[noise]
correlation = "banded"
[privacy]
epsilon = 8.0
delta = 1e-2
"""


def test_a_plan_says_what_correlated_noise_gains_and_takes(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(FILE, encoding="utf-8")
    said = " ".join(printed("plan", file).split())
    assert "separated, 4 groups in turn, 12 rounds at once of N = 20 users" in said
    assert "expected cohort 5" in said
    (mean, last, growth, kept) = re.search(
        r"it is (\S+) times \(root mean square\) and (\S+) times \(last round\) as large .* "
        r"up to (\S+) × σ in one round. The server keeps (\d+) vectors of 651 numbers",
        said,
    ).groups()  # type: ignore[union-attr]
    assert 0.5 < float(mean) < 1.0
    assert 0.5 < float(last) < 1.0
    assert float(growth) > 1.0
    assert int(kept) == SEPARATION - 1


def test_metrics_state_the_noise_that_a_round_has(tmp_path: Path) -> None:
    """Noise of one round is larger than fresh noise, which is what cancels in sums."""
    result = run("banded", tmp_path / "run").rounds[-1]
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        (event,) = ledger.spent()
    column = np.zeros(ROUNDS)
    column[: len(event.strategy)] = event.strategy
    inverse = np.linalg.inv(np.tril(toeplitz(column)))
    (fresh,) = (q.noise_stddev for q in event.queries if q.group == "metrics/contributors")
    stated = result.metrics_noise_stddev["contributors"]
    assert stated == pytest.approx(fresh * np.linalg.norm(inverse[-1]), rel=1e-9)
    assert stated > 1.05 * fresh
