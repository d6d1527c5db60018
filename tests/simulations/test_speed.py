"""The benchmarks of the engine: what they measure, not how fast anything is."""

import cProfile
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.engine.task import Task
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import WorkerError
from fedpriv.experiment.models import softmax_regression
from fedpriv.privacy import gaussian_mechanism
from simulations import gpu_round, overheads, throughput
from simulations.benchmarks.arena import Setting
from simulations.benchmarks.contestants import Done, Turn
from simulations.throughput import Work, plain_round, request_of, speeds_of

SMALL = Work(partial(softmax_regression, inputs=6), 5, 4, (6,))


def test_both_sides_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "REPEATS", 1)
    monkeypatch.setattr(throughput, "TURN", 0.0)
    plain, *engine = speeds_of(SMALL, torch.device("cpu"), [1, 2]).items()
    assert plain[0] == "plain PyTorch loop"
    assert [name for name, _ in engine] == [f"fedpriv on cpu, chunks of {n} MiB" for n in (1, 2)]
    assert all(speed > 0 for _, speed in (plain, *engine))


@pytest.mark.parametrize("name", sorted(throughput.WORKS))
def test_every_work_has_users_that_its_model_can_train_on(name: str) -> None:
    work = replace(throughput.WORKS[name], users=1)
    task, users = Task(work.model()), work.population
    check_task(task, {field: column[:2] for field, column in users.fields.items()})
    assert users.sizes.tolist() == [work.examples]


def test_activations_are_timed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "REPEATS", 1)
    monkeypatch.setattr(throughput, "TURN", 0.0)
    names = [*speeds_of(SMALL, torch.device("cpu"), [1], ("float32", "bfloat16"))][1:]
    assert names == ["fedpriv on cpu, chunks of 1 MiB", "fedpriv on cpu, chunks of 1 MiB, bfloat16"]


@pytest.mark.parametrize(("users", "asked"), [([], 1_000), (["--users", "3"], 3)])
def test_as_many_users_train_as_are_asked_for(
    users: list[str], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def speeds(work: Work, *_: object) -> dict[str, float]:
        seen.append(work.users)
        return {"plain PyTorch loop": 1.0}

    monkeypatch.setattr(throughput, "speeds_of", speeds)
    monkeypatch.setattr(sys, "argv", ["throughput", "--work", "softmax", *users])
    throughput.main()
    assert seen == [asked]


def test_no_users_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["throughput", "--users", "0"])
    with pytest.raises(SystemExit) as stopped:
        throughput.main()
    assert stopped.value.code == 2
    assert "--users is 0" in capsys.readouterr().err


def test_the_plain_loop_leaves_the_model_as_it_was() -> None:
    task, users = Task(SMALL.model()), SMALL.population
    before = task.parameters()
    plain_round(task.model, users, 1.0)
    for name, parameter in task.parameters().items():
        np.testing.assert_array_equal(parameter, before[name])
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**6)
    assert sum(p.users for p in transport.collect(request_of(task, users))) == SMALL.users


def test_parts_of_a_round_are_all_of_it(tmp_path: Path) -> None:
    profile = cProfile.Profile(builtins=False)
    profile.runcall(overheads.run, tmp_path, overheads.prepared(100), 2)
    parts = overheads.parts_of(profile)
    assert set(overheads.BESIDE) < set(parts)
    assert min(parts.values()) > 0.0
    assert sum(parts.values()) - parts["all"] <= parts["all"]


def test_a_round_without_privacy_trains_the_same_users(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = overheads.prepared(6)
    request = replace(request_of(engine.task, engine.users), local_key=bytes(32))
    private = [partial.total for partial in engine.collect(request)]
    sent: list[list[torch.Tensor]] = []
    honest = torch.cat

    def seen(tensors: list[torch.Tensor]) -> torch.Tensor:
        sent.append(tensors)
        return honest(tensors)

    with gpu_round.without_privacy():
        monkeypatch.setattr(torch, "cat", seen)
        plain = [partial.total for partial in engine.collect(request)]
        assert not gaussian_mechanism.rounded_gaussian(bytes(32), 5, 1e9).any()
    assert not np.any(plain)  # whole numbers of 1, of which there are none
    total = honest([each.flatten() for each in sent[-1]]).numpy()
    assert (
        np.abs(request.clipping.in_units(np.sum(private, 0)) - total).max()
        < 0.01 * np.abs(total).max()
    )
    assert gaussian_mechanism.rounded_gaussian(bytes(32), 5, 1e9).any()


def test_figures_of_a_gpu_round_are_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"sums": 2.0, "plain sums": 1.0, "products": 0.5, "private": 9.0, "plain": 6.0}
    monkeypatch.setattr(gpu_round, "in_turns", lambda *given: {n: seconds[n] for n in given[0]})
    monkeypatch.setattr(gpu_round, "sums", lambda *_: lambda: 0.0)
    monkeypatch.setattr(gpu_round, "whole_rounds", lambda *_: lambda: 0.0)
    monkeypatch.setattr(gpu_round, "shared", lambda *_: {1: 2.0, 2: 1.0})
    turns = gpu_round.Turns(1, 0.0, 1, [1, 2])
    found = gpu_round.measured("mlp", torch.device("cpu"), turns)
    work = gpu_round.WORKS["mlp"]()
    assert found["sum over plain sum"] == 2.0
    assert found["private over plain"] == 1.5
    assert found["users per second by processes"] == {1: 50.0, 2: 100.0}
    assert found["TFLOP/s up to the sum"] == work.flops_of(100) / 2.0 / 1e12


def test_kinds_of_rounds_take_turns_and_the_first_is_not_counted() -> None:
    order, times = [], iter([100.0, 50.0, 1.0, 2.0, 3.0, 4.0])

    def run(name: str) -> float:
        clips = gaussian_mechanism.rounded_gaussian(bytes(32), 4, 1e9).any()
        order.append((name, bool(clips)))
        return next(times)

    runs = {name: partial(run, name) for name in ("private", "plain")}
    found = gpu_round.in_turns(runs, {"private"}, gpu_round.Turns(2, 0.0, 1, []))
    assert found == {"private": 2.0, "plain": 3.0}
    assert order == [("private", True), ("plain", False)] * 3


def test_whole_rounds_are_timed() -> None:
    assert gpu_round.whole_rounds(3, torch.device("cpu"), 2)() > 0.0


class Players:
    """Players of which each trains in a second, divided by how many processes it has."""

    def __init__(self, settings: dict[str, Setting]) -> None:
        self.settings = settings

    def __enter__(self) -> dict[str, "Players.One"]:
        return {name: self.One(setting) for name, setting in self.settings.items()}

    def __exit__(self, *_: object) -> None: ...

    class One:
        def __init__(self, setting: Setting) -> None:
            self.setting = setting

        def take(self, turn: Turn) -> Done:
            assert (self.setting.contestant, self.setting.work) == ("fedpriv", "mlp")
            assert turn.users == range(100)
            return Done(1.0 / self.setting.processes, np.zeros(1))


def test_processes_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_round, "playing", Players)
    turns = gpu_round.Turns(2, 0.0, 1, [1, 2])
    assert gpu_round.shared("mlp", "cpu", (1, 2), turns) == {1: 1.0, 2: 0.5}

    def other(player: Players.One, turn: Turn) -> Done:
        return Done(1.0, np.full(1, player.setting.processes / 8))

    monkeypatch.setattr(Players.One, "take", other)
    with pytest.raises(WorkerError, match="2 processes add up to other integers than 1 do"):
        gpu_round.shared("mlp", "cpu", (1, 2), turns)


def test_figures_of_a_gpu_round_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, seen = tmp_path / "figures.json", []

    def measured(work: str, device: torch.device, turns: gpu_round.Turns) -> dict[str, object]:
        seen.append((work, device.type, turns))
        return {"private over plain": 1.5}

    monkeypatch.setattr(gpu_round, "measured", measured)
    options = ["--device", "cpu", "--work", "mlp", "--turns", "2", "--processes", "1", "4"]
    monkeypatch.setattr(sys, "argv", ["gpu_round", *options, "--json", str(file)])
    gpu_round.main()
    assert seen == [("mlp", "cpu", gpu_round.Turns(2, 1.0, 50, [1, 4]))]
    kept = json.loads(file.read_text())
    assert kept["private over plain"] == 1.5
    assert kept["machine"]["device"] == "CPU"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--turns", "0"], "--turns is 0"),
        (["--processes", "2", "0"], "--processes is 0"),
        (["--device", "cuda:99"], "device is 'cuda:99', which torch does not find here"),
    ],
)
def test_no_gpu_round_is_measured_of_what_there_is_not(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_round", *options])
    with pytest.raises(SystemExit) as ended:
        gpu_round.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
