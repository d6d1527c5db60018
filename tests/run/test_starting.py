"""Runs that start from the model of another, on its ledger."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.errors import DataError, InvalidValueError, LedgerError
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import read_run
from tests.commandline import refused
from tests.run.test_released_model import PEOPLE

NOISELESS = fedpriv.Mechanism(
    fedpriv.EveryUser(), fedpriv.Flat(1.0), metrics={"batch-norm": {"bound": 4.0}},
    unsafe_no_privacy=True,
).with_noise(0.0, epsilon=1.0, delta=1e-2)  # fmt: skip
PRIVATE = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
PRIVATE = PRIVATE.calibrate(epsilon=2.0, delta=1e-2, rounds=3, users=20)
MOMENTUM = fedpriv.FedAvgM(0.5)


def network(seed: int = 0, classes: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    base = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(base, nn.BatchNorm1d(4), nn.Linear(4, classes))


def trained(out: Path, model: nn.Module | None = None, **more: object) -> fedpriv.Run:
    given = {"mechanism": PRIVATE, "server": MOMENTUM, "population": PEOPLE, **more}
    return fedpriv.simulate(
        task=fedpriv.Task(model or network()),
        local=fedpriv.SGD(0.5, epochs=1),
        out=out,
        engine=fedpriv.Engine(processes=1),
        quiet=True,
        **given,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> fedpriv.Run:
    return trained(tmp_path_factory.mktemp("first") / "run")


@pytest.mark.parametrize(
    ("server", "same"), [(MOMENTUM, True), (fedpriv.FedAvg(0.5), False)], ids=["same", "another"]
)
def test_two_runs_are_one_run_of_all_their_rounds(
    tmp_path: Path, server: fedpriv.FedAvg, same: bool
) -> None:
    """With the momentum, and the statistics of the normalisation; not with another optimiser."""
    whole = trained(tmp_path / "whole", mechanism=NOISELESS, rounds=4)
    begun = trained(tmp_path / "begun", mechanism=NOISELESS, rounds=2)
    ended = trained(
        tmp_path / "ended", mechanism=NOISELESS, rounds=2, server=server, start=begun.folder
    )
    assert ended.state.round == 2
    for name, tensor in whole.state.model.items():
        moved = np.abs(tensor - begun.state.model[name]).max()
        apart = np.abs(tensor - ended.state.model[name]).max()
        assert moved > 1e-3
        assert same == (apart < 1e-6), name
        if not same:
            break


def test_both_cost_together_what_their_ledger_says(first: fedpriv.Run, tmp_path: Path) -> None:
    more = replace(PRIVATE, epsilon=3.0)
    second = trained(tmp_path / "second", mechanism=more, start=first.folder)
    plan = (second.folder / "plan.toml").read_text(encoding="utf-8")
    begun = f"round {first.state.round} of run {first.rounds[0].run}, in ../{first.folder.name}\n"
    assert plan.startswith(f"# starts from: {begun}") or first.folder.parent != second.folder.parent
    assert plan.startswith("# starts from: round")
    assert second.ledger == first.folder / "ledger.sqlite"
    assert not (second.folder / "ledger.sqlite").exists()
    assert first.epsilon < 2.0 + 1e-9 < second.epsilon <= 3.0
    record = read_run(second.folder)
    assert {charge.run for charge in record.ledger.charges} == {
        run.rounds[0].run for run in (first, second)
    }


@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_was_interrupted_goes_on_from_where_it_started(
    tmp_path: Path, *, named: bool
) -> None:
    """Also before its first checkpoint of its own, and if its start is not named again."""

    def stop(result: fedpriv.RoundResult) -> None:
        if result.round == 1:
            raise KeyboardInterrupt

    given = {"mechanism": NOISELESS, "rounds": 2, "checkpoint_every": 2}
    begun = trained(tmp_path / "begun", **given)
    whole = trained(tmp_path / "whole", start=begun.folder, **given)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", start=begun.folder, trackers=[stop], **given)
    again = {"start": begun.folder} if named else {}
    parts = trained(tmp_path / "parts", resume=True, **again, **given)
    assert parts.ledger == begun.ledger
    for name, tensor in whole.state.model.items():
        np.testing.assert_allclose(parts.state.model[name], tensor, atol=1e-6)


OTHERS = fedpriv.Population.from_arrays(
    *(PEOPLE.test[n] for n in "xy"), np.arange(120) // 6, name="b"
)


@pytest.mark.parametrize(
    ("more", "kind", "sentence"),
    [
        ({"model": network(classes=5)}, InvalidValueError, r"weight' is \[3, 4\] in .* \[5, 4\]"),
        ({"model": network()[:2]}, InvalidValueError, "'2.bias' is .* and absent in the run"),
        ({"model": network(seed=1)}, InvalidValueError, "frozen tensors of the model differ"),
        ({"ledger": "other.sqlite"}, InvalidValueError, "privacy.ledger is .*other.sqlite"),
        ({"population": OTHERS}, LedgerError, "population"),
        ({"mechanism": PRIVATE}, InvalidValueError, "privacy.epsilon"),
        ({"start": "nowhere"}, InvalidValueError, "nowhere holds no run to start from"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_charged(
    first: fedpriv.Run, tmp_path: Path, more: dict[str, object], kind: type, sentence: str
) -> None:
    with Ledger.open(first.ledger) as ledger:
        before = ledger.head
    given = {"mechanism": replace(PRIVATE, epsilon=9.0), "start": first.folder, **more}
    with pytest.raises(kind, match=sentence):
        trained(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    with Ledger.open(first.ledger) as ledger:
        assert ledger.head == before


def test_a_run_that_has_not_ended_is_refused(first: fedpriv.Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes((first.folder / "plan.toml").read_bytes())
    (tmp_path / "ledger.sqlite").write_bytes(first.ledger.read_bytes())
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        trained(tmp_path / "r", mechanism=replace(PRIVATE, epsilon=9.0), start=tmp_path)


def test_workers_of_flower_start_from_nothing(first: fedpriv.Run) -> None:
    more = ("--from", first.folder, "--engine", "flower")
    assert "--from is given with --engine flower" in refused("simulate", "digits", *more)
