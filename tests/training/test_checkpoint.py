"""Checkpoints: whole or absent, bound to plan and ledger."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federation import CONSTANT, PARAMETERS, make_plan, open_records

from fedpriv.errors import CheckpointError
from fedpriv.ledger.ledger import Head
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.training.checkpoint import (
    Checkpoint,
    checkpoints,
    load_checkpoint,
    resume,
    save_checkpoint,
    write_atomically,
)
from fedpriv.training.optimizers import FedAdaptive, FedAvg, FedAvgM, SecondMoment
from fedpriv.training.rounds import ServerState, initial_state, train

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
    with open_records(tmp_path) as records:
        for report in train(
            plan, initial_state(plan, PARAMETERS), CONSTANT, records, SeededEntropy(0)
        ):
            head = records.ledger.head
            path = save_checkpoint(tmp_path / "c", Checkpoint(report.state, plan.digest, head))
            loaded = load_checkpoint(path)
            assert loaded.ledger_head == head
            assert loaded.plan_digest == plan.digest
            assert same(resume(path, plan, records.ledger), report.state)
    assert [path.name for path in checkpoints(tmp_path / "c")] == [
        "round-000003.safetensors",
        "round-000004.safetensors",
        "round-000005.safetensors",
    ]


def test_another_plan_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as records:
        state = initial_state(plan, PARAMETERS)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, records.ledger.head))
        with pytest.raises(CheckpointError, match="belongs to plan"):
            resume(path, make_plan(noise_multiplier=0.5), records.ledger)


def test_another_or_shorter_ledger_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as records:
        first = next(
            train(plan, initial_state(plan, PARAMETERS), CONSTANT, records, SeededEntropy(0))
        )
        path = save_checkpoint(tmp_path, Checkpoint(first.state, plan.digest, records.ledger.head))
    other = tmp_path / "other"
    other.mkdir()
    with open_records(other) as records, pytest.raises(CheckpointError, match="seen 1 charges"):
        resume(path, plan, records.ledger)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100])
def test_damaged_files_are_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"round-000001\.safetensors"):
        load_checkpoint(path)


def test_every_cut_of_a_checkpoint_is_refused(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as records:
        state = initial_state(plan, PARAMETERS)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, records.ledger.head))
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


def test_the_oldest_of_three_is_written_over_and_the_others_stay(tmp_path) -> None:
    for number in (1, 2, 3):
        saved(tmp_path, number)
    before = {path: path.stat().st_ino for path in checkpoints(tmp_path)}
    first, second, third = before
    last = saved(tmp_path, 4)
    after = {path: path.stat().st_ino for path in checkpoints(tmp_path)}
    assert after == {second: before[second], third: before[third], last: before[first]}
    assert [load_checkpoint(path).state.round for path in after] == [2, 3, 4]
    assert sorted(tmp_path.iterdir()) == [second, third, last]


def test_one_that_has_another_name_as_well_is_left_alone(tmp_path) -> None:
    paths = [saved(tmp_path, number) for number in (1, 2, 3)]
    mine = tmp_path / "mine"
    mine.hardlink_to(paths[0])
    content = mine.read_bytes()
    last = saved(tmp_path, 4, scale=2.0)
    assert mine.read_bytes() == content
    assert checkpoints(tmp_path) == [*paths[1:], last]


def test_a_round_that_is_saved_again_replaces_itself_alone(tmp_path) -> None:
    paths = [saved(tmp_path, number) for number in (1, 2, 3)]
    saved(tmp_path, 3, scale=2.0)
    assert checkpoints(tmp_path) == paths
    np.testing.assert_array_equal(load_checkpoint(paths[2]).state.parameters["w"], 2.0)


@pytest.mark.parametrize("length", [0, 10, 1000])
def test_what_is_written_over_another_file_is_all_that_is_in_it(tmp_path, length: int) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"x" * length)
    write_atomically(new, b"y" * 100, old)
    assert new.read_bytes() == b"y" * 100
    assert list(tmp_path.iterdir()) == [new]


def test_an_absent_file_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "round-000001.safetensors")
