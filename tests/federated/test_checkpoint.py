"""Checkpoints: whole or absent, bound to plan and ledger."""

import numpy as np
import pytest
from federation import CONSTANT, PARAMETERS, make_plan, open_books

from fedpriv.errors import CheckpointError
from fedpriv.federated.checkpoint import (
    Checkpoint,
    checkpoints,
    load_checkpoint,
    resume,
    save_checkpoint,
)
from fedpriv.federated.loop import train
from fedpriv.federated.optimizers import FedAdaptive, FedAvg, FedAvgM, SecondMoment
from fedpriv.federated.round import ServerState, initial_state
from fedpriv.privacy.entropy import SeededEntropy

OPTIMIZERS = [FedAvg(), FedAvgM(), FedAdaptive(SecondMoment.YOGI)]


def same(one: ServerState, other: ServerState) -> bool:
    parts = [
        (one.parameters, other.parameters),
        (one.optimizer.first, other.optimizer.first),
        (one.optimizer.second, other.optimizer.second),
    ]
    ordered = list(one.parameters) == list(other.parameters)
    return (
        ordered
        and one.round == other.round
        and all(
            set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)
            for a, b in parts
        )
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_state_comes_back_exactly(tmp_path, optimizer) -> None:
    plan = make_plan(optimizer=optimizer)
    with open_books(tmp_path) as books:
        for report in train(
            plan, initial_state(plan, PARAMETERS), CONSTANT, books, SeededEntropy(0)
        ):
            head = books.ledger.head
            path = save_checkpoint(tmp_path / "c", Checkpoint(report.state, plan.digest, head))
            loaded = load_checkpoint(path)
            assert loaded.ledger_head == head
            assert loaded.plan_digest == plan.digest
            assert same(resume(path, plan, books.ledger), report.state)
    assert [path.name for path in checkpoints(tmp_path / "c")] == [
        "round-000004.safetensors",
        "round-000005.safetensors",
    ]


def test_another_plan_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_books(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, books.ledger.head))
        with pytest.raises(CheckpointError, match="belongs to plan"):
            resume(path, make_plan(noise_multiplier=0.5), books.ledger)


def test_another_or_shorter_ledger_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_books(tmp_path) as books:
        first = next(
            train(plan, initial_state(plan, PARAMETERS), CONSTANT, books, SeededEntropy(0))
        )
        path = save_checkpoint(tmp_path, Checkpoint(first.state, plan.digest, books.ledger.head))
    other = tmp_path / "other"
    other.mkdir()
    with open_books(other) as books, pytest.raises(CheckpointError, match="seen 1 charges"):
        resume(path, plan, books.ledger)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100])
def test_damaged_files_are_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"round-000001\.safetensors"):
        load_checkpoint(path)


def test_every_cut_of_a_checkpoint_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_books(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, books.ledger.head))
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_an_absent_file_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "round-000001.safetensors")
