"""How many users' updates counted in a round: a private count, on unless it is switched off."""

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.clients.training import NodeTrainer
from fedpriv.engine.trainer import SimulationOnlyDropped
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.build import Method, on_population, settings_of
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.round import RoundAttempt
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.report import run_page
from fedpriv.run.folder import read_run
from fedpriv.run.run import Run
from fedpriv.training.rounds import Contributors, RoundResult, round_request
from tests.commandline import printed, refused

FILE = Path(__file__).parents[2] / "fedpriv/experiment/bundled/digits.toml"
USERS, ROWS = 12, 4
NAN, ILLEGAL = 3, 7  # positions of the users who are dropped
SAID = "simulation only, not private: "


def population() -> fedpriv.Population:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(USERS * ROWS, 5)).astype(np.float32)
    y = rng.integers(0, 3, USERS * ROWS)
    held_out = (x[:4].copy(), y[:4].copy())
    y[ILLEGAL * ROWS] = 99
    ids = np.repeat([f"user {number}" for number in range(USERS)], ROWS)
    people = fedpriv.Population.from_arrays(x, y, ids, held_out=held_out)
    people.users.fields["x"][NAN * ROWS] = np.nan  # which `from_arrays` refuses
    return people


def task() -> fedpriv.Task:
    torch.manual_seed(0)
    return fedpriv.Task(nn.Linear(5, 3))


def exact(**changes: object) -> fedpriv.Mechanism:
    """Everybody is asked, and nothing is noised."""
    without = {"noise_multiplier": 0.0, "delta": 1e-2, "unsafe_no_privacy": True}
    return fedpriv.Mechanism(fedpriv.Poisson(1.0), fedpriv.Flat(1.0), **{**without, **changes})


def run(folder: Path, mechanism: fedpriv.Mechanism, **others: object) -> Run:
    local = None if mechanism.unit != "user" else fedpriv.SGD(0.1, epochs=1)
    given = {"local": local, "rounds": 2, "out": folder, "quiet": True, "seed": 0}
    return fedpriv.simulate(population(), task(), mechanism, **{**given, **others})


@pytest.mark.parametrize(
    ("unit", "size", "counted"),
    [("user", None, USERS - 2), ("example", None, USERS * ROWS - 2), ("microbatch", 2, 22)],
)
def test_what_is_dropped_is_not_counted(
    tmp_path: Path, unit: str, size: int | None, counted: int
) -> None:
    found = run(tmp_path / "run", exact(unit=unit, microbatch=size))
    assert [each.metrics["contributors"] for each in found.rounds] == [counted, counted]


def test_one_user_moves_the_count_by_one_and_the_round_keeps_its_noise(tmp_path: Path) -> None:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=4.0, delta=1e-2, rounds=2)
    found = run(tmp_path / "run", mechanism, rounds=None)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        events = [charge.event for charge in ledger.charges()]
    z = mechanism.noise_multiplier
    for event, result in zip(events, found.rounds, strict=True):
        update, count = event.queries
        assert (count.group, count.clipping_norm) == ("metrics/contributors", 1.0)
        assert event.noise_multiplier == pytest.approx(z, rel=1e-3)
        assert event.noise_multiplier >= z
        # Equation (1) with shares of 0.99 and 0.01.
        assert update.noise_stddev == pytest.approx(z / math.sqrt(0.99), rel=1e-3)
        assert count.noise_stddev == pytest.approx(10.0 * z, rel=1e-3)
        assert result.metrics_noise_stddev["contributors"] == pytest.approx(count.noise_stddev)
    assert found.epsilon <= 4.0


def test_the_count_makes_the_update_less_than_one_per_cent_noisier() -> None:
    def noise(**shares: float) -> float:
        local = fedpriv.SGD(0.1, epochs=1)
        mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0), **shares)
        mechanism = mechanism.with_noise(2.0, epsilon=9.0, delta=1e-2)
        method = Method(task(), mechanism, local, fedpriv.FedAvg())
        settings = settings_of("run", population(), method, rounds=2)
        experiment, _ = on_population(settings, "run", population(), method=method)
        return experiment.plan.mechanism.query.noise_stddevs[0]

    assert 1.0 < noise() / noise(contributors_share=0.0) < 1.01


def test_it_can_be_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path / "run", exact(contributors_share=0.0), quiet=False)
    assert all(each.metrics == {} for each in found.rounds)
    assert "contributors" not in capsys.readouterr().out
    text = printed("plan", FILE, "--set", "metrics.contributors_share=0")
    assert "contrib" not in text
    bad = refused("plan", FILE, "--set", "metrics.contributors_share=1.0")
    assert "metrics.contributors_share is 1.0" in bad


def test_its_name_is_taken() -> None:
    own = fedpriv.Task(nn.Linear(5, 3), metrics={"contributors": lambda outputs, _: outputs})
    mechanism = exact(metrics={"contributors": {"radius": 1.0}})
    with pytest.raises(InvalidValueError, match="a metric is named 'contributors'"):
        fedpriv.simulate(
            population(), own, mechanism, local=fedpriv.SGD(0.1, epochs=1), rounds=1, quiet=True
        )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_simulation_names_the_first_user_who_is_dropped_once(
    caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    mechanism = exact()
    method = Method(task(), mechanism, fedpriv.SGD(0.1, epochs=1), fedpriv.FedAvg())
    engine = fedpriv.Engine(processes=processes, chunk_mebibytes=1)
    people = population()
    settings = settings_of("run", people, method, rounds=2, engine=engine)
    experiment, transport = on_population(settings, "run", people, method=method)
    state = experiment.initial_state
    request = round_request(
        experiment.plan,
        state,
        RoundAttempt("run", 1, 0),
        np.arange(USERS),
        experiment.entropy,
    )
    for _ in range(2):
        list(transport.collect(request))
    (record,) = [each for each in caplog.records if each.message.startswith(SAID)]
    assert record.levelno == logging.WARNING
    nan = "user user 3 counts as zero: its field 'x' holds NaN or infinity"
    illegal = "user user 7 counts as zero: training raised IndexError: Target 99 is out of bounds."
    assert record.message in (f"{SAID}{told}; others are not named" for told in (nan, illegal))
    assert "counts as zero" not in "".join(e.message for e in caplog.records if e is not record)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize("broken", [NAN, ILLEGAL])
def test_each_reason_is_said(broken: int, device: str) -> None:
    told: list[SimulationOnlyDropped] = []
    method = Method(task(), exact(), fedpriv.SGD(0.1, epochs=1), fedpriv.FedAvg())
    people = population()
    settings = settings_of("run", people, method, rounds=1, engine=fedpriv.Engine(device))
    experiment, transport = on_population(settings, "run", people, method=method)
    request = round_request(
        experiment.plan,
        experiment.initial_state,
        RoundAttempt("run", 1, 0),
        np.array([broken]),
        experiment.entropy,
    )
    list(replace(transport, on_dropped=told.append, processes=1).collect(request))
    (one,) = told
    assert one.user == broken
    assert ("NaN" if broken == NAN else "Target 99 is out of bounds") in one.reason


def test_a_node_names_nobody() -> None:
    transport = InProcessTransport(
        task(), population().users, torch.device("cpu"), 2**20, on_dropped=print
    )
    with pytest.raises(InvalidValueError, match="only a simulation may have one"):
        NodeTrainer(transport)


def test_it_is_shown_beside_the_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path / "run", exact(), quiet=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "contributors, of those expected │ 10.0 ± 0.0 of 12.0" in text
    page = found.report().read_text(encoding="utf-8")
    assert "of 12.0 users expected in a round, on average" in page
    assert "Updates that counted, by round" in page


def test_the_text_averages_over_rounds_and_allows_for_noise_and_coins() -> None:
    results = [
        RoundResult(
            *("run", 2, number, 0, "", 0.1, 1e-5, 50.0, {}),
            metrics={"contributors": count},
            metrics_noise_stddev={"contributors": stddev},
        )
        for number, count, stddev in ((1, 80.0, 3.0), (2, 90.0, 4.0))
    ]
    few, many = (PoissonSampling(users, 0.5).event() for users in (100, 40_000))
    # (9 + 16 + 2·25)/4 = 18.75, the variance of the mean.
    assert str(Contributors.of(results, few)) == "85.0 ± 4.3 of 50.0"
    of_many = [replace(each, expected_cohort_size=20_000.0) for each in results[:1]]
    assert str(Contributors.of(of_many, many)) == "80 ± 100 of 20,000"
    assert str(Contributors.of([], few)) == ""


def test_what_is_expected_of_examples_is_how_many_there_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = fedpriv.Mechanism.poisson(
        q=0.5, clipping=fedpriv.Flat(1.0), examples_per_user=20, total_examples=60
    )
    drawn = drawn.with_noise(1.0, epsilon=1e6, delta=1e-2)
    found = run(tmp_path / "run", drawn, local=None, quiet=False)
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"contributors, of those expected │ \S+ ± \S+ of 30\.0", text)
    (card,) = run_page._contributors(read_run(found.folder))  # a whole page takes seconds to price
    assert card.note == "of 30.0 examples expected in a round, on average"
