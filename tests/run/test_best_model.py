"""The best of the released models on held-out rows, beside the last."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedpriv
from fedpriv.run.folder import RunFolder, write_report
from tests.run.test_released_model import PEOPLE, accuracy

MECHANISM = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
MECHANISM = MECHANISM.calibrate(epsilon=2.0, delta=1e-2, rounds=8, users=20)


def noisy(out: Path, population: fedpriv.Population = PEOPLE, **more: object) -> fedpriv.Run:
    """A run of eight rounds of little but noise."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return fedpriv.simulate(
        population,
        fedpriv.Task(model),
        more.pop("mechanism", MECHANISM),
        local=fedpriv.SGD(0.5, epochs=1),
        out=out,
        engine=fedpriv.Engine(processes=1),
        quiet=True,
        seed=1,
        **more,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedpriv.Run:
    return noisy(tmp_path_factory.mktemp("best") / "run")


def test_the_best_round_is_kept_when_later_ones_are_worse(run: fedpriv.Run) -> None:
    by_round = {each.round: each.accuracy for each in run.rounds}
    best = max(by_round, key=by_round.__getitem__)
    assert best < 6  # its checkpoint is older than the last three
    assert run.best.round == best
    assert accuracy(run.best_model) == by_round[best] > accuracy(run.model) == run.accuracy
    loaded = fedpriv.load_model(run.folder / "best.safetensors", nn.Linear(4, 3))
    assert torch.equal(loaded.weight, run.best_model.weight)


def test_it_costs_what_all_rounds_cost_that_it_was_chosen_from(run: fedpriv.Run) -> None:
    with safe_open(run.folder / "best.safetensors", "pt") as file:
        release = json.loads(file.metadata()["release"])
    assert (release["round"], release["epsilon"]) == (run.best.round, run.epsilon)
    assert release["epsilon"] > run.rounds[run.best.round - 1].epsilon


def test_the_report_names_it(run: fedpriv.Run, tmp_path: Path) -> None:
    page = write_report(run.folder, tmp_path / "page.html").read_text()
    assert f"accuracy {run.best.accuracy:.2%} on the rows that chose it" in page


def test_a_run_that_goes_on_remembers_it(run: fedpriv.Run, tmp_path: Path) -> None:
    def stop(result: fedpriv.RoundResult) -> None:
        if result.round == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noisy(tmp_path / "run", trackers=[stop])
    whole = noisy(tmp_path / "run", resume=True)
    assert whole.best.round == run.best.round
    assert torch.equal(whole.best_model.weight, run.best_model.weight)


def test_without_held_out_rows_there_is_none(tmp_path: Path) -> None:
    done = noisy(tmp_path / "run", population=replace(PEOPLE, test={}))
    assert (done.best, done.best_model) == (None, None)
    assert not RunFolder(tmp_path / "run").best.exists()


def test_the_last_model_counts_where_a_run_stops_early(tmp_path: Path) -> None:
    dear = replace(MECHANISM, epsilon=1.0, rounds=None)
    done = noisy(tmp_path / "run", mechanism=dear, rounds=8, evaluate_every=8)
    assert 0 < done.state.round < 8
    assert (done.best.round, done.best.accuracy) == (done.state.round, done.accuracy)
