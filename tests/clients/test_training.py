"""What the training process computes, in this process: it is what the engine computes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.clients import training
from fedpriv.clients.training import Host, NodeTrainer
from fedpriv.clients.worker import Built, HostSettings
from fedpriv.data.population import UserStore
from fedpriv.engine import transport
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.experiment.build import build_task
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import add_up
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    WELCOME,
    Proposal,
    TaskDescription,
    Welcome,
    digest_of,
)
from tests.clients import hostile
from tests.clients.people import (
    GOOD,
    IDS,
    ORDER,
    PARAMETERS,
    POSITIONS,
    TASK,
    request_to,
    source_of,
    welcome,
)
from tests.clients.tiny_server import PRICE
from tests.engine import words
from tests.engine.everyone import request_under


def task_of() -> Task:
    return build_task(TASK.model, TASK.options, TASK.seed, TASK.loss)


def trainer_of(function: str, names: Sequence[str] = IDS) -> NodeTrainer:
    return Host.of(source_of(function)).trainer(welcome(names=names))


def in_process(request: RoundRequest) -> InProcessTransport:
    """Over the whole population, each user at its position."""
    users = hostile.users()
    hosted = np.array([POSITIONS[ORDER.index(name)] for name in IDS])
    return InProcessTransport(task_of(), users, torch.device("cpu"), 10**6, hosted, processes=1)


def test_loaded_says_how_many_users_there_are_and_which() -> None:
    loaded = Host.of(source_of("users")).loaded
    assert loaded.users == len(IDS)
    assert loaded.users_sha256 == digest_of(IDS)


def test_a_trainer_says_what_tensors_its_task_has() -> None:
    assert trainer_of("users").built == Built(Layout.of(PARAMETERS), Layout((), ()))
    normed = replace(TASK, model="tests.clients.test_training:normed", options={})
    assert Host.of(source_of("users")).trainer(welcome(normed)).built.statistics == Layout(
        ("0.running_mean", "0.running_var"), ((4,), (4,))
    )


def normed() -> torch.nn.Module:
    """A model with running statistics."""
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sum_is_that_of_the_engine(processes: int) -> None:
    request = request_to(GOOD)
    source = source_of("users", processes=processes)
    answer = Host.of(source).trainer(welcome()).answer(request)
    expected = add_up(in_process(request).collect(request), request.clipping, 4)
    assert (answer.node, answer.users, answer.weight) == ("", 4, expected.weight)
    np.testing.assert_array_equal(answer.total, expected.total)


def test_integers_and_targets_in_a_column_are_read_as_the_model_asks(tmp_path: Path) -> None:
    task = TaskDescription("softmax", {"inputs": 4, "classes": 3}, 0, "cross-entropy")
    rng, sums = np.random.default_rng(0), []
    x, y, ids = rng.integers(-3, 4, (6, 4)), rng.integers(0, 3, 6), np.array([*"aabbcc"])
    for fields in ({"x": x, "y": y[:, None]}, {"x": x.astype(np.float32), "y": y}):
        np.savez(tmp_path / "users.npz", user_id=ids, **fields)
        host = Host.of(HostSettings(str(tmp_path / "users.npz"), "cpu", processes=1))
        trainer = host.trainer(Welcome("people", 100, np.arange(3), task))
        parameters = trainer.transport.task.parameters()
        layout = Layout.of(parameters)
        asked = replace(request_to(["u8"]), parameters=parameters, users=np.arange(3))
        answer = trainer.answer(replace(asked, clipping=Clipping(layout, flat(layout, 0.1))))
        assert answer.users == 3
        sums.append(answer.total)
    np.testing.assert_array_equal(*sums)


def test_users_who_take_too_long_count_as_zero() -> None:
    answer = trainer_of("users").answer(request_to(GOOD), seconds=0.0)
    assert (answer.users, answer.weight, answer.total.any()) == (0, 0, False)


def test_what_one_process_learns_another_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = trainer_of("users"), trainer_of("users")
    proposal = Proposal.of(request_to(GOOD), PRICE)
    other.recall(one.learn(proposal))
    monkeypatch.setattr(transport, "road_of", pytest.fail)
    other.learn(proposal)
    assert other.answer(request_to(GOOD)).users == len(GOOD)


def test_a_user_that_raises_counts_as_zero() -> None:
    with_one, without = (
        trainer_of("users").answer(request_to(names)) for names in (["u8", "u5"], ["u8"])
    )
    assert with_one.users == without.users == 1
    np.testing.assert_array_equal(with_one.total, without.total)


def test_users_that_are_not_hosted_are_ignored() -> None:
    request = request_to(["u8"])
    more = replace(request, users=np.union1d(request.users, [1, 98]))
    one, other = (trainer_of("users").answer(asked) for asked in (request, more))
    assert one.users == other.users == 1
    np.testing.assert_array_equal(one.total, other.total)


def test_one_user_sends_what_it_sends_beside_others() -> None:
    request = request_to(["u8"])
    alone = trainer_of("one_good_user", ["u8"]).answer(request)
    beside = trainer_of("users").answer(request)
    assert (alone.users, alone.weight) == (beside.users, beside.weight) == (1, 2)
    np.testing.assert_array_equal(alone.total, beside.total)
    assert request.clipping.admits(alone.total, 1, alone.weight)
    assert np.any(alone.total)


def test_of_one_user_that_raises_or_is_not_asked_nothing_is_sent_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trainer_of("one_user_that_raises", ["u5"])
    for names in (["u5"], GOOD):
        answer = trainer.answer(request_to(names))
        assert (answer.users, answer.weight) == (0, 0)
        assert not np.any(answer.total)
    assert caplog.text == ""
    trainer_of("users").answer(request_to(["u5", "u8"]))
    assert "a user counts as zero: training raised" in caplog.text


def test_an_unknown_metric_is_refused_for_one_user_too() -> None:
    request = replace(request_to(["u8"]), metrics=(Metric("shoe size"),))
    for trainer in (trainer_of("users"), trainer_of("one_good_user", ["u8"])):
        with pytest.raises(InvalidValueError, match="shoe size"):
            trainer.answer(request)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (replace(TASK, model="no such"), "model .* is unknown"),
        (replace(TASK, options={"width": 3}), "no option"),
        (replace(TASK, options={"features": "many"}), "cannot be made: TypeError"),
        (replace(TASK, options={"features": 5}), "cannot be evaluated on the data"),
        (replace(TASK, loss="no such"), "loss .* is unknown"),
    ],
)
def test_a_task_that_cannot_train_is_refused(task: TaskDescription, words: str) -> None:
    host = Host.of(source_of("users"))
    with pytest.raises(ModelError, match=words):
        host.trainer(welcome(task))


def test_other_users_than_enrolled_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="8 positions for 9 users"):
        trainer_of("users", IDS[1:])


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="device is 'abacus'"):
        Host.of(HostSettings("tests.clients.hostile:users", "abacus"))


def test_activations_that_there_are_not_are_refused() -> None:
    for name in ("half", "tf32"):
        found = f"activations is '{name}'; legal on cpu are float32, bfloat16"
        with pytest.raises(InvalidValueError, match=found):
            Host.of(replace(source_of("users"), activations=name))


def test_a_node_trains_with_its_own_activations() -> None:
    request = request_to(GOOD)
    rounded, exact = (
        Host.of(replace(source_of("users"), activations=name)).trainer(welcome()).answer(request)
        for name in ("bfloat16", "float32")
    )
    size = np.linalg.norm(exact.total)
    assert 1e-4 * size < np.linalg.norm(rounded.total - exact.total) < 2e-2 * size


def test_users_that_cannot_be_loaded_are_refused() -> None:
    with pytest.raises(DataError, match="cannot be made: KeyError at "):
        Host.of(source_of("loader_that_raises"))


def worded() -> UserStore:
    """Users with words and masks, and some targets of class 2, which is ignored."""
    return UserStore(words.columns_of(9), np.array([0, 3, 5, 9]), ["a", "b", "c"])


def masked() -> torch.nn.Module:
    return words.Masked()


def test_a_node_reads_the_inputs_of_the_task_and_ignores_its_class() -> None:
    module = "tests.clients.test_training"
    task = TaskDescription(
        f"{module}:masked",
        {},
        5,
        "cross-entropy",
        inputs=words.NAMES,
        targets="y",
        ignore_index=2,
    )
    users = np.array([4, 7, 9])
    told = WELCOME.decode(WELCOME.encode(Welcome("people", 10, users, task)))
    assert told.task == task
    settings = HostSettings(f"{module}:worded", "cpu", memory_mebibytes=1024, processes=1)
    node = Host.of(settings).trainer(told)
    assert node.transport.task.ignore_index == 2
    built = build_task(**vars(task))
    request = replace(
        request_under(built, LocalTraining(0.5, epochs=1, max_examples=9), 10, 1.0), users=users
    )
    engine = InProcessTransport(
        built, worded(), torch.device("cpu"), 10**6, hosted=users, processes=1
    )
    expected = add_up(engine.collect(request), request.clipping, 3).total
    assert expected.any()
    np.testing.assert_array_equal(node.answer(request).total, expected)
    plain = replace(engine, task=replace(built, ignore_index=-100))
    other = add_up(plain.collect(request), request.clipping, 3).total
    assert not np.array_equal(other, expected)


LIMITS = """
import resource
from fedpriv.clients.training import _limited
from fedpriv.clients.worker import HostSettings, address_space

def now():
    return resource.getrlimit(resource.RLIMIT_AS)[0]

for mebibytes in (None, 3000):
    with _limited(HostSettings("none", "cpu", mebibytes)):
        print(now() - address_space())
    print(now() - address_space())
"""


def test_training_takes_half_of_the_memory_of_the_machine_if_nothing_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITS], stdout=subprocess.PIPE, check=True)
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    building, after, given_building, given_after = map(int, done.stdout.split())
    for limit, expected in ((after, half), (given_after, 3000 * 2**20)):
        assert abs(limit - expected) < 2**24  # what the process itself took meanwhile
    assert building > after
    assert given_building > given_after


def test_a_model_for_which_there_is_no_memory_is_an_error_of_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training.worker, "limit_address_space", lambda _: None)
    with (
        pytest.raises(ModelError, match="more memory than the 77 MiB of --memory"),
        training._limited(HostSettings("none", "cpu", 77)),
    ):
        raise MemoryError
