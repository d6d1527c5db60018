"""Figures of one's own from a file and from Python, in everything that a run or a study shows."""

import json
import math
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.data.population import HELD_OUT_USER
from fedpriv.errors import DataError, ModelError
from fedpriv.ledger.events import Unit
from fedpriv.report.run_page import round_charts
from fedpriv.run.folder import RunFolder, read_run
from tests.commandline import printed, refused

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 240)
X = (np.eye(3)[Y] + RNG.normal(0.0, 0.8, (240, 3))).astype(np.float32)
OWNERS = np.array([f"guest {n}" for n in np.arange(40) // 8])
FIGURES = {"area": "auc", "best two": {"figure": "top-k", "k": 2}}


def people(owners: np.ndarray | None = OWNERS) -> fedpriv.Population:
    """Fifty users, and forty rows of five others."""
    ids = np.array([f"person {n}" for n in np.arange(200) // 4])
    held_out = (X[200:], Y[200:])
    return fedpriv.Population.from_arrays(
        X[:200], Y[:200], ids, held_out=held_out, held_out_users=owners
    )


def worst_class(outputs: torch.Tensor, targets: torch.Tensor, classes: int) -> float:
    """A figure of one's own: the least recall."""
    right = (outputs.argmax(1) == targets).double()
    return min(float(right[targets == number].mean()) for number in range(classes))


def mechanism() -> fedpriv.Mechanism:
    plain = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    return plain.calibrate(epsilon=8.0, delta=1e-3, rounds=3)


def task(**figures: object) -> fedpriv.Task:
    torch.manual_seed(0)
    return fedpriv.Task(nn.Linear(3, 3), figures={**FIGURES, **figures})


def simulated(
    folder: Path, made: fedpriv.Task, *, quiet: bool = True, **changes: object
) -> fedpriv.Run:
    settings = {"local": fedpriv.SGD(1.0, epochs=1), "seed": 1, **changes}
    return fedpriv.simulate(people(), made, mechanism(), out=folder, quiet=quiet, **settings)


def test_names_with_ends_of_lines_keep_the_plan_whole(tmp_path: Path) -> None:
    made = fedpriv.Task(nn.Sequential(OrderedDict([("a\nb\u2028c", nn.Linear(3, 3))])))
    plain = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.PerLayer(1.0))
    budgeted = plain.calibrate(epsilon=8.0, delta=1e-3, rounds=1)
    fedpriv.simulate(people(), made, budgeted, out=tmp_path / "run", quiet=True)
    (released,) = read_run(tmp_path / "run").rounds
    assert any(name.startswith("a\nb\u2028c") for name in released.clipping_norms)


def test_the_model_of_a_run_gives_its_accuracy_in_spite_of_dropout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = fedpriv.Task(nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 3)))
    run = simulated(tmp_path / "run", made)
    right = run.model(torch.tensor(X[200:])).argmax(1) == torch.tensor(Y[200:])
    assert run.accuracy == pytest.approx(float(right.double().mean()))
    assert made.model.training


@pytest.mark.slow
def test_a_run_shows_figures_where_it_shows_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    run = simulated(
        tmp_path / "run",
        task(worst=lambda o, t: worst_class(o, t, 3)),
        quiet=False,
        trackers=[told.append],
    )
    with torch.no_grad():
        outputs, targets = run.model(torch.tensor(X[200:])), torch.tensor(Y[200:])
    right = outputs.argmax(1) == targets
    assert run.figures["worst"] == worst_class(outputs, targets, 3)
    assert run.accuracy == pytest.approx(float(right.double().mean()))
    by_user = right.view(5, 8).double().mean(1).numpy()
    assert run.held_out_users["accuracy"] == pytest.approx(
        {
            "users": 5,
            "mean": by_user.mean(),
            "q10": np.quantile(by_user, 0.1),
            "q50": np.quantile(by_user, 0.5),
            "q90": np.quantile(by_user, 0.9),
        }
    )
    printed_text = capsys.readouterr().out
    for name in ("area", "best two", "worst"):
        assert f"{name} on held-out rows" in printed_text
    assert "accuracy of 5 held-out users" in printed_text
    # Lines of metrics.jsonl, what callbacks and trackers are given, and the table of pandas.
    assert [each.figures for each in run.rounds] == [each.figures for each in told]
    assert run.rounds[-1].figures == run.figures
    assert run.rounds[-1].held_out_users == run.held_out_users
    scalars = told[-1].scalars
    assert scalars["test/area"] == run.figures["area"]
    users = {name for name in scalars if name.startswith("held_out_users/accuracy/")}
    assert users == {f"held_out_users/accuracy/{key}" for key in ("mean", "q10", "q50", "q90")}
    page = run.report().read_text(encoding="utf-8")
    for text in ("Held-out area by round", "Held-out accuracy by user"):
        assert text in page
    drawn = {file.name for file in run.draw() if file.stat().st_size}
    assert {"figure-best%20two.png", "users-accuracy.svg"} < drawn
    assert {file.name for file in (tmp_path / "run" / "charts").iterdir()} == drawn


def test_without_users_of_held_out_rows_nothing_is_said_of_them(tmp_path: Path) -> None:
    run = fedpriv.simulate(
        people(None),
        task(),
        mechanism(),
        local=fedpriv.SGD(1.0, epochs=1),
        out=tmp_path / "run",
        quiet=True,
    )
    assert run.held_out_users == {}
    assert not any("user" in chart.title for chart in round_charts(run.rounds, Unit.USER))


def test_a_figure_that_fails_costs_nothing_at_first_and_no_run_later(tmp_path: Path) -> None:
    def at_first(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise RuntimeError("no such thing")

    with pytest.raises(ModelError, match=r"figure 'broken' cannot be computed .* no such thing"):
        simulated(tmp_path / "none", task(broken=at_first))
    assert not (tmp_path / "none").exists()
    calls = []

    def later(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        calls.append(len(targets))
        if len(calls) > 10:
            raise RuntimeError("no such thing")
        return 1.0

    run = simulated(tmp_path / "run", task(broken=later))
    assert len(run.rounds) == 3
    assert math.isnan(run.figures["broken"])
    assert math.isfinite(run.figures["area"])
    assert math.isnan(RunFolder(tmp_path / "run").results()[-1].figures["broken"])
    assert run.report().exists()


FILE = f"""
name = "file"
rounds = 2
data = "{__name__}:people"

[model]
name = "softmax"
options = {{ inputs = 3, classes = 3 }}

[local]
learning_rate = 1.0
epochs = 1

[clipping]
norm = 1.0

[privacy]
sampling_probability = 0.5
epsilon = 8.0
delta = 1e-3

[evaluation.figures]
area = "auc"
worst = {{ figure = "{__name__}:worst_class", classes = 3 }}
"""


def test_figures_are_named_in_a_file(tmp_path: Path) -> None:
    file, folder = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text(FILE)
    text = printed("simulate", file, "--out", folder)
    assert re.search(r"area on held-out rows +│ 0\.\d+", text)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [set(row["figures"]) for row in rows] == [{"area", "worst"}] * 2
    assert set(rows[0]["held_out_users"]) == {"loss", "accuracy", "area", "worst"}
    # The plan can be run again.
    printed("simulate", folder / "plan.toml", "--out", tmp_path / "again", "--set", "run=again")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ('evaluation.figures.area="acu"', "figure 'area' is 'acu', which is unknown"),
        ("evaluation.figures.area=3", "figure 'area' is 3"),
        ('evaluation.figures.area="rmse"', "figure 'area' cannot be computed on the held-out rows"),
        ('evaluation.figures.loss="auc"', "figure 'loss' is always measured"),
        ('evaluation.figure.a="auc"', "unknown key evaluation.figure"),
        ("model.inputs=[]", "inputs are (); there must be at least one"),
        ('model.inputs="z"', "no field 'z'; inputs and targets must be among ['"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(
    tmp_path: Path, setting: str, sentence: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE)
    assert sentence in refused("simulate", file, "--out", tmp_path / "run", "--set", setting)
    assert not (tmp_path / "run").exists()


def test_a_comparison_has_figures_of_each_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = fedpriv.compare(
        people(),
        task(),
        mechanism(),
        {"sgd": {}, "slow": {"local": fedpriv.SGD(0.1, epochs=1)}},
        local=fedpriv.SGD(1.0, epochs=1),
        seeds=2,
        out=tmp_path / "study",
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "best two" in text
    assert "accuracy of held-out users: 10%" in text
    for arm in study.arms:
        of_arm = [run for run in study.runs if run.arm == arm.arm]
        areas = [run.figures["area"] for run in of_arm]
        assert arm.figures["area"].mean == pytest.approx(np.mean(areas))
        assert arm.figures["area"].half_width > 0.0
        low = [run.held_out_users["accuracy"]["q10"] for run in of_arm]
        assert arm.figures["accuracy of held-out users: 10%"].mean == pytest.approx(np.mean(low))
    page = study.report().read_text(encoding="utf-8")
    assert "accuracy of held-out users: 90%" in page
    (row, _) = json.loads((tmp_path / "study" / "results.json").read_text())["arms"]
    assert row["figures"]["area"]["low"] < row["figures"]["area"]["mean"]


def test_users_of_held_out_rows_may_not_be_enrolled() -> None:
    owners = OWNERS.astype("U20")
    owners[3] = "person 7"
    with pytest.raises(DataError, match="held-out rows name 1 of the enrolled users"):
        people(owners)
    fields = {**people().users.fields, HELD_OUT_USER: np.arange(200)}
    users = replace(people().users, fields=fields)
    with pytest.raises(DataError, match=r"held_out_user.*only held-out rows may"):
        replace(people(), users=users)
    with pytest.raises(DataError, match="test fields have"):
        people(OWNERS[:30])
    with pytest.raises(DataError, match=r"user id number 0 is 1.0"):
        people(np.ones(40))
