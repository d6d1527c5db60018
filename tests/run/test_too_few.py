"""No budget is spent on nothing: runs in which too few users count are refused, or end early."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.data.population import UserStore
from fedpriv.errors import DataError, TooFewUsersError
from fedpriv.ledger.events import SamplingEvent
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.report import run_page
from fedpriv.run.folder import RunFolder, read_run
from fedpriv.run.run import Run
from fedpriv.training.rounds import Contributors, RoundResult, Stop
from tests.commandline import fedpriv as typed
from tests.commandline import refused

USERS, ROWS, ROUNDS = 100, 4, 6
TOO_FEW = "too few users count: "


def people(
    x: np.ndarray | None = None, y: np.ndarray | None = None, held_out: int = 8
) -> fedpriv.Population:
    rng = np.random.default_rng(0)
    fine = rng.standard_normal((USERS * ROWS, 3)).astype(np.float32)
    labels = rng.integers(0, 3, USERS * ROWS)
    rows = (fine[:held_out].copy(), labels[:held_out]) if held_out else None
    x, y = fine if x is None else x, labels if y is None else y
    return fedpriv.Population.from_arrays(x, y, np.repeat(np.arange(USERS), ROWS), held_out=rows)


def numbers() -> fedpriv.Population:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((USERS * ROWS, 3)).astype(np.float32)
    ids = np.repeat(np.arange(USERS), ROWS)
    return fedpriv.Population.from_arrays(x, x[:, :1], ids, held_out=(x[:8], x[:8, :1]))


def private(rounds: int = ROUNDS) -> fedpriv.Mechanism:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.5))
    return mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=rounds)


def start(folder: Path, population: fedpriv.Population, **others: object) -> Run:
    torch.manual_seed(0)
    given = {"task": fedpriv.Task(nn.Linear(3, 3)), "local": fedpriv.SGD(0.1, epochs=1)}
    engine = fedpriv.Engine(processes=1)
    named = {**given, "out": folder, "quiet": True, "seed": 1, "engine": engine, **others}
    return fedpriv.simulate(population, mechanism=private(), **named)


def diverging(folder: Path, **others: object) -> Run:
    """Users pass a first look, but over many passes their updates become NaN."""
    task = fedpriv.Task(nn.Linear(3, 1), loss="mse")
    return start(folder, numbers(), task=task, local=fedpriv.SGD(300.0, epochs=20), **others)


def charged(folder: Path) -> int:
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        return ledger.head.count


def broken(share: float) -> np.ndarray:
    """Inputs with a share of infinite cells."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((USERS * ROWS, 3)).astype(np.float32)
    x[rng.random(x.shape) < share] = np.inf
    return x


LABELS = np.tile(np.arange(1, 4), USERS * ROWS)[: USERS * ROWS]


@pytest.mark.parametrize("held_out", [0, 8])
@pytest.mark.parametrize(
    ("x", "y", "cause"),
    [
        (broken(1.0), None, "its field 'x' holds NaN or infinity"),
        (broken(0.1), None, "its field 'x' holds NaN or infinity"),  # 72% of users
        (None, LABELS, "training raised IndexError: Target 3 is out of bounds"),
    ],
)
def test_a_simulation_in_which_most_users_count_as_zero_is_refused(
    tmp_path: Path, x: np.ndarray | None, y: np.ndarray | None, cause: str, held_out: int
) -> None:
    message = (
        rf"^simulation only, not private: \d+ of the 64 that were tried .* user \d+, as {cause}"
    )
    with pytest.raises(DataError, match=message):
        start(tmp_path / "run", people(x, y, held_out))
    assert list(tmp_path.iterdir()) == []


def test_a_simulation_in_which_most_users_count_takes_place_and_names_one_who_does_not(
    tmp_path: Path,
) -> None:
    run = start(tmp_path / "run", people(broken(0.02)))  # 21% of users
    assert len(run.rounds) == ROUNDS
    (one,) = [text for text in run.warnings if text.startswith("simulation only, not private: ")]
    assert "counts as zero: its field 'x' holds NaN or infinity" in one
    folder = RunFolder(run.folder)
    assert "simulation only" not in folder.end.read_text(encoding="utf-8")
    assert folder.simulation_only_warnings.stat().st_mode & 0o777 == 0o600
    assert folder.read_end().warnings == run.warnings[::-1] or one in folder.read_end().warnings


def test_a_simulation_in_which_most_users_have_no_rows_is_refused(tmp_path: Path) -> None:
    rows = people().users.fields
    counts = np.where(np.arange(5 * USERS) % 5 == 0, ROWS, 0)
    users = UserStore(rows, np.cumsum([0, *counts]), [str(n) for n in range(5 * USERS)])
    sparse = replace(people(), users=users)
    with pytest.raises(DataError, match=r"400 of 500 users have no rows; nothing is charged: "):
        start(tmp_path / "run", sparse)
    assert start(tmp_path / "run", sparse, rounds=1, keep_going=True).rounds


def test_a_simulation_in_which_most_targets_are_ignored_is_refused(tmp_path: Path) -> None:
    y = people().users.fields["y"].copy()
    y[: int(0.6 * len(y))] = -100
    match = r"the 64 that were tried .*, as all its targets are -100, which the loss ignores; "
    with pytest.raises(DataError, match=match):
        start(tmp_path / "run", people(y=y))
    y[: int(0.4 * len(y))] = 0
    assert start(tmp_path / "run", people(y=y)).rounds


def test_a_run_ends_once_noised_counts_say_that_nobody_counts(tmp_path: Path) -> None:
    run = diverging(tmp_path / "run")
    done = len(run.rounds)
    assert run.stop is Stop.TOO_FEW
    assert 0 < done < ROUNDS
    assert charged(run.folder) == done
    sentence = run.warnings[0]
    assert sentence.startswith(TOO_FEW)
    assert f"after {done} of {ROUNDS} rounds" in sentence
    with pytest.raises(TooFewUsersError, match=f"^{TOO_FEW}"):
        run.check()
    # As it ended because of what it released, its charges are no bound.
    assert run.epsilon == 8.0
    with Ledger.open(run.ledger) as ledger:
        assert fedpriv.epsilon(ledger.spent(), 1e-3).epsilon < 7.0
    assert run.rounds[-1].epsilon == 8.0  # with which the model is released
    assert "the guarantee is the budget, ε = 8.000 at δ = 0.001" in run.warnings[1]
    end = json.loads(RunFolder(run.folder).end.read_text(encoding="utf-8"))
    assert (end["stop"], end["epsilon"], end["round"]) == (str(Stop.TOO_FEW), 8.0, done)
    assert end["warnings"][0] == sentence
    record = read_run(run.folder)
    cards = {card.name: card for card in run_page._summary(record, None).cards}
    assert cards["user-level ε"].value == "8.000"
    assert str(Stop.TOO_FEW) in cards["rounds"].note
    sections = {section.name for section in run_page.page_of_run(record).sections}
    assert "epsilon" in sections
    assert "trade-off" not in sections  # of charges alone


def test_a_run_that_ended_so_says_it_again_unless_it_is_to_keep_going(tmp_path: Path) -> None:
    first = diverging(tmp_path / "run")
    again = diverging(tmp_path / "run", resume=True)
    assert again.stop is Stop.TOO_FEW
    assert again.warnings[0] == first.warnings[0]
    assert charged(first.folder) == len(first.rounds)
    last = diverging(tmp_path / "run", resume=True, keep_going=True)
    assert (last.stop, len(last.rounds), charged(last.folder)) == (Stop.ROUNDS, ROUNDS, ROUNDS)
    last.check()
    spent = [each.epsilon for each in last.rounds]
    assert spent == sorted(spent)
    assert last.epsilon == spent[-1] < 8.0
    assert any(text.startswith("noised counts say that ") for text in last.warnings)
    assert not any(text.startswith(TOO_FEW) for text in last.warnings)


MINE = """
import numpy as np
from fedpriv.data import Population, from_arrays

def people(broken: bool = False) -> Population:
    x = np.random.default_rng(0).standard_normal((400, 3)).astype(np.float32)
    fields = {"x": x * (np.nan if broken else 1.0), "y": x[:, :1]}
    users = from_arrays(fields, np.repeat(np.arange(100), 4))
    return Population("people", users, {"x": x[:8], "y": x[:8, :1]})
"""
FILE = """
name = "mine"
rounds = 5
seed = 1
data = { name = "mine:people" }
model = { name = "softmax", options = { inputs = 3, classes = 1 }, loss = "mse" }
local = { learning_rate = 300.0, epochs = 20 }
clipping = { norm = 0.5 }
privacy = { sampling_probability = 0.5, epsilon = 8.0, delta = 1e-3 }
engine = { processes = 1 }
"""


def test_the_command_line_ends_with_code_4_and_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.toml").write_text(FILE)
    sentence = refused(
        "simulate", "mine.toml", "--set", "data.options.broken=true", "--out", "no", cwd=tmp_path
    )
    assert "of the 64 that were tried before the first round count as zero" in sentence
    assert not (tmp_path / "no").exists()
    command = ("simulate", "mine.toml", "--out", "run")
    for more in ((), ("--resume",)):
        done = typed(*command, *more, cwd=tmp_path)
        *_, last = done.stderr.strip().splitlines()
        assert (done.returncode, last[: len(TOO_FEW) + 7]) == (4, f"error: {TOO_FEW}")
        assert f"- {TOO_FEW}" in done.stdout
        assert "(8.000, 0.001), the budget" in done.stdout
    done = typed(*command, "--resume", "--keep-going", cwd=tmp_path)
    assert done.returncode == 0
    assert "5 of 5, 5 charged" in done.stdout


def counts(*values: float, noise: float, expected: float = 100.0) -> list[RoundResult]:
    return [
        RoundResult(
            *("run", 9, number, 0, "", 0.1, 1e-5, expected, {}),
            metrics={"contributors": value},
            metrics_noise_stddev={"contributors": noise},
        )
        for number, value in enumerate(values, start=1)
    ]


POISSON = PoissonSampling(200, 0.5).event()  # the variance of a cohort is 50


@pytest.mark.parametrize(
    ("values", "noise", "too_few", "far_off"),
    [
        # √(4² + 50) = 8.124; 50 − 3 · 8.124 = 25.63.
        ((25.5,), 4.0, True, True),
        ((25.8,), 4.0, False, True),
        # Of four rounds the standard deviation doubles: 200 − 6 · 8.124 = 151.26.
        ((37.7,) * 4, 4.0, True, True),
        ((37.9,) * 4, 4.0, False, True),
        ((95.0,) * 4, 4.0, False, False),
        # 3 · √(16² + 50) = 52.5 > 50: one round cannot tell, but two can, 100 − 74.2 = 25.8.
        ((-90.0,), 16.0, False, True),
        ((-90.0, 110.0), 16.0, True, True),
        ((), 4.0, False, False),
    ],
)
def test_a_run_ends_three_standard_deviations_below_half_of_what_is_expected(
    values: tuple[float, ...], noise: float, *, too_few: bool, far_off: bool
) -> None:
    found = Contributors.of(counts(*values, noise=noise), POISSON)
    assert (found.too_few, found.far_off) == (too_few, far_off)


def test_without_noise_and_coins_half_of_the_users_are_enough() -> None:
    everyone: SamplingEvent = PoissonSampling(100, 1.0).event()
    for value, too_few in ((50.0, False), (49.0, True)):
        assert Contributors.of(counts(value, noise=0.0), everyone).too_few is too_few


def test_a_run_in_which_all_count_hardly_ever_ends() -> None:
    rng, ended = np.random.default_rng(0), 0
    for _ in range(200):
        found = Contributors()
        for result in counts(*rng.normal(100.0, math.sqrt(30.0**2 + 50.0), 60), noise=30.0):
            found = found.with_round(result, POISSON)
            ended += found.too_few
    assert ended == 0
