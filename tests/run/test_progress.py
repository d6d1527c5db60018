"""How far work is: bars where they can move, else lines, and no more than one a minute."""

import re
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fedpriv import SGD, FedAvg, Flat, Mechanism, Task, compare, simulate
from fedpriv.data import load_digits
from fedpriv.experiment.models import softmax_regression
from fedpriv.run import terminal
from fedpriv.run.terminal import displayed


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_what_cannot_move_gets_lines(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(terminal, "_BETWEEN_LINES", seconds)
    console = Console(file=StringIO(), width=60, markup=False)
    with displayed(console) as display:
        first, second = display.add("[arm] a", 10), display.add("b", 20, 5)
        display.update(first, 3, "", "accuracy 81.2%", "ε 0.520")
        display.tell()
        display.update(second, 6, "1 of 3 seeds")
        display.tell()
        told = console.file.getvalue().splitlines()
    if seconds:
        assert told == []
        return
    assert told[:2] == ["[arm] a: 3 of 10 rounds, accuracy 81.2%  ε 0.520", "b: 5 of 20 rounds"]
    assert told[3].startswith("b: 6 of 20 rounds, 1 of 3 seeds")


def test_a_terminal_gets_bars_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_BETWEEN_LINES", 0.0)
    console = Console(file=StringIO(), force_terminal=True, width=100)
    with displayed(console) as display:
        line = display.add("a", 10)
        display.update(line, 3, "ε 0.520")
        display.tell()
    text = console.file.getvalue()
    assert "ε 0.520" in text
    assert "of 10 rounds" not in text


FIGURES = ("accuracy 81.2%", "ε 0.520", "contributors 82.3 ± 4.5 of 86.1", "1,234 users/s")


@pytest.mark.parametrize(("width", "shown"), [(60, 1), (80, 2), (100, 3), (130, 4)])
def test_a_narrow_terminal_shows_rounds_time_and_bar_before_other_figures(
    width: int, shown: int
) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=width, color_system=None)
    with displayed(console) as display:
        display.update(display.add("digits-seed1", 3000), 1500, *FIGURES)
    line = console.file.getvalue().splitlines()[-2]
    assert "1500/3000 " in line
    assert "-:--:-- digits-seed1 " in line
    assert "━━━━" in line
    assert [figure in line for figure in FIGURES] == [n < shown for n in range(4)]


def test_without_a_terminal_the_last_line_is_whole_and_no_time_is_too_long() -> None:
    console = Console(file=StringIO(), width=30)
    with displayed(console) as display:
        line = display.add("a", 2**53)
        for done in (1, 2):
            time.sleep(0.01)
            display.update(line, done, *FIGURES)
    figures = "  ".join(FIGURES)
    assert console.file.getvalue() == f"a: 2 of {2**53} rounds, {figures}\n"


def test_a_run_and_a_study_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(terminal, "_BETWEEN_LINES", 0.0)
    people = load_digits(users=40)
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=4.0, delta=1e-3, rounds=2)
    task, local = Task(softmax_regression(), loss="cross-entropy"), SGD(0.1, steps=1)
    simulate(people, task, mechanism, local=local, out=tmp_path / "run", name="one", seed=1)
    text = " ".join(capsys.readouterr().out.split())
    assert "one-seed1: 1 of 2 rounds, accuracy" in text
    compare(
        people,
        arms={"a": {}, "b": {"server": FedAvg(0.5)}},
        seeds=1,
        out=tmp_path / "study",
        task=task,
        mechanism=mechanism,
        local=local,
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "a: 2 of 2 rounds, 1 of 1 seeds" in text
    assert "b: 2 of 2 rounds, 1 of 1 seeds accuracy" in text


def test_rounds_of_finished_runs_are_not_counted_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Else each look at a study would read all metrics of all runs so far."""
    monkeypatch.setattr(terminal, "_BETWEEN_LINES", 0.0)
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))

    def hide(_: object) -> None:
        for result in (tmp_path / "study").rglob("result.json"):
            result.with_name("metrics.jsonl").unlink(missing_ok=True)

    compare(
        load_digits(users=40),
        Task(softmax_regression(), loss="cross-entropy"),
        mechanism.calibrate(epsilon=4.0, delta=1e-3, rounds=2),
        {"a": {}, "b": {"server": FedAvg(0.5)}},
        local=SGD(0.1, steps=1),
        seeds=1,
        out=tmp_path / "study",
        trackers=[hide],
    )
    assert not list((tmp_path / "study" / "runs" / "a").rglob("metrics.jsonl"))
    told = re.findall(r"a: (\d) of 2 rounds", capsys.readouterr().out)
    assert told[-1] == "2"
