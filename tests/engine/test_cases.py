"""Ways to write models and data that people have tried, each of which must train as they expect."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv.data.population import UserStore
from fedpriv.engine import roads
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.trainer import sizes_of
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import ModelError
from fedpriv.training.local import GRADIENT
from fedpriv.training.request import LocalTraining
from tests.engine.everyone import request_under, total_of, users_of
from tests.isolation import Packed, contrastive

CPU = torch.device("cpu")


class TestUnequalSizes:
    """Sizes as people have them cost what equal sizes cost, and no size is tried by itself."""

    local = fedpriv.SGD(0.1, batch_size=32, epochs=1)
    pareto = np.minimum((5 * (1 + np.random.default_rng(3).pareto(1.1, 300))).astype(int), 3000)

    def transport(self, sizes: np.ndarray) -> InProcessTransport:
        torch.manual_seed(0)
        task = Task(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)), cross_entropy)
        users = users_of(sizes.tolist())
        return InProcessTransport(task, users, CPU, 2**27, processes=1)

    def slots(self, sizes: np.ndarray) -> int:
        """Rows in all slices of all lanes, blanks included."""
        transport = self.transport(sizes)
        request = request_under(transport.task, self.local, len(sizes), 1.0)
        road = transport.road(request)
        assert road.shapes
        trainer, users, slots = transport._trainer, np.arange(len(sizes)), 0
        for chunk in road.chunks(trainer, self.local, users, sizes_of(transport.users, users)):
            examples = trainer._examples(request, chunk)
            slots += chunk.width * sum(map(sum, examples.used))
        return slots

    def test_few_slots_are_blank(self) -> None:
        equal = self.slots(np.full(300, self.pareto.mean().astype(int)))
        assert self.slots(self.pareto) <= 2 * equal

    def test_sizes_that_are_new_are_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried, honest = [], roads._Trials._digests

        def counted(trials: roads._Trials, *given: object) -> dict[int, bytes]:
            tried.append(trials)
            return honest(trials, *given)

        monkeypatch.setattr(roads._Trials, "_digests", counted)
        numbers = []
        for sizes in (np.full(300, 27), self.pareto):
            transport = self.transport(sizes)
            request = request_under(transport.task, self.local, len(sizes), 1.0)
            transport.prepare(request)
            numbers.append(len(tried))
            assert total_of(transport, request).any()
            assert len(tried) == numbers[-1]
            tried.clear()
        assert numbers[0] == numbers[1]


class OfOpacus(nn.Module):
    """The network of an example that is often copied, at a quarter of its size."""

    def __init__(self, flat: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.flat = flat
        self.c1, self.c2 = nn.Conv2d(1, 4, 8, 2, padding=3), nn.Conv2d(4, 8, 4, 2)
        self.f, self.o = nn.Linear(128, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.c1(x)), 2, 1)
        x = functional.max_pool2d(functional.relu(self.c2(x)), 2, 1)
        return self.o(functional.relu(self.f(self.flat(x))))


def test_neither_view_nor_the_type_of_labels_decides_the_road() -> None:
    """Examples of MNIST, whose labels are bytes in its own files."""
    rng, found, users = np.random.default_rng(0), [], 40
    x, y = rng.standard_normal((users, 1, 28, 28)).astype("f4"), rng.integers(0, 10, users)
    for flat in (lambda t: t.flatten(1), lambda t: t.view(-1, 128)):
        for kind in ("i8", "u1"):
            torch.manual_seed(0)
            task = Task(OfOpacus(flat), cross_entropy)
            store = UserStore({"x": x, "y": y.astype(kind)}, np.arange(users + 1))
            transport = InProcessTransport(task, store, CPU, 2**27, processes=1, most_rows=1)
            request = request_under(task, GRADIENT, users, 1.0)
            assert transport.road(request).shapes
            found.append(total_of(transport, request))
    assert found[0].any()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


FIRST_ROUNDS = """
import sys
import numpy as np, torch
import fedpriv.run.simulate
from torch import nn
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.training.local import SGD
from tests.engine.everyone import request_under, total_of, users_of

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.o = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

    def forward(self, x):
        return self.o(torch.relu(self.c(x)).view(-1, 32))

task, before = Task(Net(), cross_entropy), {*sys.modules}
for path in ("alone", "together"):
    users = users_of([4] * 8, shape=(1, 6, 6))
    transport = InProcessTransport(task, users, torch.device("cpu"), 2**22, processes=1, path=path)
    assert total_of(transport, request_under(task, SGD(0.1, epochs=1), 8, 1.0)).any()
print(*sorted({*sys.modules} - before))
"""


def test_the_first_round_of_a_process_imports_next_to_nothing() -> None:
    root = Path(__file__).parents[2]
    given = [sys.executable, "-W", "ignore", "-c", FIRST_ROUNDS]
    done = subprocess.run(given, cwd=root, capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert len(imported) < 40, imported
    assert not {"sympy", "torch._dynamo", "torch._inductor"} & {*imported}


def trained(
    x: np.ndarray, task: Task, folder: Path, local: LocalTraining | None = None, **unit: object
) -> fedpriv.Run:
    """A run of one round, of ten users with six rows each."""
    y = np.random.default_rng(0).integers(0, 3, 60)
    people = fedpriv.Population.from_arrays(
        x, y, np.repeat(np.arange(10), 6), held_out=(x[:6], y[:6])
    )
    mechanism = fedpriv.Mechanism.poisson(q=1.0, clipping=fedpriv.Flat(1.0), **unit)
    mechanism = mechanism.with_noise(1.0, epsilon=100.0, delta=1e-2)
    return fedpriv.simulate(
        people, task, mechanism, local=local, rounds=1, out=folder / "run", quiet=True, seed=0,
        engine=fedpriv.Engine(processes=1),
    )  # fmt: skip


ONCE = fedpriv.SGD(0.1, epochs=1)


def test_rows_of_a_user_may_be_compared_with_each_other(tmp_path: Path) -> None:
    """Where the user is what is protected, and nowhere else."""
    x = np.random.default_rng(1).standard_normal((60, 8)).astype("f4")
    task = fedpriv.Task(nn.Linear(8, 4), loss=contrastive)
    assert len(trained(x, task, tmp_path, ONCE).rounds) == 1
    with pytest.raises(ModelError, match="mix examples"):
        trained(x, task, tmp_path / "examples", unit="example")


def test_shapes_may_follow_from_the_values_of_a_users_rows(tmp_path: Path) -> None:
    """As packed sequences, whose results in other company differ by rounding."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (60, 5))
    for row in x:
        row[rng.integers(1, 6) :] = 0

    class Last(Packed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:, :3, 0]

    torch.manual_seed(0)
    assert len(trained(x, fedpriv.Task(Last()), tmp_path, ONCE).rounds) == 1
