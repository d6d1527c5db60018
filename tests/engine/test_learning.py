"""Tasks that no user could train are refused on public rows, and honest ones are not."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.adapters import with_adapters
from fedpriv.engine.task import Loss, Task
from fedpriv.engine.task_checks import check_learns, check_targets
from fedpriv.errors import ModelError
from fedpriv.training.local import SGD

N = 40
RNG = np.random.default_rng(0)
X, CLASSES = RNG.standard_normal((N, 4)).astype(np.float32), RNG.integers(0, 3, N)
NUMBERS = RNG.standard_normal((N, 1)).astype(np.float32)
LOCAL = SGD(0.5, epochs=2)


def softmax(*first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Linear(4, 3), nn.Softmax(1))


def zeros(module: nn.Module, *names: str) -> nn.Module:
    """The module with some parameters, or all, at zero."""
    for name, parameter in module.named_parameters():
        if not names or name in names:
            nn.init.zeros_(parameter)
    return module


def one_of_opposite_signs() -> nn.Linear:
    """A layer of which one output is positive for every input that does not add up to 0."""
    layer = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0], [0.0]]).expand(3, 4))
    return layer


def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


class Dead(nn.Module):
    """ReLU units that give 0 for all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = zeros(nn.Linear(4, 3))
        nn.init.constant_(self.linear.bias, -1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(0.0 * x).relu()


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize(
    ("model", "loss", "x", "y", "cause"),
    [
        (nn.Linear(4, 1), entropy, X, NUMBERS, "one class is always 0: use the loss binary-cross"),
        (Dead(), "cross-entropy", X, CLASSES, "whether units such as ReLU give 0 always"),
    ],
)
def test_a_loss_that_nothing_moves_is_refused(
    model: nn.Module, loss: Loss | str, x: np.ndarray, y: np.ndarray, cause: str, *, held_out: bool
) -> None:
    rows = {"x": x, "y": y}
    few = {name: column[:1] for name, column in rows.items()}
    which = f"zero on 16 {'held-out' if held_out else 'random'} rows; .*{cause}"
    with pytest.raises(ModelError, match=which):
        check_learns(Task(model, loss), rows if held_out else {}, few, LOCAL)


def test_the_likely_cause_is_in_the_numbers() -> None:
    rows = {"x": 1e6 * X, "y": CLASSES}
    with pytest.raises(ModelError, match=r"inputs are as large as [0-9.]+e\+06, .*: scale them"):
        check_learns(Task(softmax()), rows, rows, LOCAL)
    steep = softmax(nn.Linear(4, 4))
    nn.init.constant_(steep[1].bias, 1e6)  # type: ignore[index, arg-type]
    with torch.no_grad():
        steep[1].bias[0] = 0.0  # type: ignore[index]
        steep[1].bias[1] = 2e6  # type: ignore[index]
    with pytest.raises(ModelError, match="let the model end before its softmax"):
        check_learns(Task(steep), {"x": X, "y": CLASSES}, {"x": X, "y": CLASSES}, LOCAL)


HONEST = {
    "logistic regression from zeros": (zeros(nn.Linear(4, 3)), X, CLASSES),
    "a last layer of zeros": (
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), zeros(nn.Linear(5, 3))),
        X,
        CLASSES,
    ),
    "adapters": (with_adapters(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), 2), X, CLASSES),
    "blank rows": (nn.Linear(4, 3, bias=False), 0.0 * X[:1], CLASSES[:1]),
    "rows that do not count": (nn.Linear(4, 3), X, np.where(np.arange(N) < N - 2, -100, CLASSES)),
    "dead units on most rows": (
        nn.Sequential(one_of_opposite_signs(), nn.ReLU()),
        np.where(np.arange(N)[:, None] < N - 1, 0.0 * X, X),
        CLASSES,
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_tasks_pass(name: str) -> None:
    model, x, y = HONEST[name]
    rows, few = {"x": x, "y": y}, {"x": 0.0 * x[:1], "y": 0 * y[:1]}
    held = {} if name == "blank rows" else rows
    assert not check_learns(Task(model), held, few, LOCAL)


def test_a_model_that_fits_the_rows_exactly_passes() -> None:
    model = zeros(nn.Linear(4, 1))
    rows = {"x": X, "y": 0.0 * NUMBERS}
    check_learns(Task(model, "mse"), rows, rows, LOCAL)


def test_a_softmax_before_cross_entropy_is_suspected_and_not_refused() -> None:
    rows = {"x": X, "y": CLASSES}
    for model, suspected in ((softmax(), True), (nn.Linear(4, 3), False)):
        for held in (rows, {}):
            notes = check_learns(Task(model), held, rows, LOCAL)
            assert any("applies softmax again" in note for note in notes) is suspected
    own = Task(
        softmax(), lambda outputs, y: functional.nll_loss(outputs.log(), y, reduction="none")
    )
    assert not check_learns(own, rows, rows, LOCAL)


def test_a_sigmoid_before_binary_cross_entropy_is_suspected_and_not_refused() -> None:
    rows = {"x": X, "y": CLASSES % 2}
    small = zeros(nn.Linear(4, 1))
    nn.init.constant_(small.bias, 0.5)  # type: ignore[arg-type]
    for model, suspected in ((nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), True), (small, False)):
        notes = check_learns(Task(model, "binary-cross-entropy"), rows, rows, LOCAL)
        assert any("applies sigmoid again" in note for note in notes) is suspected


class Cut(nn.Module):
    """A layer behind `detach`, and one that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = (nn.Linear(4, n) for n in (4, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).detach())


def test_parameters_that_noise_alone_would_move_are_noted() -> None:
    rows = {"x": X, "y": CLASSES}
    (note,) = check_learns(Task(Cut()), rows, rows, LOCAL)
    assert "no gradient by 4 of the trained parameters, such as 'first.weight'" in note
    assert not check_learns(Task(Cut(), frozen=("first.*", "unused.*")), rows, rows, LOCAL)


class OverRows(nn.Module):
    """An LSTM that takes the rows of a batch for the steps of a sequence."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 5, batch_first=batch_first), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x.unsqueeze(-1))[0][:, -1])


@pytest.mark.parametrize("batch_first", [True, False])
def test_examples_that_mix_are_noted(*, batch_first: bool) -> None:
    torch.manual_seed(0)
    rows = {"x": X, "y": CLASSES}
    notes = check_learns(Task(OverRows(batch_first=batch_first)), rows, rows, LOCAL)
    assert any("mix examples" in note for note in notes) is not batch_first


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_models_of_other_precision_pass(kind: torch.dtype) -> None:
    rows = {"x": X, "y": CLASSES}
    assert not check_learns(Task(nn.Linear(4, 3).to(kind)), rows, rows, LOCAL)


@pytest.mark.parametrize(("rate", "epochs", "refused"), [(1e300, 1, 1), (1e30, 2, 1), (1e30, 1, 0)])
def test_a_learning_rate_whose_first_steps_leave_float32_is_refused(
    rate: float, epochs: int, refused: int
) -> None:
    rows, local = {"x": X, "y": NUMBERS}, SGD(rate, epochs=epochs)
    task = Task(nn.Linear(4, 1), "mse")
    if not refused:
        check_learns(task, rows, rows, local)
        return
    with pytest.raises(ModelError, match=r"^learning_rate is 1e\+30+, at which users' first steps"):
        check_learns(task, rows, rows, local)


@pytest.mark.parametrize(
    ("outputs", "loss", "y", "message"),
    [
        (
            3,
            "cross-entropy",
            CLASSES + 1,
            "go from 1 to 3 and the model gives 3 .*: subtract 1 from",
        ),
        (3, "cross-entropy", CLASSES - 1, "go from -1 to 1 .*: number classes from 0; ignore_ind"),
        (
            2,
            "cross-entropy",
            CLASSES,
            "go from 0 to 2 and the model gives 2 .*: give the model 3 sc",
        ),
        (
            3,
            "cross-entropy",
            X[:, :3],
            "float32; under cross-entropy .* for numbers use the loss mse",
        ),
        (1, "binary-cross-entropy", CLASSES % 2 + 1, "go from 1 to 2; under binary-cross-entropy"),
        (3, "cross-entropy", np.where(CLASSES == 1, -100, CLASSES), ""),
        (3, "cross-entropy", np.abs(X[:, :3]), ""),
        (1, "binary-cross-entropy", CLASSES % 2, ""),
        (1, "mse", 9.0 * NUMBERS, ""),
    ],
)
def test_targets_that_the_loss_cannot_mean_are_refused(
    outputs: int, loss: str, y: np.ndarray, message: str
) -> None:
    task = Task(nn.Linear(4, outputs), loss)
    if not message:
        check_targets(task, {"x": X, "y": y})
        return
    with pytest.raises(ModelError, match=f"^targets of the held-out rows .*{message}"):
        check_targets(task, {"x": X, "y": y})


def test_targets_are_left_to_a_model_that_fails_or_gives_other_shapes() -> None:
    for model in (nn.Linear(5, 3), nn.Linear(4, 1), nn.Flatten(0), nn.Unflatten(1, (2, 2))):
        check_targets(Task(model), {"x": X, "y": CLASSES})
    for fields in ({"x": X}, {"x": X, "y": np.array(["a", "b"])}):
        check_targets(Task(nn.Linear(4, 3)), fields)
