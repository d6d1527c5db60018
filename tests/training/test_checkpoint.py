"""Checkpoints: whole or absent, bound to plan and ledger."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.errors import CheckpointError
from fedpriv.ledger.ledger import Head
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.training.optimizers import FedAvg, FedAvgM, FedYogi
from fedpriv.training.rounds import (
    Checkpoint,
    ServerState,
    checkpoints,
    initial_state,
    load_checkpoint,
    resume,
    save_checkpoint,
    train,
)
from tests.training.federation import CONSTANT, PARAMETERS, make_plan, open_records

OPTIMIZERS = [FedAvg(), FedAvgM(), FedYogi()]


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
    with open_records(tmp_path) as books:
        for state, _ in train(
            plan, initial_state(plan, PARAMETERS), CONSTANT, books, SeededEntropy(0)
        ):
            head = books.ledger.head
            path = save_checkpoint(tmp_path / "c", Checkpoint(state, plan.digest, head))
            loaded = load_checkpoint(path)
            assert loaded.ledger_head == head
            assert loaded.plan_digest == plan.digest
            assert same(resume(path, plan, books.ledger), state)
    assert [path.name for path in checkpoints(tmp_path / "c")] == [
        "round-000003.safetensors",
        "round-000004.safetensors",
        "round-000005.safetensors",
    ]


def test_another_plan_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, books.ledger.head))
        with pytest.raises(CheckpointError, match="belongs to plan"):
            resume(path, make_plan(noise_multiplier=0.5), books.ledger)


def test_another_or_shorter_ledger_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as books:
        first, _ = next(
            train(plan, initial_state(plan, PARAMETERS), CONSTANT, books, SeededEntropy(0))
        )
        path = save_checkpoint(tmp_path, Checkpoint(first, plan.digest, books.ledger.head))
    other = tmp_path / "other"
    other.mkdir()
    with open_records(other) as books, pytest.raises(CheckpointError, match="seen 1 charges"):
        resume(path, plan, books.ledger)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100])
def test_damaged_files_are_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"round-000001\.safetensors"):
        load_checkpoint(path)


def test_every_cut_of_a_checkpoint_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, books.ledger.head))
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_every_changed_byte_is_refused(tmp_path) -> None:
    path = saved(tmp_path, 1)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def saved(folder: Path, number: int, scale: float = 1.0) -> Path:
    state = initial_state(make_plan(), {n: scale * p for n, p in PARAMETERS.items()})
    head = Head(number, "0" * 64)
    return save_checkpoint(folder, Checkpoint(replace(state, round=number), "plan", head))


def test_the_last_three_are_kept_and_nothing_else(tmp_path) -> None:
    paths = [saved(tmp_path, number) for number in (1, 2, 3, 4)]
    assert sorted(tmp_path.iterdir()) == checkpoints(tmp_path) == paths[1:]
    assert [load_checkpoint(path).state.round for path in paths[1:]] == [2, 3, 4]


def test_the_last_three_are_kept_beyond_a_million(tmp_path) -> None:
    paths = [saved(tmp_path, number) for number in range(999_997, 1_000_002)]
    assert checkpoints(tmp_path) == paths[-3:]


def test_a_round_that_is_saved_again_replaces_itself_alone(tmp_path) -> None:
    paths = [saved(tmp_path, number) for number in (1, 2, 3)]
    saved(tmp_path, 3, scale=2.0)
    assert checkpoints(tmp_path) == paths
    np.testing.assert_array_equal(load_checkpoint(paths[2]).state.parameters["w"], 2.0)


def test_an_absent_file_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "round-000001.safetensors")
