"""Training with activations of bfloat16: near float32, and as private."""

import copy
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from threading import Event, Thread
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine import side_by_side
from fedpriv.engine.arithmetic import Activations, activations_named, plain_arithmetic, tf32
from fedpriv.engine.examples import Chunk
from fedpriv.engine.products import OuterProducts
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.experiment.models import build_model
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.gaussian_mechanism import Averaging
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.local import SGD
from fedpriv.training.request import RoundRequest
from tests.engine.everyone import alone, make_task, request_to_all, total_of, whole

CPU = torch.device("cpu")
MEMORY = 2**26
ROUNDING = 2.0**-8  # the largest relative error of a number of 8 significant bits
LOCAL = SGD(0.1, steps=3, momentum=0.5)
SIZES = [4, 1, 3]
TEXT = {"alphabet": 7, "length": 5, "width": 8, "blocks": 1}


def general() -> nn.Module:
    """With batch normalisation, of which no products are made."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


# Model, shape of an example, and products between input and output.
KINDS = {
    "mlp": ("mlp", {"inputs": 36, "hidden": 16}, (6, 6), 2),
    "cnn": ("cnn", {}, (1, 28, 28), 4),
    "transformer": ("simulations.transformer:CharacterTransformer", TEXT, (5,), 7),
    "general": (f"{__name__}:general", {}, (6,), 2),
}


def task_of(kind: str) -> Task:
    name, options, *_ = KINDS[kind]
    return Task(general() if kind == "general" else build_model(name, options, 0), cross_entropy)


def users_of(kind: str) -> UserStore:
    *_, shape, _ = KINDS[kind]
    rng, rows = np.random.default_rng(0), sum(SIZES)
    if kind == "transformer":
        x = rng.integers(0, TEXT["alphabet"], (rows, *shape))
        fields = {"x": x, "y": np.roll(x, -1, 1)}
    else:
        x = rng.standard_normal((rows, *shape)).astype(np.float32)
        fields = {"x": x, "y": rng.integers(0, 3, rows)}
    return UserStore(fields, np.concatenate([[0], np.cumsum(SIZES)]).astype(np.int64))


def transport_of(
    kind: str, activations: Activations = "bfloat16", path: Path = "auto"
) -> InProcessTransport:
    torch.manual_seed(0)
    given, options = (task_of(kind), users_of(kind), CPU, MEMORY), {"processes": 1, "path": path}
    return InProcessTransport(*given, activations=activations, **options)


def request_of(task: Task, users: int, norm: float) -> RoundRequest:
    parameters = task.parameters()
    layout = Layout.of(parameters)
    clipping = Clipping(layout, flat(layout, norm))
    return RoundRequest("run", 0, 0, parameters, clipping, LOCAL, np.arange(users), bytes(32))


def by_autocast(task: Task, users: UserStore) -> np.ndarray:
    """Sum of unclipped updates of a plain loop under torch's own autocast, full batches."""
    total = 0.0
    for user in range(users.population):
        model = copy.deepcopy(task.model)
        optimizer = torch.optim.SGD(model.parameters(), LOCAL.learning_rate, LOCAL.momentum)
        x, y = (torch.from_numpy(users.examples_of(user)[name]) for name in ("x", "y"))
        for _ in range(LOCAL.steps or 0):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(x)
            task.losses_of(outputs.float(), y).mean().backward()
            optimizer.step()
        pairs = zip(model.parameters(), task.model.parameters(), strict=True)
        total = total + torch.cat([(p - q).detach().flatten() for p, q in pairs]).double()
    return total.numpy()


@pytest.mark.parametrize("path", ["alone", "together"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sums_are_close_to_those_of_float32_and_others(kind: str, path: Path) -> None:
    exact, rounded = (transport_of(kind, each, path) for each in ("float32", "bfloat16"))
    request = request_of(exact.task, len(SIZES), 8.0)
    in_units = request.clipping.in_units
    expected = in_units(total_of(exact, request))
    size = np.linalg.norm(expected)
    off = np.linalg.norm(in_units(total_of(rounded, request)) - expected) / size
    # Two factors and the result of each product are rounded, on the way there and back.
    assert ROUNDING / 100 < off < 6 * KINDS[kind][-1] * ROUNDING
    plain = np.linalg.norm(by_autocast(exact.task, exact.users) - expected) / size
    assert off < 1.5 * plain


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_users_contribution_is_within_the_clipping_norm(kind: str) -> None:
    transport = transport_of(kind)
    request = request_of(transport.task, len(SIZES), 1e-3)
    (group,) = request.clipping.groups
    for user in range(len(SIZES)):
        square = sum(x * x for x in alone(transport, request, user).tolist())
        assert 0.999 * group.squared_bound < square <= group.squared_bound


def learnt(kind: str, users: UserStore, touches: float) -> Updates:
    """How far four users move side by side, by plain steps."""
    torch.manual_seed(0)
    task, everyone = task_of(kind), np.arange(4)
    trainer = Trainer(task, users, None, CPU, MEMORY, "bfloat16")
    local = SGD(0.1, batch_size=3, epochs=2)
    request = replace(request_of(task, 4, 1.0), local=local)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "_TOUCHES", touches)
        lean = trainer.side_by_side.lean(local, 2, 1, 3)
    assert bool(lean) == bool(touches)
    chunk = Chunk(everyone, (4,), 3, lean)
    return trainer.sent(request, trainer.begin(request), chunk)


def four_users(kind: str) -> UserStore:
    users = users_of(kind)
    rows = np.arange(12) % users.rows
    return UserStore({n: c[rows] for n, c in users.fields.items()}, np.arange(5) * 3)


@pytest.mark.parametrize("touches", [0, 10**9], ids=["weights", "corrections"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_users_update_is_the_same_to_the_last_bit_whoever_is_beside_it(
    kind: str, touches: float
) -> None:
    users, others = four_users(kind), four_users(kind)
    for enemy, value in ((1, np.nan), (3, 1e30)):
        legal = (0, TEXT["alphabet"] - 1)[enemy > 1] if kind == "transformer" else value
        others.fields["x"][others.rows_of(enemy)] = legal
    before, after = (whole(learnt(kind, each, touches)) for each in (users, others))
    for name, update in after.items():
        assert update.dtype == torch.float32
        assert torch.equal(update[::2], before[name][::2]), name
    assert not all(torch.equal(u[1::2], before[name][1::2]) for name, u in after.items())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_factors_of_updates_are_float32(kind: str) -> None:
    updates = learnt(kind, four_users(kind), 10**9).values()
    factors = [update for update in updates if isinstance(update, OuterProducts)]
    assert factors
    assert all(u.left.dtype == u.right.dtype == torch.float32 for u in factors)


def test_metrics_are_those_of_float32() -> None:
    asked = (metric("accuracy"), metric("loss", bound=5.0))
    local = SGD(0.1, batch_size=4, steps=3)
    request = request_to_all(len(SIZES), local, "flat", asked, Averaging(), adaptive=False)
    found: dict[str, dict[str, np.ndarray]] = {}
    for activations in ("float32", "bfloat16"):
        transport = InProcessTransport(
            make_task(), users_of("general"), CPU, MEMORY, activations=activations
        )
        found[activations] = request.clipping.layout.unflatten(total_of(transport, request))
    for name, tensor in found["float32"].items():
        same = np.array_equal(tensor, found["bfloat16"][name])
        assert same == (name not in request.parameters), name


class Picky(nn.Module):
    """Works in float32 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("too few bits")
        return x


def test_a_model_that_cannot_is_refused_before_any_user_trains() -> None:
    users = users_of("general")
    request = request_of(Task(general(), cross_entropy), len(SIZES), 1.0)
    task = Task(nn.Sequential(*general(), Picky()), cross_entropy)
    exact = InProcessTransport(task, users, CPU, MEMORY)
    assert np.any(total_of(exact, request))
    message = "cannot be trained with bfloat16 activations: too few bits"
    with pytest.raises(ModelError, match=message):
        next(iter(replace(exact, activations="bfloat16").collect(request)))


def test_other_names_are_refused() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert activations_named("bfloat16", cpu) == activations_named("bfloat16", gpu) == "bfloat16"
    assert activations_named("tf32", gpu) == "tf32"
    for name in ("float16", "tf32"):
        message = f"activations is '{name}'; legal on cpu are float32, bfloat16"
        with pytest.raises(InvalidValueError, match=message):
            replace(transport_of("mlp"), activations=name)
    with pytest.raises(InvalidValueError, match="legal on cuda are float32, tf32, bfloat16"):
        activations_named("float16", gpu)


def rounding() -> set[str]:
    backends = torch.backends
    libraries = backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul
    return {each.fp32_precision for each in libraries}


@pytest.mark.parametrize("before", [True, False])
def test_factors_are_rounded_only_if_that_is_asked_for_and_only_while_users_train(
    before: bool,
) -> None:
    seen = set[str]()

    def watched(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.update(rounding())
        return cross_entropy(outputs, targets)

    task, users = replace(task_of("general"), loss=watched), users_of("general")
    request = request_of(task, 1, 1.0)
    with tf32(allowed=before):
        for kind in get_args(Activations):
            trainer = Trainer(task, users, None, CPU, MEMORY, kind)
            start = trainer.begin(request)
            for shapes in ((), (1,)):
                chunk = Chunk(request.users, shapes, 4)
                trainer.sent(request, start, chunk)  # in which the model is tried before
                seen.clear()
                trainer.sent(request, start, chunk)
                assert seen == {"tf32" if kind == "tf32" else "ieee"}
            assert rounding() == {"tf32" if before else "ieee"}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_what_a_caller_has_set_for_all_of_torch_is_left_as_it_was(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with plain_arithmetic(CPU):
            assert rounding() == {"ieee"}
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_take_turns_with_what_they_set_for_all_of_torch() -> None:
    # Else the first to leave puts back what the second needs, and the second what the first set.
    inside, seen = Event(), list[torch.dtype]()

    def second() -> None:
        with plain_arithmetic(CPU):
            inside.set()
            seen.append(torch.get_default_dtype())

    before, thread = torch.get_default_dtype(), Thread(target=second)
    torch.set_default_dtype(torch.float64)
    try:
        with plain_arithmetic(CPU):
            thread.start()
            assert not inside.wait(0.2)
        thread.join()
        assert seen == [torch.float32]
        assert torch.get_default_dtype() == torch.float64
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_default_dtype(before)


def test_threads_that_flush_subnormal_numbers_are_refused() -> None:
    # Threads of torch keep for ever what their maker had set when they began.
    program = (
        "import torch\n"
        "torch.set_num_threads(2)\n"
        "torch.set_flush_denormal(True)\n"
        "torch.ones(2**20).exp()\n"
        "from tests.engine.test_precision import *\n"
        "transport = replace(transport_of('mlp', 'float32'), processes=1)\n"
        "request = request_of(transport.task, len(SIZES), 1.0)\n"
        "try:\n"
        "    list(transport.collect(request))\n"
        "except InvalidValueError as error:\n"
        "    print(error)\n"
        "print(len(list(replace(transport, processes=2).collect(request))))\n"
    )
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=found, capture_output=True, text=True, check=True
    )
    sentence, sums = done.stdout.splitlines()
    assert sentence.startswith("threads of torch take subnormal numbers for zero")
    assert int(sums) > 1


@pytest.mark.parametrize("before", [(True, False), (False, True)])
def test_convolutions_of_a_gpu_are_the_same_each_time(
    before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn = torch.backends.cudnn
    for name, value in zip(("benchmark", "deterministic"), before, strict=True):
        monkeypatch.setattr(cudnn, name, value)
    with plain_arithmetic(CPU):
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    assert (cudnn.benchmark, cudnn.deterministic) == before


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_gpu_adds_up_in_one_order(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # warns without a GPU
    mode, memory = torch.get_deterministic_debug_mode, torch.utils.deterministic
    torch.set_deterministic_debug_mode(own)
    try:
        for device, inside in (("cuda", (1, False)), ("cpu", (own, True))):
            with plain_arithmetic(torch.device(device)):
                assert (mode(), memory.fill_uninitialized_memory) == inside
            assert (mode(), memory.fill_uninitialized_memory) == (own, True)
    finally:
        torch.set_deterministic_debug_mode(0)
