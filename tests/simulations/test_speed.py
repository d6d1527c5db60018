"""The benchmarks of the engine: what they measure, not how fast anything is."""

import cProfile
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.engine.checks import check_task
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.models import softmax_regression
from simulations import overheads, throughput
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
    assert "--users is 0; it must be at least 1" in capsys.readouterr().err


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
