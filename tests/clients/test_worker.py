"""A node's training process: what it answers, and what is left when it fails or is made to end."""

import asyncio
import hashlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.clients.worker import Loaded, Worker, receive, send, share_of
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.experiment.build import build_task
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum, add_up
from fedpriv.training.request import LocalTraining
from fedpriv.wire import Proposal, TaskDescription, digest_of
from tests.clients import hostile
from tests.clients.people import (
    CLASSES,
    FEATURES,
    GOOD,
    IDS,
    ORDER,
    POSITIONS,
    TASK,
    positions_of,
    request_to,
    source_of,
    welcome,
)
from tests.clients.tiny_server import PRICE

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds; what needs no limit is done long before
LONG = 100_000.0  # seconds that no test waits for: its loop's clock is put forward
PARENT = """
import asyncio, multiprocessing, sys
from fedpriv.clients.worker import Worker
from tests.clients.people import GOOD, request_to, source_of, welcome

async def main():
    worker = await Worker.start(source_of("users", processes=2))
    await worker.prepare(welcome())
    print(multiprocessing.active_children()[0].pid, "torch" in sys.modules, flush=True)
    await worker.train(request_to([*GOOD, "u40"]), 1000.0)

if __name__ == "__main__":
    asyncio.run(main())
"""


class MovableClock(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward, so that deadlines pass when a test says so."""

    ahead = 0.0  # seconds

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that is there once a model loops."""
    path = tmp_path_factory.mktemp("worker") / "looping"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hostile.MARK, str(path))
        yield path


@pytest.fixture(scope="module")
def runner(mark: Path) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=MovableClock) as runner:
        yield runner


@pytest.fixture(scope="module")
def worker(runner: asyncio.Runner) -> Iterator[Worker]:
    """Over all users; the tests kill its process, and the next finds it as it was."""
    worker = runner.run(started("users", memory_mebibytes=512))
    yield worker
    runner.run(worker.close())


async def started(
    function: str,
    names: list[str] = IDS,
    memory_mebibytes: int | None = None,
    processes: int | None = 1,
) -> Worker:
    worker = await Worker.start(source_of(function, memory_mebibytes, processes))
    try:
        await worker.prepare(welcome(names=names))
    except BaseException:
        await worker.close()
        raise
    return worker


def of_good(names: list[str]) -> PartialSum:
    """What the engine makes of those of these users who do nothing to their process."""
    task = build_task(TASK.model, TASK.options, TASK.seed, TASK.loss)
    hosted = np.array([POSITIONS[ORDER.index(name)] for name in IDS])
    transport = InProcessTransport(
        task, hostile.users(), torch.device("cpu"), 10**6, hosted, processes=1
    )
    request = request_to([name for name in names if name in GOOD])
    cohort = add_up(transport.collect(request), request.clipping, len(names))
    return PartialSum("", len(request.users), cohort.total, cohort.weight)


def assert_equal(answer: object, expected: PartialSum) -> None:
    assert isinstance(answer, PartialSum)
    assert (answer.node, answer.users, answer.weight) == ("", expected.users, expected.weight)
    np.testing.assert_array_equal(answer.total, expected.total)


def training_process() -> int:
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    return process.pid


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def cancel_once(condition: Callable[[], bool], coroutine: Coroutine[None, None, object]):
    """Run something until a condition holds, then cancel it."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(wait_until, condition)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_it_says_whom_it_holds(worker: Worker) -> None:
    digests = b"".join(hashlib.sha256(name.encode()).digest()[:8] for name in sorted(IDS))
    assert worker.loaded == Loaded(len(IDS), digest_of(IDS), digests)


def test_it_answers_as_the_engine_does(worker: Worker, runner: asyncio.Runner) -> None:
    pid = training_process()
    names = [*GOOD, "u5"]  # u5 raises
    answer = runner.run(worker.train(request_to(names), LIMIT))
    assert_equal(answer, of_good(names))
    more = replace(request_to(["u6"]), users=np.array([1, *request_to(["u6"]).users, 99]))
    assert_equal(runner.run(worker.train(more, LIMIT)), of_good(["u6"]))
    assert training_process() == pid


def test_users_that_fail_count_as_zero_and_cost_nobody_else_anything(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # u33 makes a segmentation fault, u7 takes too much memory, u40 hangs: for a sixth of its share.
    names, seconds = ["u01", "u33", "u7", "u8", "u40", "u10"], 60.0

    async def whole_life() -> None:
        worker = await started("users", memory_mebibytes=512)
        try:
            before = {process.pid for process in multiprocessing.active_children()}
            assert_equal(await worker.train(request_to(names), seconds), of_good(names))
            assert {process.pid for process in multiprocessing.active_children()} == before
        finally:
            await worker.close()

    runner.run(whole_life())
    logged = caplog.text + capfd.readouterr().err
    assert logged.count("a user counts as zero") == 3
    assert not any(name in logged for name in (*IDS, "secret"))


def test_a_user_of_a_new_size_adds_its_own_vector_and_delays_nobody(
    runner: asyncio.Runner,
) -> None:
    mlp = TaskDescription(
        "mlp", {"inputs": FEATURES, "hidden": 3, "classes": CLASSES}, 3, "cross-entropy"
    )
    parameters = build_task(**vars(mlp)).parameters()
    layout, local = (
        Layout.of(parameters),
        LocalTraining(0.1, batch_size=2, epochs=1, max_examples=300),
    )
    asked = replace(
        request_to(IDS),
        parameters=parameters,
        clipping=Clipping(layout, flat(layout, 0.1)),
        local=local,
    )

    async def whole_life() -> None:
        worker = await Worker.start(source_of("users_of_unequal_sizes"))
        try:
            await worker.prepare(welcome(mlp))
            await worker.learn(Proposal.of(asked, PRICE))
            cohorts = (IDS, IDS[:-1], IDS[-1:])
            requests = (replace(asked, users=positions_of(names)) for names in cohorts)
            sums = [await worker.train(each, LIMIT) for each in requests]
            together, without, one = [found for found in sums if isinstance(found, PartialSum)]
            assert (together.users, without.users, one.users) == (9, 8, 1)
            np.testing.assert_array_equal(together.total - without.total, one.total)
            assert one.total.any()
        finally:
            await worker.close()

    runner.run(whole_life())


def test_a_vote_that_is_given_up_does_not_end_what_is_learnt_for_it(
    worker: Worker, runner: asyncio.Runner
) -> None:
    async def interrupted() -> PartialSum | None:
        await worker.prepare(welcome())
        pid, proposal = training_process(), Proposal.of(request_to(GOOD), PRICE)
        for _ in range(3):  # as when a server proposes again and again
            vote = asyncio.create_task(worker.learn(proposal))
            await asyncio.sleep(0.01)
            vote.cancel()
        trained = await worker.train(request_to(GOOD), LIMIT)  # it waits until that is learnt
        assert training_process() == pid
        assert worker._kinds
        return trained

    assert_equal(runner.run(interrupted()), of_good(GOOD))


def test_a_process_that_hangs_is_started_again_and_users_are_trained_one_by_one(
    worker: Worker, runner: asyncio.Runner
) -> None:
    async def past_half() -> PartialSum | None:
        os.kill(training_process(), signal.SIGSTOP)
        training = asyncio.create_task(worker.train(request_to(GOOD), LONG))
        await asyncio.sleep(0.1)  # until it waits
        asyncio.get_running_loop().ahead += 0.6 * LONG
        return await training

    assert_equal(runner.run(past_half()), of_good(GOOD))


@pytest.mark.parametrize("users", [1, 2, 100])
def test_users_have_gone_together_and_one_by_one_in_half_of_the_time(users: int) -> None:
    assert 0.0 < 2 * users * share_of(60.0, users) < 30.0
    assert share_of(-1.0, users) == 0.0


def test_one_user_that_takes_longer_than_it_may_sends_nothing(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole_life() -> object:
        one = await Worker.start(source_of("one_user_that_hangs"))
        try:
            await one.prepare(welcome(names=["u40"]))
            return await one.train(request_to(["u40"]), 1.0)
        finally:
            await one.close()

    assert runner.run(whole_life()) is None
    # A warning would say that this user was drawn.
    assert all(record.levelno < logging.INFO for record in caplog.records)


def test_a_request_that_does_not_fit_is_refused(worker: Worker, runner: asyncio.Runner) -> None:
    request = replace(request_to(GOOD), metrics=(Metric("shoe size"),))
    with pytest.raises(InvalidValueError, match="shoe size"):
        runner.run(worker.train(request, LIMIT))


@pytest.mark.slow
def test_a_cancelled_call_kills_the_process_and_the_next_starts_another(
    worker: Worker, runner: asyncio.Runner, mark: Path
) -> None:
    runner.run(worker.train(request_to(["u8"]), LIMIT))
    pid = training_process()
    mark.unlink(missing_ok=True)
    runner.run(cancel_once(mark.exists, worker.train(request_to(["u40"]), LIMIT)))
    wait_until(lambda: not is_running(pid))
    # A call whose deadline is past gives nothing, and what it has started is there for the next.
    assert runner.run(worker.train(request_to(GOOD), 0.0)) is None
    assert_equal(runner.run(worker.train(request_to(GOOD), LIMIT)), of_good(GOOD))
    assert training_process() != pid


@pytest.mark.slow
def test_a_process_that_ends_between_rounds_is_started_again(
    worker: Worker, runner: asyncio.Runner
) -> None:
    runner.run(worker.train(request_to(["u8"]), LIMIT))
    pid = training_process()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert_equal(runner.run(worker.train(request_to(GOOD), LIMIT)), of_good(GOOD))


def test_signals_for_the_parent_do_not_reach_it(worker: Worker, runner: asyncio.Runner) -> None:
    runner.run(worker.train(request_to(["u8"]), LIMIT))
    pid = training_process()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert_equal(runner.run(worker.train(request_to(GOOD), LIMIT)), of_good(GOOD))
    assert training_process() == pid


def test_a_second_call_waits_for_the_first(worker: Worker, runner: asyncio.Runner) -> None:
    async def two() -> object:
        training = asyncio.create_task(worker.train(request_to(GOOD), LIMIT))
        await asyncio.sleep(0)
        await worker.prepare(welcome())
        assert training.done()
        return await training

    assert_equal(runner.run(two()), of_good(GOOD))


@pytest.mark.slow
def test_a_task_that_does_not_fit_is_refused_until_one_fits(
    worker: Worker, runner: asyncio.Runner
) -> None:
    unknown = replace(TASK, model="no such")
    for legal, error, words in (
        (welcome(unknown), ModelError, "model 'no such' is unknown"),
        (welcome(names=IDS[1:]), InvalidValueError, "8 positions for 9 users"),
        (
            welcome(replace(TASK, model="tests.clients.hostile:model_that_exits", options={})),
            ModelError,
            "ended with exit code 9",
        ),
        (
            welcome(replace(TASK, model="mlp", options={"inputs": 4, "hidden": 10**9})),
            ModelError,
            "cannot be",  # for want of memory
        ),
    ):
        with pytest.raises(error, match=words):
            runner.run(worker.prepare(legal))
        with pytest.raises(InvalidValueError, match="no task is prepared"):
            runner.run(worker.train(request_to(GOOD), LIMIT))
    runner.run(worker.prepare(welcome()))
    assert_equal(runner.run(worker.train(request_to(GOOD), LIMIT)), of_good(GOOD))


def test_a_model_that_takes_too_long_to_build_is_given_up(
    worker: Worker, runner: asyncio.Runner, mark: Path
) -> None:
    hangs = replace(TASK, model="tests.clients.hostile:model_that_hangs", options={})
    mark.unlink(missing_ok=True)
    pid = training_process()

    async def prepare() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovableClock)
        preparing = asyncio.create_task(worker.prepare(welcome(hangs)))
        await asyncio.to_thread(wait_until, mark.exists)
        loop.ahead += 600.0
        await preparing

    with pytest.raises(ModelError, match="cannot be built: it takes more than 600 seconds"):
        runner.run(prepare())
    runner.run(worker.prepare(welcome()))
    assert training_process() != pid


@pytest.mark.slow
def test_users_that_cannot_be_loaded_are_refused_and_nothing_is_left(
    runner: asyncio.Runner,
) -> None:
    before = set(multiprocessing.active_children())
    for function, words in (
        ("loader_that_raises", r"cannot be made: KeyError at .*hostile.py:\d+$"),
        ("loader_that_exits", "cannot be loaded: the training process ended with exit code 7"),
    ):
        with pytest.raises(DataError, match=words):
            runner.run(Worker.start(source_of(function)))
    assert set(multiprocessing.active_children()) <= before


def test_one_user_sends_a_sum_and_nothing_is_left_after_close(
    runner: asyncio.Runner, worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {process.pid for process in multiprocessing.active_children()}

    async def whole_life() -> int:
        one = await started("one_good_user", ["u8"])
        (pid,) = {process.pid for process in multiprocessing.active_children()} - before
        answer = await one.train(request_to(["u8"]), LIMIT)
        assert_equal(answer, of_good(["u8"]))
        assert_equal(await one.train(request_to(["u6"]), LIMIT), of_good([]))
        await one.close()
        await one.close()
        with pytest.raises(InvalidValueError, match="closed"):
            await one.train(request_to(["u8"]), LIMIT)
        return int(str(pid))

    pid = runner.run(whole_life())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # not even a zombie
    assert {process.pid for process in multiprocessing.active_children()} <= before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("users", "warned"), [("one_good_user", 0), ("one_user_of_nan", 1)])
def test_it_says_when_all_updates_of_its_users_count_as_zero(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture, users: str, warned: int
) -> None:
    async def train() -> PartialSum | None:
        one = await started(users, names=["u8"])
        try:
            return await one.train(request_to(["u8"]), LIMIT)
        finally:
            await one.close()

    answer = runner.run(train())
    assert answer is not None
    assert answer.users == 1
    said = [r for r in caplog.messages if "NaN, infinite or zero" in r]
    assert len(said) == warned
    assert all(message.startswith("round ") for message in said)


@pytest.mark.slow
def test_users_side_by_side_end_no_more_than_themselves(
    runner: asyncio.Runner, worker: Worker, mark: Path
) -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    names = ["u01", "u10", "u2", "u8"]  # u2 exits
    left: list[int] = []

    def busy() -> bool:
        """Whether a user hangs in a process that the training process has forked."""
        if mark.exists():
            (pid,) = {process.pid for process in multiprocessing.active_children()} - before
            left[:] = [pid, *children_of(pid)]
        return len(left) > 1

    async def whole_life() -> None:
        several = await started("users", processes=2)
        left.extend({process.pid for process in multiprocessing.active_children()} - before)
        assert_equal(await several.train(request_to(GOOD), LIMIT), of_good(GOOD))
        assert len(children_of(left[0])) == 2
        assert_equal(await several.train(request_to(names), LIMIT), of_good(names))
        left.clear()
        mark.unlink(missing_ok=True)
        await cancel_once(busy, several.train(request_to([*GOOD, "u40"]), LIMIT))
        wait_until(lambda: not any(map(is_running, left)))
        await several.close()

    runner.run(whole_life())


def test_sigkill_of_the_parent_leaves_no_process(mark: Path, tmp_path: Path) -> None:
    mark.unlink(missing_ok=True)
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout is not None
            pid, has_torch = parent.stdout.readline().split()
            wait_until(mark.exists)
            left = [int(pid), *children_of(int(pid))]
            assert len(left) == 3
            assert all(map(is_running, left))
        finally:
            parent.kill()
    wait_until(lambda: not any(map(is_running, left)))
    assert has_torch == "False"


def test_a_limit_of_memory_is_one_that_the_system_can_set(runner: asyncio.Runner) -> None:
    largest = runner.run(started("users", memory_mebibytes=2**40 - 1))
    runner.run(largest.close())


LIMITED = """
import asyncio, multiprocessing, resource
import numpy as np
from fedpriv.clients.worker import Worker, address_space, limit_address_space
from tests.clients.people import source_of

async def main():
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit_address_space(address_space() + 2**30)
    worker = await Worker.start(source_of("users"))
    (child,) = multiprocessing.active_children()
    soft, _ = resource.prlimit(child.pid, resource.RLIMIT_AS)
    try:
        np.ones(2**28)
    except MemoryError:
        print(soft == hard, "refused")
    await worker.close()
    limit_address_space(None)
    print(np.ones(2**28)[0])

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_limit_of_the_main_process_holds_for_it_and_not_for_training(tmp_path: Path) -> None:
    program = tmp_path / "limited.py"
    program.write_text(LIMITED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "refused", "1.0"]


def test_arrays_are_sent_without_a_copy() -> None:
    ours, theirs = socket.socketpair()
    sent = {"w": np.arange(2**22, dtype=np.float32), "none": np.zeros(0), "one": np.array(3.0)}
    received: list[object] = []
    with ours, theirs, ours.makefile("rwb") as near, theirs.makefile("rwb") as far:
        thread = threading.Thread(target=lambda: received.append(receive(far)))
        thread.start()
        tracemalloc.start()
        try:
            send(near, sent)
            thread.join()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    (value,) = received
    assert isinstance(value, dict)
    for name, array in sent.items():
        np.testing.assert_array_equal(value[name], array)
        assert value[name].flags.writeable
    # What was received is in this process too; anything beside it would be a copy.
    assert peak < 1.1 * sent["w"].nbytes


@pytest.mark.parametrize("begun", [b"", pickle.dumps([1, "two"])[:-3]])
def test_an_end_that_is_closed_is_found_out(begun: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rwb") as near:
        with theirs:
            theirs.sendall(begun)
        with pytest.raises(EOFError):
            receive(near)
        with pytest.raises(OSError, match=r"(?i)broken pipe"):
            send(near, 1)
        with pytest.raises(OSError, match=r"(?i)broken pipe"):
            near.close()
