"""The benchmark's harness: what it compares and how it sums up, not how fast anything is."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedpriv.errors import WorkerError
from simulations.benchmarks import arena, digits, process
from simulations.benchmarks.arena import Player, Setting, playing
from simulations.benchmarks.compare import REFERENCE, differences_of, keep, main, settings_of
from simulations.benchmarks.contestants import Done, Turn
from simulations.benchmarks.machine import machine, versions
from simulations.benchmarks.table import Contest, Row, figures, ratios_text, table
from simulations.benchmarks.works import WORKS
from tests.server.loopback import until


def contest(name: str, first: float, *seconds: float, mebibytes: float = 0.0) -> Contest:
    return Contest(name, 100, 3.0, first, seconds, 1e-7, mebibytes)


MADE_UP = Row(
    "made up",
    [
        contest("fedpriv", 2.0, 0.5, 9.0, 0.4, mebibytes=20.0),
        contest("fedpriv-2", 2.0, 0.2),
        contest("rule", 2.0, 1.0),
        contest("alone", 2.0, 1.0, mebibytes=15.0),
        contest("equal", 2.0, 0.25),
        contest("plain", 5.0, 4.0, 2.0, 1.0, mebibytes=10.0),
        contest("pfl", 5.0, 5.0, 5.0),
        contest("pfl-2", 5.0, 0.8, 0.8),
    ],
)


def test_figures_by_hand() -> None:
    row = figures(MADE_UP)
    assert row["fedpriv's"] == {
        "of a plain loop": 4.0,
        "of pfl, one process each": 10.0,
        "of pfl at its best": 4.0,
        "of the road that a clock takes, by the fixed rule": 0.5,
        "time over equal sizes": 2.0,
        "first round over a later one": 4.0,
        "memory of users alone over a plain loop": 1.5,
    }
    ours, pfl = (row["contestants"][name] for name in ("fedpriv", "pfl"))
    assert (ours["users per second"], ours["seconds of the first round"]) == (200.0, 2.0)
    assert pfl["seconds of a round in each turn"] == [5.0, 5.0]
    assert Row("less", MADE_UP.contests[:1]).ratios() == {"first round over a later one": 4.0}


def test_a_row_is_written_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    file, again = tmp_path / "rows.json", replace(MADE_UP, title="again")
    for name, row in (("cnn", MADE_UP), ("mlp", MADE_UP), ("cnn", again)):
        keep(file, name, row, "cpu", 2)
    kept = json.loads(file.read_text())
    assert [(name, row["work"]) for name, row in kept.items()] == [
        ("mlp", "made up"),
        ("cnn", "again"),
    ]
    assert kept["mlp"]["machine"]["threads"] == 2


def test_the_table_says_who_is_how_much_slower() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(table([MADE_UP]))
    console.file.close()
    lines = [line.split("  ") for line in console.export_text().splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["made up", "fedpriv", "200", "3.00 s", "2.00 s", "20"] in cells
    assert ["pfl-2", "125", "1.60 ×", "3.00 s", "5.00 s", "0"] in cells
    assert ratios_text(MADE_UP).startswith("4.00 × of a plain loop, 10.00 × of pfl, one process")


@dataclass(frozen=True)
class Sums:
    """A player who does nothing, and says the same each time."""

    total: list[float]

    def take(self, _turn: Turn) -> Done:
        return Done(0.0, np.array(self.total))


@pytest.mark.parametrize("wrong", [[3.0, 4.1], [float("nan"), 4.0], [-3.0, -4.0]])
def test_who_does_other_work_is_refused(wrong: list[float]) -> None:
    work = WORKS["towers"]()
    players = {"plain": Sums([3.0, 4.0]), "fedpriv": Sums([3.0, 4.00001])}
    assert differences_of(work, players) == {"plain": 0.0, "fedpriv": pytest.approx(2e-6)}
    with pytest.raises(WorkerError, match="the sum of pfl differs"):
        differences_of(work, players | {"pfl": Sums(wrong)})
    with pytest.raises(WorkerError, match="the sum of plain differs"):
        differences_of(work, players | {REFERENCE: Sums(wrong)})


def test_who_takes_part() -> None:
    found = settings_of("mlp", [], "cpu", 2)
    ours = ["fedpriv", "plain", "rule", "alone", "fedpriv-2"]
    assert [*found] == [*ours, "pfl", "pfl-2", "flower"]
    assert found["pfl-2"] == Setting("pfl", "mlp", "cpu", 1, 2)
    assert found["fedpriv-2"] == Setting("fedpriv", "mlp", "cpu", 2)
    found = settings_of("dpsgd", ["flower", "pfl"], "cuda", 16)
    assert [*found] == ["fedpriv", "plain", "opacus", REFERENCE]
    assert {s.device for name, s in found.items() if name != REFERENCE} == {"cuda"}
    assert found[REFERENCE] == Setting("plain", "dpsgd", "cpu", 1)
    found = settings_of("mlp-pareto", [], "cuda", 16)
    assert found["equal"] == Setting("fedpriv", "mlp-equal", "cuda", 16)
    assert [(s.processes, s.threads) for s in found.values() if s.contestant == "pfl"] == [
        (1, 16),
        (2, 8),
        (3, 5),
        (4, 4),
        (5, 3),
    ]
    found = settings_of("lstm", [], "cuda", 16, [1, 5])
    assert [*found] == ["fedpriv", "plain", "pfl", "pfl-5", REFERENCE]


def state_of(player: subprocess.Popen[bytes]) -> str:
    """One letter; T: stopped."""
    return Path(f"/proc/{player.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_players_are_stopped_when_it_is_not_their_turn_and_end_with_the_block() -> None:
    turn = Turn(range(1), WORKS["mlp"]().local)
    with playing({"loop": Setting("plain", "mlp", "cpu", 1)}) as players:
        player = players["loop"]
        (one,) = player.processes
        assert player.take(turn).seconds > 0.0
        until(lambda: state_of(one.process) == "T")
        assert player.take(turn).seconds > 0.0
    assert one.process.returncode == 0


@pytest.mark.slow
def test_processes_share_the_users_of_a_turn() -> None:
    work = WORKS["mlp"]()
    turn = Turn(work.checked[:7], work.local)
    settings = {f"{n}": Setting("plain", "mlp", "cpu", 1, n) for n in (1, 3)}
    with playing(settings) as players:
        one, three = (players[name].take(turn) for name in settings)
        assert len(players["3"].processes) == 3
    np.testing.assert_allclose(three.total, one.total, atol=1e-6)
    assert np.abs(one.total).max() > 1e-3


class OneTurn:
    """An end of a pipe by which one turn comes."""

    def __init__(self, turn: Turn) -> None:
        self.turns, self.done = [turn], []

    def recv(self) -> Turn:
        if not self.turns:
            raise EOFError
        return self.turns.pop()

    def send(self, done: Done) -> None:
        self.done.append(done)


@pytest.mark.parametrize(("least", "rounds"), [(0.0, 1), (1.0, 1), (5.0, 2), (6.0, 2), (7.0, 3)])
def test_a_turn_is_rounds_until_its_time_has_passed(
    least: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def train(_turn: Turn) -> np.ndarray:
        nonlocal clock
        clock += 3.0
        return np.array([clock])

    monkeypatch.setattr(process, "perf_counter", lambda: clock)
    pipe = OneTurn(Turn(range(1), WORKS["mlp"]().local, least))
    process.serve(pipe, train)
    (done,) = pipe.done
    assert (done.seconds, done.total.tolist()) == (3.0, [3.0 * rounds])


def test_a_player_whose_process_has_ended_is_told() -> None:
    ours, theirs = multiprocessing.Pipe()
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        theirs.close()
        ended.wait()
        player = Player([arena.Process("nobody", ended, ours)])
        with pytest.raises(WorkerError, match="the process of nobody has ended"):
            player.take(Turn(range(1), WORKS["mlp"]().local))
    ours.close()


def test_processor_time_is_of_this_process_and_of_its_slowest_fork() -> None:
    assert process.between({0: 1.0, 7: 1.0}, {0: 1.5, 7: 3.0, 8: 0.5}) == 2.5
    assert process.between({0: 1.0}, {0: 1.5}) == 0.5
    context, (ours, theirs) = multiprocessing.get_context("fork"), multiprocessing.Pipe()
    fork = context.Process(target=busy_until_told, args=(theirs, 0.2), daemon=True)
    before = process.of_processors()
    fork.start()
    ours.recv()
    after = process.of_processors()
    ours.send("leave")
    fork.join()
    assert after[fork.pid] >= 0.2
    assert process.between(before, after) >= 0.2
    assert process.between(before, process.of_processors()) < 0.2


def busy_until_told(pipe: Connection, seconds: float) -> None:
    while time.process_time() < seconds:
        pass
    pipe.send("done")
    pipe.recv()


def test_what_is_kept_of_the_machine() -> None:
    assert machine("cpu", 2).keys() == {"processor", "cores", "device", "threads", "system"}
    found = versions(["numpy", "no-such-package"])
    assert found["numpy"] == np.__version__
    assert "no-such-package" not in found


@pytest.mark.slow
def test_a_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--rows", "mlp", "--without", "pfl", "--repeats", "1", "--threads", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "simulations.benchmarks.compare", *options, "--json", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads(file.read_text())
    contestants = kept["mlp"]["contestants"]
    ours = {"fedpriv", "fedpriv-2", "rule", "alone"}
    assert set(contestants) == {*ours, "plain", "flower"}
    assert all("users train" in contestants[name]["logged"] for name in ours)
    assert {c["users in a turn"] for c in contestants.values()} == {100}
    assert kept["mlp"]["machine"]["threads"] == 2


def test_shares_of_a_run_by_hand() -> None:
    run = {"start": 1.0, "training": 0.5, "ledger": 0.25, "prices": 0.25, "all": 2.5}
    rest = "all that is not start, training and ledger"
    expected = {"start": 0.4, "training": 0.2, "ledger": 0.1, "prices": 0.1, rest: 0.3}
    assert digits.shares([run, {**run, "start": 0.5}, {**run, "start": 2.0}]) == pytest.approx(
        expected
    )


@pytest.mark.slow
def test_each_part_of_a_run_takes_time() -> None:
    parts = digits.apart()
    whole = parts.pop("all")
    assert len(parts) == 5
    assert min(parts.values()) > 0.0
    assert sum(parts.values()) <= whole


def test_absent_rivals_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--rows", "mlp"])
    monkeypatch.setitem(sys.modules, "pfl", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "pfl cannot be imported; `make bench-rivals`" in capsys.readouterr().err
