"""The benchmark's harness: what it compares and how it sums up, not how fast anything is."""

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedpriv.errors import WorkerError
from simulations.benchmarks import arena, process
from simulations.benchmarks.arena import Player, Setting, playing
from simulations.benchmarks.compare import REFERENCE, differences_of, main, settings_of
from simulations.benchmarks.contestants import Done, Turn
from simulations.benchmarks.machine import machine, versions
from simulations.benchmarks.table import Contest, Row, figures, table
from simulations.benchmarks.works import WORKS
from tests.server.loopback import until

MADE_UP = Row(
    "made up",
    [
        Contest("fedpriv", 100, 2e9, [0.5, 9.0, 0.4], 1e-7),
        Contest("plain", 100, 2e9, [4.0, 2.0, 1.0], 0.0),
        Contest("pfl", 50, 1e9, [5.0, 5.0], 1e-7),
        Contest("pfl-3", 50, 1e9, [2.0, 2.0], 1e-7),
    ],
    ceiling=8e9,
)


def test_figures_by_hand() -> None:
    row = json.loads(json.dumps(figures({"made-up": MADE_UP})))["made-up"]
    assert row["matrix products, GFLOP/s"] == 8.0
    ours, plain, pfl = (row["contestants"][name] for name in ("fedpriv", "plain", "pfl"))
    assert [c["users per second"] for c in (ours, plain, pfl)] == [200.0, 50.0, 10.0]
    assert [c["ours over it"] for c in (ours, plain, pfl)] == [1.0, 4.0, 20.0]
    shares = [c["share of the rate of matrix products"] for c in (ours, plain, pfl)]
    assert shares == [0.5, 0.125, 0.025]
    assert pfl["seconds of a round in each turn"] == [5.0, 5.0]


def test_the_table_says_who_is_how_much_slower() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(table([MADE_UP]))
    console.file.close()
    lines = [line.split("  ") for line in console.export_text().splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["made up", "fedpriv", "200", "50.0%"] in cells
    assert ["pfl, one process", "10", "20.0 ×", "2.5%"] in cells
    assert ["pfl, 3 processes", "25", "8.0 ×", "6.2%"] in cells


@dataclass(frozen=True)
class Sums:
    """A player who does nothing, and says the same each time."""

    total: list[float]

    def take(self, _turn: Turn) -> Done:
        return Done(0.0, np.array(self.total))


@pytest.mark.parametrize("wrong", [[3.0, 4.1], [float("nan"), 4.0], [-3.0, -4.0]])
def test_who_does_other_work_is_refused(wrong: list[float]) -> None:
    work = WORKS["mlp"]()
    players = {REFERENCE: Sums([3.0, 4.0]), "plain": Sums([3.0, 4.0])}
    players |= {"fedpriv": Sums([3.0, 4.00001]), "products": Sums([9.0])}
    assert differences_of(work, players) == {"plain": 0.0, "fedpriv": pytest.approx(2e-6)}
    with pytest.raises(WorkerError, match="the sum of pfl differs"):
        differences_of(work, players | {"pfl": Sums(wrong)})


def test_who_takes_part() -> None:
    found = settings_of("mlp", [], "cpu", 2)
    assert [*found] == ["fedpriv", "plain", "pfl", "pfl-2", "flower", "products", REFERENCE]
    assert found["pfl-2"] == Setting("pfl", "mlp", "cpu", 1, 2)
    found = settings_of("dpsgd", ["flower", "pfl"], "cuda", 16)
    assert [*found] == ["fedpriv", "plain", "opacus", "products", REFERENCE]
    assert {s.device for name, s in found.items() if name != REFERENCE} == {"cuda"}
    assert found[REFERENCE] == Setting("plain", "dpsgd", "cpu", 16)
    found = settings_of("mlp", ["flower"], "cuda", 16)
    assert [(s.processes, s.threads) for s in found.values() if s.contestant == "pfl"] == [
        (1, 16),
        (2, 8),
        (3, 5),
        (4, 4),
        (5, 3),
    ]
    found = settings_of("mlp", [], "cuda", 16, [1, 5])
    assert [*found] == ["fedpriv", "plain", "pfl", "pfl-5", "flower", "products", REFERENCE]


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
    turn = Turn(range(7), WORKS["mlp"]().without_order())
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
    contestants = kept["rows"]["mlp"]["contestants"]
    assert set(contestants) == {"fedpriv", "plain", "flower"}
    assert {c["users in a turn"] for c in contestants.values()} == {100}
    assert kept["machine"]["threads"] == 2


def test_absent_rivals_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--rows", "mlp"])
    monkeypatch.setitem(sys.modules, "pfl", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "pfl cannot be imported; `make bench-rivals`" in capsys.readouterr().err
