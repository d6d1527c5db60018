"""Experiments that release more than an update: plan and simulate."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from fedpriv.accounting.accountants import epsilon
from fedpriv.ledger.ledger import Ledger
from fedpriv.support.checks import text_down
from tests.commandline import printed, refused, table

EXPERIMENT = """
name = "released"
rounds = 3
seed = 1

[data]
name = "digits"

[model]
name = "softmax"

[local]
learning_rate = 0.5
steps = 1

[[clipping.groups]]
name = "weights"
tensors = ["*.weight"]
strategy = "joint"
norm = 0.4
share = 3.0

[[clipping.groups]]
name = "rest"
tensors = ["*"]
norm = 0.1
share = 1.0

[clipping.adaptive]
quantile = 0.5
share = 0.1

[metrics]
share = 0.2
report.accuracy = {}
report.label-counts = { classes = 10, bound = 5.0 }

[privacy]
sampling_probability = 0.3
epsilon = 2.0
delta = 1e-3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "released.toml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    return path


def test_plan_shows_every_group_and_spends_nothing(file: Path) -> None:
    rows = {row[0]: row[1:] for row in table("plan", file, cwd=file.parent)}
    assert list(rows) == [
        "weights",
        "rest",
        "metrics/accuracy",
        "metrics/label-counts",
        "metrics/contributors",
        "unclipped",
    ]
    shares = [float(row[4].rstrip("%")) for row in rows.values()]
    assert shares == pytest.approx([51.8, 17.2, 10.0, 10.0, 1.0, 10.0])
    assert rows["weights"][1:3] == ["640", "0.4"]
    text = printed("plan", file, cwd=file.parent)
    assert "Nothing was spent." in text
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_plan_knows_what_a_shared_ledger_holds(tmp_path: Path) -> None:
    ledger = tmp_path / "shared.sqlite"
    given = ["digits", "--set", "rounds=2", "--set", f"privacy.ledger={ledger}"]
    printed("simulate", *given, "--set", "privacy.epsilon=1.0", "--out", tmp_path / "first")
    more = [*given, "--set", "privacy.epsilon=2.0", "--set", "seed=7"]
    text = " ".join(printed("plan", *more).split())
    printed("simulate", *more, "--out", tmp_path / "second")
    noise = tomllib.loads((tmp_path / "second" / "plan.toml").read_text())["privacy"]
    assert f"z = {text_down(noise['noise_multiplier'])} of the whole round" in text
    after = re.search(rf"With what {ledger} holds, that is ε = ([0-9.]+)\.", text)
    assert after is not None
    with Ledger.open(ledger) as opened:
        together = epsilon(opened.spent(), 1e-3)
    assert float(after[1]) == pytest.approx(together.epsilon, abs=1e-3)
    assert 1.98 <= together.epsilon <= 2.0
    less = [*given, "--set", "privacy.epsilon=1.0", "--set", "seed=8", "--out", tmp_path / "third"]
    assert "privacy.epsilon is 1.0 and must be larger" in refused("simulate", *less)
    others = [*more, "--set", "data.options.users=100"]
    assert "is of population 'digits: 287 users" in refused("plan", *others)


def test_a_run_releases_metrics_with_their_noise_at_one_epsilon(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed("simulate", file, "--out", run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert set(row["metrics"]) == {"accuracy", "label-counts", "contributors"}
        assert len(row["metrics"]["label-counts"]) == 10
        assert row["metrics_noise_stddev"]["accuracy"] > 0.0
        assert len(row["clipping_norms"]) == len(row["unclipped"]) == 2
    assert list(rows[0]["clipping_norms"].values()) == [0.4, 0.1]
    assert list(rows[1]["clipping_norms"].values()) != [0.4, 0.1]
    assert rows[-1]["epsilon"] <= 2.0
    drawn = printed("report", run, "--charts", tmp_path / "charts").split()
    assert str(tmp_path / "charts" / "metric-accuracy.png") in drawn
    assert all(Path(file).stat().st_size > 0 for file in drawn)
    with Ledger.open(run / "ledger.sqlite") as ledger:
        events = [row.event for row in ledger.charges()]
    assert [[q.clipping_norm for q in e.queries[:2]] for e in events] == [
        list(row["clipping_norms"].values()) for row in rows
    ]
    assert len({round(event.noise_multiplier, 9) for event in events}) == 1


def test_resuming_keeps_the_noise_that_was_calibrated_at_first(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    printed("simulate", file, "--out", run)
    resumed = printed("simulate", file, "--out", run, "--resume")
    assert "resuming" in resumed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--set", "metrics.report.accuracy={a=1}"], "metric 'accuracy' takes no options"),
        (["plan", "--set", "metrics.report.acuracy={}"], "did you mean 'accuracy'"),
        (["plan", "--set", "metrics.share=0.95"], "must leave some to the update"),
        (
            ["plan", "--set", "averaging.cap=5"],
            "averaging has cap 5 and total_weight None",
        ),
        (
            ["plan", "--set", "averaging.total_weight=9.0"],
            "averaging has cap None and total_weight 9.0",
        ),
        (["plan", "--set", "averaging.floor=2.0"], "floor is 2.0"),
        (["plan", "--set", "clipping.adaptive.quantile=1.5"], "quantile of adaptive clipping is"),
        (["plan", "--set", "clipping.norm=1.0"], "norm is given next to groups"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "refused",
)
def test_bad_input_is_refused(arguments: list[str], message: str, file: Path) -> None:
    command, *rest = arguments
    assert message in refused(command, file, *rest, cwd=file.parent)


def test_weights_by_examples_and_a_floor_run(file: Path, tmp_path: Path) -> None:
    settings = ["cap=20", "total_weight=60.0", "floor=0.5"]
    assignments = [part for each in settings for part in ("--set", f"averaging.{each}")]
    text = printed("plan", file, *assignments)
    assert "a public constant" in text
    printed("simulate", file, *assignments, "--out", tmp_path / "run")
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        first = next(ledger.charges()).event
    # 0.4 and 0.1, moved twice as far as without a floor, and by what rounding adds to that.
    norms = [query.clipping_norm for query in first.queries[:2]]
    assert [0.8, 0.2] <= norms == pytest.approx([0.8, 0.2], rel=1e-5)


OWN = """
def both(outputs, targets):
    return outputs.softmax(1)[:, :2]
"""


def test_a_vector_is_asked_for_in_the_file(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    tables = """
report."mine:both" = { radius = 1, shape = [2] }
report."update-norms:rest" = { thresholds = [1, 0.5] }
"""
    text = file.read_text().replace("report.accuracy = {}", tables)
    file.write_text(text, encoding="utf-8")
    run, again = tmp_path / "run", tmp_path / "again"
    printed("simulate", file, "--out", run, cwd=tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert len(row["metrics"]["mine:both"]) == len(row["metrics"]["update-norms:rest"]) == 2
    assert np.ptp([row["metrics"]["mine:both"] for row in rows]) > 0.0
    # The resolved plan says the same, and can be run again.
    printed("simulate", run / "plan.toml", "--out", again, cwd=tmp_path)
    plans = [folder / "plan.sha256" for folder in (run, again)]
    assert plans[0].read_bytes() == plans[1].read_bytes()
    for shape, found in (("[2.0]", "2.0"), ("2", "2"), ("[0]", "0")):
        setting = f'metrics.report={{"mine:both"={{radius=1, shape={shape}}}}}'
        sentence = refused("plan", file, "--set", setting, cwd=tmp_path)
        assert f"shape of metric 'mine:both' is {found}; " in sentence


MODEL = """
import torch

def normalised():
    layers = torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)
    return torch.nn.Sequential(*layers)
"""


def test_statistics_of_batch_normalisation_are_released_and_kept(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    settings = ['model.name="mine:normalised"', "metrics.report.batch-norm={bound=4.0}"]
    assignments = [part for setting in settings for part in ("--set", setting)]
    run = tmp_path / "run"
    printed("simulate", file, *assignments, "--out", run, cwd=tmp_path)
    with safe_open(run / "model.safetensors", framework="numpy") as model:
        assert set(model.keys()) >= {"1.running_mean", "1.running_var", "2.weight"}
        assert np.any(model.get_tensor("1.running_mean") != 0.0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows[-1]["metrics"]["batch-norm"]) == 2 * 64
    resumed = printed("simulate", file, *assignments, "--out", run, "--resume", cwd=tmp_path)
    assert "resuming" in resumed
