"""Chunks on a GPU: users apart to the last bit, captured and not, and nothing waits in them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.engine.arithmetic import Activations
from fedpriv.engine.examples import Chunk, Examples
from fedpriv.engine.roads import Path
from fedpriv.engine.schedule import mask_words, random_words
from fedpriv.engine.task import RoundParameters, Task
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.privacy import clipping_torch
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import Updates, integer_sum, kernels_on
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.test_clipping import CAP, GROUPS, as_updates, clipping_of, one_by_one
from tests.engine.test_device import TOGETHER, fits
from tests.isolation import (
    LOCALS,
    MODELS,
    READERS,
    Plan,
    User,
    assert_bounded,
    request_of,
    store_of,
    task_of,
    total,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
CPU, MEMORY = torch.device("cpu"), 2**24
KINDS = ["normal"] * 10 + ["nan", "illegal", "cancelling", "every label", "huge", "subnormal"]
PAIRS = [
    (model, [local for local in LOCALS if fits(model, local)][(i + j) % 7])
    for i, model in enumerate(sorted(MODELS))
    for j in (0, 4)
]


def transport_of(
    model: str,
    users: list[User],
    device: torch.device,
    activations: Activations = "float32",
    path: Path = "auto",
    **held: object,
) -> InProcessTransport:
    """A transport with own cached properties of its trainer, such as no graphs.

    Users go side by side where they can, unless the path says otherwise.
    """
    store = store_of(users, words=model in READERS)
    transport = InProcessTransport(
        task_of(model),
        store,
        device,
        MEMORY,
        activations=activations,
        processes=1,
        path=path,
    )
    vars(transport._trainer).update(held)
    return transport


def crowd() -> list[User]:
    sizes = np.random.default_rng(0).choice([0, 1, 3, 8, 11, 17], len(KINDS))
    return [User(kind, int(n), i) for i, (kind, n) in enumerate(zip(KINDS, sizes, strict=True))]


def asked(model: str, local: LocalTraining, users: int) -> RoundRequest:
    return request_of(Plan(model, "per-layer", "weights", local, True, True, 0.3), users)


@pytest.fixture(params=["triton", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips by kernels of Triton, and as where there are none."""
    if request.param == "torch":
        monkeypatch.setattr(clipping_torch, "kernels_on", lambda _: None)
    else:
        pytest.importorskip("triton")
        assert kernels_on(torch.device("cuda")) is not None


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("weighted", [0, 1, 2])
@pytest.mark.parametrize("strategy", sorted(GROUPS))
@pytest.mark.parametrize("numbers", [2**26, 40], ids=["at-once", "few-at-a-time"])
def test_sums_are_those_of_the_reference(
    strategy: str, weighted: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping_torch, "_NUMBERS_CUDA", numbers)
    rng, clipping = np.random.default_rng(0), clipping_of(GROUPS[strategy], weighted)
    for trial in range(40):
        lanes = rng.standard_normal((rng.integers(1, 90), 13)) * 10.0 ** rng.integers(-4, 5)
        for odd in (np.nan, np.inf, -np.inf, 3.4e38, 1e-45, 1e30, 0.0)[: trial % 8]:
            lanes[rng.integers(len(lanes)), rng.integers(13)] = odd
        weights = rng.integers(0, CAP, rng.integers(1, len(lanes) + 1), endpoint=True)
        tensors = as_updates(lanes.astype(np.float32))
        on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
        users = lanes.astype(np.float32)[: len(weights)]
        found = integer_sum(on_gpu, clipping, weights).cpu().numpy()
        np.testing.assert_array_equal(found, one_by_one(clipping, users, weights))


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("norm", [0.01, 1.0, 1e4])
def test_sums_of_long_vectors_are_those_of_the_reference(norm: float) -> None:
    rng, layout = np.random.default_rng(1), Layout(("a", "b", "c"), ((3, 41_003), (0, 2), (7,)))
    updates = {
        n: rng.standard_normal((70, *s)) for n, s in zip(layout.names, layout.shapes, strict=True)
    }
    tensors = {n: t.astype(np.float32) for n, t in updates.items()}
    tensors["a"][5, 2, 41_002], tensors["c"][60, 6] = np.nan, np.inf
    clipping = Clipping(layout, flat(layout, norm))
    on_gpu = {n: torch.from_numpy(t).cuda() for n, t in tensors.items()}
    on_gpu["a"] = on_gpu["a"].mT.contiguous().mT  # as convolutions by patches leave them
    alone = [clipping.contribution({n: t[u] for n, t in tensors.items()}) for u in range(70)]
    for users in (70, 64, 1):
        found = integer_sum(on_gpu, clipping, np.ones(users, np.int64)).cpu().numpy()
        np.testing.assert_array_equal(found, sum(alone[:users]))


def test_words_on_a_gpu_are_those_of_a_cpu() -> None:
    words = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, 300))
    for draw in (
        lambda words: random_words(words, 7, 1_000),
        lambda words: mask_words(words, 3, 2),
    ):
        assert torch.equal(draw(words.cuda()).cpu(), draw(words))


@pytest.mark.parametrize(("model", "local"), PAIRS, ids=str)
def test_each_user_gives_what_it_gives_alone_in_every_round(
    model: str, local: LocalTraining
) -> None:
    users, gpu = crowd(), torch.device("cuda")
    request = asked(model, local, len(users))
    transport = transport_of(model, users, gpu)
    alone = [total(transport, request, [user]) for user in range(len(users))]
    for own in alone:
        assert_bounded(request, own)
    for _ in range(3):  # not captured, captured, replayed
        np.testing.assert_array_equal(total(transport, request, range(len(users))), sum(alone))
    np.testing.assert_array_equal(total(transport, request, range(5, len(users))), sum(alone[5:]))
    eager = transport_of(model, users, gpu, graphs=None, resident=None)
    np.testing.assert_array_equal(total(eager, request, range(len(users))), sum(alone))
    on_cpu = transport_of(model, users, CPU)
    for user, own in enumerate(alone):  # the same users count as zero
        if users[user].kind != "huge":  # of whose numbers some overflow in sums in one order only
            assert np.any(own[:-1]) == np.any(total(on_cpu, request, [user])[:-1])


@pytest.mark.parametrize("model", sorted(READERS))
def test_each_user_gives_what_it_gives_alone_of_long_texts(model: str) -> None:
    # Gradients of more than 3,072 words torch adds up as they come, unless told otherwise.
    users = [User("normal", size, seed) for seed, size in enumerate([700, 700, 690, 700, 7])]
    local = LocalTraining(0.1, epochs=2)
    request = request_of(Plan(model, "flat", "equal", local, False, True, 0.3), len(users))
    transport = transport_of(model, users, torch.device("cuda"))
    alone = [total(transport, request, [user]) for user in range(len(users))]
    assert all(own.any() for own in alone)
    for _ in range(3):
        np.testing.assert_array_equal(total(transport, request, range(len(users))), sum(alone))


def test_users_train_on_a_cpu_beside_a_gpu() -> None:
    # torch refuses gradients in forks of a process that has threads for GPUs.
    users = [User("normal", 8, seed) for seed in range(40)]
    request, word = asked("mlp", LOCALS[0], len(users)), torch.ones(1, requires_grad=True)
    torch.autograd.backward(word.sum())
    alone = transport_of("mlp", users, CPU)
    transport = replace(alone, processes=2)
    expected = sum(total(alone, request, [user]) for user in range(len(users)))
    assert expected.any()
    np.testing.assert_array_equal(total(transport, request, range(len(users))), expected)


@pytest.mark.parametrize("path", ["alone", "auto"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_step_is_that_of_a_cpu(model: str, path: Path) -> None:
    if (model, path) == ("dropout", "alone"):
        return  # a user who goes alone draws from torch's generator of its device
    users, gpu = [User("normal", 8, seed) for seed in range(9)], torch.device("cuda")
    request = request_of(Plan(model, "flat", "equal", LOCALS[1], False, True, 0.3), 9)
    found, expected = (
        total(transport_of(model, users, device, path=path), request, range(9))
        for device in (gpu, CPU)
    )
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("activations", ["tf32", "bfloat16"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer", "own"])
def test_users_are_apart_in_fewer_bits(model: str, activations: Activations) -> None:
    users, gpu = crowd(), torch.device("cuda")
    request = asked(model, LOCALS[0], len(users))
    transport = transport_of(model, users, gpu, activations)
    alone = [total(transport, request, [user]) for user in range(len(users))]
    np.testing.assert_array_equal(total(transport, request, range(len(users))), sum(alone))
    exact = transport_of(model, users, gpu)
    assert np.any(total(exact, request, range(len(users))) != sum(alone))


def test_what_is_captured_follows_model_data_and_rate() -> None:
    users, gpu = crowd(), torch.device("cuda")
    request = asked("mlp", LOCALS[0], len(users))
    everyone = range(len(users))
    captured = transport_of("mlp", users, gpu)
    eager = transport_of("mlp", users, gpu, graphs=None)
    moved = {name: p + np.float32(0.01) for name, p in request.parameters.items()}
    for changed in (
        request,
        request,
        replace(request, parameters=moved),
        replace(request, local_key=bytes(32)),
        replace(request, local=replace(request.local, learning_rate=0.2)),
        request,
    ):
        for _ in range(3):
            found = total(captured, changed, everyone)
            np.testing.assert_array_equal(found, total(eager, changed, everyone))
    graphs = captured._trainer.graphs
    assert graphs is not None
    assert graphs._captured
    assert all(graph is not None for graph in graphs._captured.values())


@contextmanager
def never_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # of a prototype, after which the mode is set
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("path", ["alone", "together"])
@pytest.mark.parametrize("model", TOGETHER)
def test_training_does_not_wait_for_the_device(
    model: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, gpu = crowd(), torch.device("cuda")
    request = asked(model, LOCALS[0], len(users))
    transport = transport_of(model, users, gpu, path=path)
    again = transport_of(model, users, gpu, path=path, graphs=None)
    found = [total(each, request, range(len(users))) for each in (transport, again)]
    honest, seen = Trainer._sent, list[Chunk]()

    def watched(
        trainer: Trainer,
        request: RoundRequest,
        start: RoundParameters,
        examples: Examples,
    ) -> Updates:
        seen.append(examples.chunk)
        with never_waiting():
            return honest(trainer, request, start, examples)

    monkeypatch.setattr(Trainer, "_sent", watched)
    found += [total(each, request, range(len(users))) for each in (transport, again)]
    for later in found[1:]:
        np.testing.assert_array_equal(later, found[0])
    assert seen


class Reads(torch.nn.Module):
    """Cannot be captured: it waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        outputs: torch.Tensor = self.inner(x.flatten(1))
        return outputs


def test_what_cannot_be_captured_trains_all_the_same() -> None:
    torch.manual_seed(0)
    users = [User("normal", 6, seed) for seed in range(9)]
    task = Task(Reads())
    request = replace(asked("linear", LOCALS[0], 9), parameters=task.parameters())
    layout = Layout.of(request.parameters)
    request = replace(request, clipping=Clipping(layout, flat(layout, 0.3)), metrics=())
    store = store_of(users, words=False)
    transport = InProcessTransport(task, store, torch.device("cuda"), MEMORY, path="together")
    alone = [total(transport, request, [user]) for user in range(9)]
    for _ in range(3):
        np.testing.assert_array_equal(total(transport, request, range(9)), sum(alone))
    assert all(own[:-1].any() for own in alone)
