"""Whoever is told of rounds is told what was released, and cannot stop the run."""

import dataclasses
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import tomli_w
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedpriv.training.rounds import RoundResult
from tests.commandline import fedpriv, printed, refused
from tests.studies.studying import BASE

DOCS = Path(__file__).parents[2] / "docs"
RELEASING = BASE | {
    "rounds": 3,
    "clipping": {"norm": 0.5, "strategy": "per-layer", "parts": "tensor", "adaptive": {}},
    "metrics": {"report": {"accuracy": {}, "label-counts": {"classes": 3, "bound": 5.0}}},
}


def experiment(folder: Path, **changes: object) -> Path:
    path = folder / "experiment.toml"
    path.write_text(tomli_w.dumps(RELEASING | changes))
    return path


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_example_of_the_guide_is_told_what_metrics_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "following.md").read_text()
    function, tracker = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    named = re.findall(r"```toml\ntrackers = \[(.*?)\]\n```", page)
    (tmp_path / "mine.py").write_text(function)
    (tmp_path / "notes.py").write_text(tracker)
    path = experiment(tmp_path, trackers=[json.loads(each) for each in named])
    monkeypatch.delitem(sys.modules, "notes", raising=False)
    printed("simulate", path, "--out", "run", cwd=tmp_path)
    sys.modules.pop("notes")
    first, *noted, last = (tmp_path / "run" / "notes.txt").read_text().splitlines()
    assert first.endswith(" at clipping norm 0.5")
    expected = [f"{row['round']} {row['epsilon']}" for row in rows(tmp_path / "run")]
    assert noted == expected
    assert last == "3 of 3 rounds: all rounds were run"
    sent = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [step for step, _ in sent] == [1, 2, 3]
    for row, (_, metrics) in zip(rows(tmp_path / "run"), sent, strict=True):
        assert metrics == {
            "test/loss": row["loss"],
            "test/accuracy": row["accuracy"],
            "privacy/epsilon": row["epsilon"],
            "clipping_norm/1.weight": row["clipping_norms"]["1.weight"],
            "clipping_norm/1.bias": row["clipping_norms"]["1.bias"],
            "unclipped/1.weight": row["unclipped"]["1.weight"],
            "unclipped/1.bias": row["unclipped"]["1.bias"],
            "metric/accuracy": row["metrics"]["accuracy"],
            "metric/contributors": row["metrics"]["contributors"],
        }


def test_event_files_hold_what_metrics_say_and_a_resumed_run_adds_to_them(tmp_path: Path) -> None:
    path = experiment(tmp_path, trackers=["tensorboard"])
    (tmp_path / "mine.py").write_text(
        "def stop(released):\n    if released.round == 2:\n        raise KeyboardInterrupt\n"
    )
    stopping = ("--set", 'trackers=["tensorboard", "mine:stop"]')
    assert fedpriv("simulate", path, "--out", "run", *stopping, cwd=tmp_path).returncode == 130
    printed("simulate", path, "--out", "run", "--resume", cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = rows(tmp_path / "run")
    assert [row["round"] for row in written] == [1, 2, 3]
    for tag, column in (("test/accuracy", "accuracy"), ("privacy/epsilon", "epsilon")):
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert [scalar.value for scalar in scalars] == pytest.approx([r[column] for r in written])


def test_a_callback_that_raises_is_named_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(
        "def down(released):\n    raise OSError('nobody\\n answers')\n\n\n"
        "def seen(released):\n    with open('seen', 'a') as file:\n        file.write('x')\n"
    )
    path = experiment(tmp_path, trackers=["mine:down", "mine:seen"])
    with caplog.at_level(logging.WARNING):
        printed("simulate", path, "--out", "run", cwd=tmp_path)
    assert len(rows(tmp_path / "run")) == 3
    assert (tmp_path / "seen").read_text() == "xxx"
    assert caplog.messages == [
        "tracker mine:down raised OSError in round 1: nobody answers; the run goes on "
        "without it, and metrics.jsonl has every round"
    ]


def test_nothing_that_is_not_released_has_a_place() -> None:
    # A new field must be a release, or public, as the plan is.
    assert [field.name for field in dataclasses.fields(RoundResult)] == [
        "run",
        "rounds",
        "round",
        "attempt",
        "charge",
        "epsilon",
        "delta",
        "expected_cohort_size",
        "clipping_norms",
        "unclipped",
        "metrics",
        "metrics_noise_stddev",
        "loss",
        "accuracy",
        "figures",
        "held_out_users",
        "simulation_only_seconds",  # None for callbacks
        "unit",
        "relation",
        "as_if",
        "randomness",
    ]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "json",
            "trackers 'json' is unknown; known names: mlflow, tensorboard, wandb, or ",
        ),
        ("nowhere:log", "trackers 'nowhere:log' cannot be imported"),
        ("json:nothing", "trackers 'json:nothing' cannot be imported"),
        ("json:__name__", "module 'json' has no function '__name__'"),
    ],
)
def test_bad_callbacks_are_refused_before_the_run(tmp_path: Path, path: str, words: str) -> None:
    file = experiment(tmp_path, trackers=[path])
    assert words in refused("simulate", file, "--out", "run", cwd=tmp_path)
    assert not (tmp_path / "run").exists()
