"""Models with several inputs: the same as with all of it in one, and users keep apart."""

import pathlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpriv
from fedpriv.data.population import UserStore
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, ModelError
from fedpriv.evaluation.held_out import evaluate
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import total_of
from tests.engine.words import NAMES, WORDS, Masked, columns_of

CPU = torch.device("cpu")
SIZES = [3, 6, 6, 3]


class Joined(nn.Module):
    """The same with both side by side in one input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, 0], x[:, 1])


class Dropping(Masked):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(input_ids, attention_mask), 0.5, self.training)


def tasks() -> tuple[Task, Task]:
    torch.manual_seed(0)
    joined = Joined()
    return Task(joined.inner, inputs=NAMES), Task(joined)


def store_of(columns: dict[str, np.ndarray]) -> UserStore:
    return UserStore(columns, np.cumsum([0, *SIZES]))


def joined(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"x": np.stack([columns[name] for name in NAMES], 1), "y": columns["y"]}


def request_for(task: Task) -> RoundRequest:
    metrics = (metric("accuracy"), metric("loss", bound=5.0))
    parameters = task.parameters()
    layout = Layout.of(parameters)
    names = (*layout.names, *(m.tensor for m in metrics))
    shapes = (*layout.shapes, *(m.shape for m in metrics))
    groups = (*flat(layout, 0.5), *(m.group for m in metrics))
    clipping, users = Clipping(Layout(names, shapes), groups), np.arange(len(SIZES))
    local = LocalTraining(0.5, batch_size=2, epochs=2)
    return RoundRequest("run", 0, 0, parameters, clipping, local, users, bytes(32), metrics)


@pytest.mark.parametrize(("path", "processes"), [("alone", 1), ("together", 2)])
def test_several_inputs_train_and_measure_as_one(path: Path, processes: int) -> None:
    several, one = tasks()
    columns = columns_of(sum(SIZES))
    found, expected = (
        total_of(
            InProcessTransport(task, store_of(rows), CPU, 10**6, processes=processes, path=path),
            request_for(task),
        )
        for task, rows in ((several, columns), (one, joined(columns)))
    )
    assert expected.any()
    np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("path", ["alone", "together"])
@pytest.mark.parametrize("model", [Masked, Dropping])
def test_users_keep_apart(model: type[nn.Module], path: Path) -> None:
    torch.manual_seed(0)
    task, store = Task(model(), inputs=NAMES), store_of(columns_of(sum(SIZES)))
    store.fields["input_ids"][store.rows_of(1)][0, 0] = WORDS  # no word: it counts as zero
    request = request_for(task)
    transport = InProcessTransport(task, store, CPU, 100_000, processes=1, path=path)
    alone = [total_of(transport, replace(request, users=np.array([u]))) for u in request.users]
    assert [bool(each.any()) for each in alone] == [True, False, True, True]
    np.testing.assert_array_equal(total_of(transport, request), sum(alone))


def test_evaluation_reads_all_inputs() -> None:
    several, one = tasks()
    columns = columns_of(30)
    found = evaluate(several, columns, CPU, several.parameters())
    expected = evaluate(one, joined(columns), CPU, one.parameters())
    assert found == expected


def test_tasks_whose_inputs_do_not_fit_are_refused() -> None:
    columns = columns_of(4)
    with pytest.raises(ModelError, match="at least one, each once"):
        Task(Masked(), inputs=())
    with pytest.raises(ModelError, match="at least one, each once"):
        Task(Masked(), inputs=("input_ids", "input_ids"))
    with pytest.raises(ModelError, match="no field 'mask'"):
        check_task(Task(Masked(), inputs=("input_ids", "mask")), columns)
    with pytest.raises(ModelError, match="cannot be evaluated on the data"):
        check_task(Task(Masked(), inputs=("input_ids", "y")), columns)
    check_task(Task(Masked(), inputs=NAMES), columns)


class Leaking(Masked):
    """A model that takes the mask of another example."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask.roll(1, 0))


def test_a_model_that_mixes_one_of_its_inputs_is_refused() -> None:
    with pytest.raises(ModelError, match="mix examples"):
        check_task(Task(Leaking(), inputs=NAMES), columns_of(4), apart=True)


def test_a_population_of_several_inputs_is_simulated(tmp_path: pathlib.Path) -> None:
    columns, ids = columns_of(60), np.arange(60) // 3
    x = {name: columns[name] for name in NAMES}
    few = {name: column[:9] for name, column in x.items()}
    people = fedpriv.Population.from_arrays(x, columns["y"], ids, held_out=(few, columns["y"][:9]))
    mechanism = fedpriv.Mechanism.poisson(
        q=0.5, clipping=fedpriv.Flat(1.0), metrics={"accuracy": {}}
    )
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    run = fedpriv.simulate(
        people,
        tasks()[0],
        mechanism,
        local=fedpriv.SGD(0.5, epochs=1),
        out=tmp_path / "run",
        quiet=True,
    )
    assert [set(each.metrics) for each in run.rounds] == [{"accuracy", "contributors"}] * 2
    assert 'inputs = [\n    "input_ids",\n    "attention_mask",\n]' in (
        tmp_path / "run" / "plan.toml"
    ).read_text(encoding="utf-8")
    with pytest.raises(DataError, match="test rows have the fields"):
        fedpriv.Population.from_arrays(x, columns["y"], ids, held_out=(ids[:9], columns["y"][:9]))
