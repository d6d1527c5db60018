"""Local algorithms, on both roads, against a plain loop over users with torch.optim."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.engine import side_by_side
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.training.local import SGD, AdamW, FedRecon, Scaffold
from fedpriv.training.optimizers import PolynomialDecay
from fedpriv.training.request import LocalStep, LocalTraining, RoundRequest
from fedpriv.training.rounds import initial_state
from tests.engine.everyone import total_of, users_of
from tests.engine.plain import batches_of
from tests.isolation import Plan, training_plan
from tests.opening import open_round

SIZES = [5, 1, 12, 0, 5, 40]
PATHS: tuple[Path, ...] = ("alone", "together")


class Model(nn.Module):
    """A layer, and weights that are in none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.w = nn.Parameter(torch.randn(8, 3) / 3)
        self.b = nn.Parameter(torch.randn(3) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) @ self.w + self.b


@dataclass(frozen=True)
class SignTraining(LocalTraining):
    """SGD by the signs of gradients, which shrink by a factor in each step."""

    decay: float = 1.0

    @property
    def memories(self) -> int:
        return 1

    def direction(self, step: LocalStep) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        (before,) = step.memory
        scale = torch.ones_like(before) if step.number == 0 else before * self.decay
        return step.gradient.sign() * scale, (scale,)


@pytest.fixture(autouse=True)
def _learning_without_weights_would_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the layer, which is small; where a step is more than its gradient, it may not."""
    monkeypatch.setattr(side_by_side, "_TOUCHES", 10**9)


def task_of(*, personal: bool = False) -> Task:
    torch.manual_seed(0)
    return Task(Model(), cross_entropy, personal=("w", "b") if personal else ())


def transport_of(task: Task, path: Path, processes: int = 1) -> InProcessTransport:
    given = task, users_of(SIZES), torch.device("cpu"), 10**5
    return InProcessTransport(*given, processes=processes, path=path)


def request_to(task: Task, local: LocalTraining, control: float = 0.0) -> RoundRequest:
    """The first round's, of all users, hardly clipped, at a control variate of this size."""
    plan = training_plan(Plan("linear", "flat", "equal", local, False, False, 64.0), len(SIZES))
    parameters = task.parameters()
    layout = type(plan.layout).of(parameters)
    (group,) = plan.groups
    group = replace(group, tensors=layout.names, scales=(1.0,) * len(layout.names))
    plan = replace(plan, layout=layout, groups=(group,))
    request = open_round(plan, initial_state(plan, parameters), 0, SeededEntropy(0))
    rng = np.random.default_rng(1)
    drawn = {
        name: (control * rng.standard_normal(c.shape)).astype(np.float32)
        for name, c in request.control.items()
    }
    return replace(request, control=drawn)


def batches(request: RoundRequest, user: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    users = users_of(SIZES)
    if SIZES[user]:
        own = user, int(users.offsets[user]), SIZES[user]
        for rows in batches_of(*own, request.local, request.local_key):
            batch = users.take(rows)
            yield torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])


def updates(transport: InProcessTransport, request: RoundRequest) -> dict[str, np.ndarray]:
    """What all users add up to, in the model's units."""
    clipping = request.clipping
    return clipping.layout.unflatten(clipping.in_units(total_of(transport, request)))


def slowly(task: Task, request: RoundRequest) -> dict[str, np.ndarray]:
    """What all users add up to, one after the other."""
    layout = request.clipping.layout
    total = np.zeros(layout.dimension, np.int64)
    for user in range(len(SIZES)):
        total += request.clipping.contribution(contribution(task, request, user))
    return layout.unflatten(request.clipping.in_units(total))


def contribution(task: Task, request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    model, local = copy.deepcopy(task.model), request.local
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = {f"control/{name}": np.zeros(c.shape) for name, c in request.control.items()}
    server = {name: torch.from_numpy(c) for name, c in request.control.items()}
    corrections: dict[str, torch.Tensor] = {}
    if isinstance(local, AdamW):
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=local.rate,
            betas=(local.beta1, local.beta2),
            eps=local.epsilon,
            weight_decay=local.weight_decay,
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=local.rate, momentum=local.momentum)
    for number, (x, y) in enumerate(batches(request, user)):
        optimizer.zero_grad()
        if isinstance(local, FedRecon):
            turn = number < local.personal_steps
            for name, p in model.named_parameters():
                p.requires_grad_((name in task.personal) == turn)
            optimizer.param_groups[0]["lr"] = local.personal_rate if turn else local.rate
        cross_entropy(model(x), y).mean().backward()
        if (
            isinstance(local, Scaffold) and not corrections
        ):  # on all examples, at the server's model
            for name, p in model.named_parameters():
                changes[f"control/{name}"] = (p.grad - server[name]).numpy()
                corrections[name] = server[name] - p.grad
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            p.grad += local.proximal * (p.detach() - start[name])
            p.grad += corrections.get(name, torch.zeros(()))
            if isinstance(local, SignTraining):
                p.grad = p.grad.sign() * local.decay**number
        optimizer.step()
    update = {n: (p.detach() - start[n]).numpy() for n, p in model.named_parameters()}
    return {n: t for n, t in {**update, **changes}.items() if n not in task.personal}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "local",
    [
        SGD(0.1, batch_size=8, epochs=2),
        SGD(0.1, batch_size=4, epochs=2, momentum=0.9, proximal=0.5),
        AdamW(0.02, batch_size=2, steps=12, weight_decay=0.3, beta1=0.5, beta2=0.9, epsilon=1e-3),
        AdamW(0.01, epochs=4, proximal=0.7, beta1=0.0, weight_decay=0.0),
        Scaffold(0.3, epochs=5, control_norm=64.0),
        Scaffold(0.1, steps=7, proximal=0.4, control_norm=64.0),
    ],
    ids=repr,
)
def test_users_train_as_they_would_in_a_plain_loop(path: Path, local: LocalTraining) -> None:
    task = task_of()
    request = request_to(task, local, control=0.2)
    found, expected = updates(transport_of(task, path), request), slowly(task, request)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=3e-5)
        assert np.abs(tensor).max() > 1e-2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "local",
    [
        SGD(0.1, epochs=6),
        AdamW(0.02, batch_size=4, steps=7),
        FedRecon(0.1, steps=7, personal_steps=4, personal_rate=0.3),
        FedRecon(0.1, batch_size=4, steps=9, momentum=0.8, personal_steps=2, personal_rate=0.02),
    ],
    ids=repr,
)
def test_personal_parameters_are_trained_and_stay(path: Path, local: LocalTraining) -> None:
    task = task_of(personal=True)
    request, transport = request_to(task, local), transport_of(task, path)
    found, expected = updates(transport, request), slowly(task, request)
    shared = {"inner.weight", "inner.bias"}
    assert set(found) == set(expected) == set(request.parameters) == shared
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=3e-5)
        assert np.abs(tensor).max() > 1e-2
    # The next round begins with the same personal parameters, whatever users made of them.
    np.testing.assert_array_equal(total_of(transport, request), total_of(transport, request))
    # They matter: what is sent would be another with all of them frozen.
    if not isinstance(local, FedRecon):
        still = transport_of(Task(task.model, cross_entropy, frozen=("w", "b")), path)
        assert not np.array_equal(total_of(still, request), total_of(transport, request))


@pytest.mark.parametrize("path", PATHS)
def test_a_control_variate_makes_the_first_step_that_of_the_server(path: Path) -> None:
    task = task_of()
    request = request_to(task, Scaffold(0.5, steps=1, control_norm=64.0), control=1.0)
    found, everyone = updates(transport_of(task, path), request), sum(size > 0 for size in SIZES)
    for name, control in request.control.items():
        np.testing.assert_allclose(found[name], -0.5 * everyone * control, atol=3e-5)


def test_users_of_a_node_train_for_one_run_after_the_other_in_any_process() -> None:
    task = task_of()
    kept = transport_of(task, "together")
    scaffold, adam = Scaffold(0.3, epochs=2, control_norm=0.5), AdamW(0.1, batch_size=4, epochs=1)
    for local, control in ((scaffold, 0.2), (adam, 0.0), (scaffold, 0.2)):
        request = request_to(task, local, control)
        expected = total_of(transport_of(task, "together", processes=2), request)
        np.testing.assert_array_equal(total_of(kept, request), expected)


@pytest.mark.parametrize("path", PATHS)
def test_a_rate_that_changes_asks_for_no_new_trials(path: Path) -> None:
    task = task_of()
    transport, request = transport_of(task, path), request_to(task, SGD(0.1, epochs=1))
    first, settled = total_of(transport, request), transport.road(request)
    request = replace(request, local=SGD(0.2, epochs=1))
    assert transport.road(request) is settled
    np.testing.assert_allclose(total_of(transport, request), 2 * first, atol=len(SIZES) * 8)


def test_a_step_needs_the_rate_of_a_round() -> None:
    falling = SGD(PolynomialDecay(0.4, 0.1, rounds=3), epochs=1)
    assert [falling.at(number).rate for number in (1, 2, 4)] == pytest.approx([0.4, 0.3, 0.1])
    with pytest.raises(InvalidValueError, match="a step needs a number"):
        _ = falling.rate


def test_an_algorithm_from_outside_trains_users_who_go_alone() -> None:
    task, local = task_of(), SignTraining(0.1, steps=5, decay=0.5)
    request, transport = request_to(task, local), transport_of(task, "auto")
    assert not transport.road(request).shapes
    expected = slowly(task, request)
    for name, tensor in updates(transport, request).items():
        np.testing.assert_allclose(tensor, expected[name], atol=3e-5)
    with pytest.raises(ModelError, match="SignTraining is not known to keep users apart"):
        transport_of(task, "together").prepare(request)


def test_where_no_server_says_otherwise_the_control_variate_is_zero() -> None:
    seen = []

    class Noting(LocalTraining):
        def direction(self, step: LocalStep) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            seen.append(float(step.control))
            return super().direction(step)

    task = task_of()
    total_of(transport_of(task, "alone"), request_to(task, Noting(0.1, epochs=1)))
    assert seen
    assert set(seen) == {0.0}


def recon(**others: float) -> FedRecon:
    return FedRecon(0.1, **{"personal_steps": 1, "personal_rate": 0.1, **others})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(0.1, epochs=1, momentum=0.9), "momentum of AdamW is 0.9"),
        (lambda: AdamW(0.1, epochs=1, beta2=1.0), "beta2 is 1.0"),
        (lambda: AdamW(0.1, epochs=1, weight_decay=-1.0), "weight_decay is -1.0"),
        (lambda: AdamW(0.1, epochs=1, epsilon=0.0), "epsilon of AdamW is 0.0"),
        (lambda: Scaffold(0.1, steps=2, control_norm=0.0), "control_norm is 0"),
        (lambda: Scaffold(0.1, steps=2, control_norm=1.0, control_share=1.0), "control_share is"),
        (lambda: Scaffold(0.1, steps=2, control_norm=1.0, control_rate=0.0), "control_rate is 0"),
        (lambda: Scaffold(0.1, steps=2, control_norm=1.0, batch_size=4), "batch_size is 4"),
        (lambda: Scaffold(0.1, steps=2, control_norm=1.0, momentum=0.5), "momentum of Scaffold"),
        (lambda: recon(epochs=2), "epochs of FedRecon is 2"),
        (lambda: recon(steps=2, personal_steps=2), "personal_steps is 2 of 2 steps"),
        (lambda: recon(steps=2, personal_steps=0), "personal_steps is 0 of 2 steps"),
        (lambda: recon(steps=3, personal_steps=1.5), "personal_steps is 1.5 of 3 steps"),
        (lambda: recon(steps=2, personal_rate=0.0), "personal_rate is 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()  # type: ignore[operator]
