"""Tasks that cannot be trained are refused by name, and other ones are not."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.adapters import with_adapters
from fedpriv.engine.arithmetic import generators_apart
from fedpriv.engine.task import LOSSES, Task, cross_entropy, find_loss, squared_error
from fedpriv.engine.task_checks import check_task
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.evaluation.held_out import evaluate
from fedpriv.experiment.models import MODELS, build_model

EXAMPLES = {
    "x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32),
    "y": np.array([0, 1, 2, 0]),
}


class Counting(nn.Module):
    """Counts its calls in a buffer, as running statistics would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


class Replacing(nn.Module):
    """Counts its calls in a new buffer each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(x)


class Applied(nn.Module):
    """A linear layer after a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.function(x))


class Returning(nn.Module):
    """What a function makes of the scores of a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 3), function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self.linear(x))


class TwoInputs(nn.Module):
    """Words beside numbers."""

    def __init__(self, **options: float) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(3, 6, **options), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.words(y))


class Scheduled(nn.Module):
    """Counts its passes, so as to do something else after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(6, 3), 0
        self.linear.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = len(x)  # which is the same each time
        self.linear.passes += 1
        return self.linear(x)


class BrightestIsOne(nn.Module):
    """Divides by the largest number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x / x.max())


def test_any_row_may_show_that_examples_are_mixed() -> None:
    rows = np.random.default_rng(0).random((4, 6), np.float32)
    rows[0, 0] = 9.0
    for turned in range(4):
        examples = {"x": np.roll(rows, turned, 0), "y": np.arange(4) % 3}
        with pytest.raises(ModelError, match="model or loss mix examples"):
            check_task(Task(BrightestIsOne()), examples, apart=True)


@pytest.mark.parametrize("function", [lambda x: x.cumsum(0), lambda x: x.flip(0).cumsum(0).flip(0)])
def test_a_model_that_looks_ahead_or_back_alone_mixes_examples(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    # As a recurrent layer does that takes the first axis for the time.
    with pytest.raises(ModelError, match="model or loss mix examples"):
        check_task(Task(Applied(function)), EXAMPLES, apart=True)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(Applied(lambda x: x / len(x))), "or on their number"),
        (Task(Applied(lambda x: x.squeeze())), "cannot be evaluated on one example"),
        (Task(nn.Linear(6, 3), lambda o, y: cross_entropy(o, y) / len(y)), "or on their number"),
    ],
)
def test_only_rows_that_are_records_must_not_depend_on_how_many_there_are(
    task: Task, message: str
) -> None:
    check_task(task, EXAMPLES)
    with pytest.raises(ModelError, match=message):
        check_task(task, EXAMPLES, apart=True)


@pytest.mark.parametrize(
    "task",
    [
        *(Task(model()) for model in (Counting, Replacing, Scheduled, BrightestIsOne)),
        *(
            Task(TwoInputs(**options), inputs=("x", "y"))
            for options in ({"scale_grad_by_freq": True}, {"max_norm": 9.0})
        ),
    ],
)
def test_users_may_keep_and_mix_what_is_their_own(task: Task) -> None:
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    check_task(task, EXAMPLES)
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Complex(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


PENALISED = nn.Linear(6, 3)


def penalised(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) + PENALISED.weight.square().sum()


class Broken(nn.Module):
    """Returns NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float("nan")


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.LazyBatchNorm1d(),
        nn.SyncBatchNorm(6),
        nn.InstanceNorm1d(6, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_mix_examples_are_refused_by_name(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ModelError, match=rf"'1\.1' is {type(layer).__name__}.*GroupNorm"):
        Task(model, cross_entropy)


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.InstanceNorm1d(6), nn.BatchNorm1d(6)],
    ids=repr,
)
def test_layers_that_do_not_are_accepted(layer: nn.Module) -> None:
    Task(nn.Sequential(layer), cross_entropy)


def linear(outputs: int = 3) -> nn.Module:
    return nn.Linear(6, outputs)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(Broken(), cross_entropy), "returns NaN"),
        (
            Task(TwoInputs(sparse=True), inputs=("x", "y")),
            "^layer 'words' has sparse gradients",
        ),
        (Task(PENALISED, penalised), "^the loss reads parameters itself"),
        (Task(linear(), lambda o, y: (o.argmax(1) != y).float()), "^the loss has no gradient"),
        (
            Task(Returning(lambda scores: scores.detach()), cross_entropy),
            "^the loss has no gradient",
        ),
        (
            Task(Returning(lambda scores: (scores, scores))),
            "the model returns a tuple; it must ret",
        ),
        (Task(nn.Linear(5, 3), cross_entropy), "cannot be evaluated"),
        (Task(nn.ReLU(), cross_entropy), "no trainable parameter"),
        (Task(linear(), functional.cross_entropy), r'shape \[\].*reduction="none"'),
        (Task(linear(2), cross_entropy), "cannot be evaluated"),
        (Task(linear(), cross_entropy, inputs="image"), r"no field 'image'.*\['x', 'y'\]"),
    ],
)
def test_tasks_that_cannot_train_are_refused(task: Task, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_task(task, EXAMPLES)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("kind", ["U1", "datetime64[D]", ">i8", "longdouble"])
def test_fields_that_torch_cannot_read_are_refused_by_name(name: str, kind: str) -> None:
    examples = {**EXAMPLES, name: EXAMPLES[name].astype(np.int64).astype(kind)}
    cure = "holds text; give numbers" if kind == "U1" else "is of type .*; convert it"
    with pytest.raises(ModelError, match=f"^field '{name}' {cure}"):
        check_task(Task(linear(), cross_entropy), examples)


@pytest.mark.parametrize("kind", ["bool", "int8", "uint8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("loss", LOSSES)
def test_columns_of_tables_are_taken_as_they_are(kind: str, loss: str) -> None:
    x, y = EXAMPLES["x"].astype(np.float64), (EXAMPLES["y"] > 0).astype(kind)
    model, outputs = linear(), torch.from_numpy(EXAMPLES["x"]) @ torch.ones(6, 1)
    given, target = Task(model, loss).given({"x": torch.from_numpy(x), "y": torch.from_numpy(y)})
    torch.testing.assert_close(given, torch.from_numpy(EXAMPLES["x"]))
    if loss == "cross-entropy":
        if y.dtype.kind == "f":
            return
        outputs = torch.cat([-outputs, outputs], 1)
        expected = cross_entropy(outputs, torch.from_numpy(y.astype(np.int64)))
    else:
        outputs = outputs[:, 0]
        expected = LOSSES[loss](outputs, torch.from_numpy(y.astype(np.float32)))
    losses = Task(model, loss).losses_of(outputs.requires_grad_(), target)
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()


def test_a_loss_of_ones_own_is_given_targets_as_they_are() -> None:
    columns = {"x": torch.tensor([True, False]), "y": torch.tensor([True, False])}
    x, y = Task(linear(), lambda outputs, targets: outputs - targets).given(columns)
    assert (x.dtype, y.dtype) == (torch.float32, torch.bool)


def test_regression_losses_by_hand() -> None:
    outputs, targets = torch.tensor([0.0, 0.5, 3.0]), torch.tensor([0, 0, 0])
    assert LOSSES["mse"](outputs, targets).tolist() == [0.0, 0.25, 9.0]
    assert LOSSES["huber"](outputs, targets).tolist() == [0.0, 0.125, 2.5]


def test_parameters_that_cannot_be_trained_as_they_are_are_refused() -> None:
    with pytest.raises(ModelError, match="parameter 'weight' is complex64"):
        Task(Complex())
    hooked = nn.Linear(6, 3)
    hooked.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(ModelError, match="parameter 'weight' has a hook"):
        Task(hooked)
    assert list(Task(hooked, frozen="weight").trainable()) == ["bias"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch gives it up itself
def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(6, 3))
    with pytest.raises(ModelError, match="the model is TorchScript, into which no user's"):
        Task(scripted)
    with pytest.raises(ModelError, match="layer '1' is TorchScript"):
        Task(nn.Sequential(nn.Linear(6, 6), scripted))


def test_a_model_may_draw_other_numbers_for_one_example() -> None:
    check_task(Task(Applied(lambda x: x + torch.randn_like(x).flip(0))), EXAMPLES)


def test_a_good_task_passes_and_is_unchanged() -> None:
    task = Task(linear(), cross_entropy)
    before = task.parameters()
    check_task(task, EXAMPLES)
    for name, parameter in task.parameters().items():
        np.testing.assert_array_equal(parameter, before[name])
        assert parameter.dtype == np.float32


def test_an_evaluation_leaves_every_part_of_the_model_in_its_mode() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Dropout()), nn.Linear(8, 3))
    model[0].eval()
    modes = [module.training for module in model.modules()]
    task = Task(model, cross_entropy)
    evaluate(task, EXAMPLES, torch.device("cpu"), task.parameters())
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2


def test_figures_of_a_model_that_draws_are_the_same_each_time() -> None:
    task = Task(Applied(lambda x: functional.dropout(x, 0.5)))
    before = torch.get_rng_state()
    one, other = (evaluate(task, EXAMPLES, torch.device("cpu"), {}) for _ in range(2))
    assert one == other
    assert torch.equal(torch.get_rng_state(), before)


def test_losses_of_sequences_are_averaged_per_example() -> None:
    outputs, targets = torch.randn(2, 3, 5), torch.randint(0, 3, (2, 5))
    task = Task(nn.Identity(), cross_entropy)
    losses = task.losses_of(outputs, targets)
    by_hand = [functional.cross_entropy(outputs[i].T, targets[i]).item() for i in range(2)]
    np.testing.assert_allclose(losses.numpy(), by_hand, rtol=1e-6)


def test_losses_by_name() -> None:
    assert find_loss("mse") is squared_error
    outputs = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    np.testing.assert_array_equal(squared_error(outputs, outputs + 2).numpy(), np.full((2, 2), 4.0))
    assert find_loss("fedpriv.engine.task:cross_entropy") is LOSSES["cross-entropy"]
    for name, message in [
        ("cross-entropi", "did you mean 'cross-entropy'"),
        ("fedpriv.experiment.models:none", "cannot be imported"),
        ("nowhere:loss", "cannot be imported"),
    ]:
        with pytest.raises(ModelError, match=message):
            find_loss(name)


@pytest.mark.parametrize(("name", "count"), [("softmax", 650), ("mlp", 101_770), ("cnn", 26_010)])
def test_models_have_the_published_sizes(name: str, count: int) -> None:
    model = build_model(name, {}, seed=0)
    assert sum(p.numel() for p in model.parameters()) == count
    shape = (2, 64) if name == "softmax" else (2, 1, 28, 28)
    assert model(torch.zeros(shape)).shape == (2, 10)


def test_models_of_characters_have_the_sizes_they_tell() -> None:
    for name, count in (
        ("simulations.character_mlp:CharacterMLP", 11_936),
        ("simulations.transformer:CharacterTransformer", 115_040),
    ):
        model = build_model(name, {}, seed=0)
        assert sum(p.numel() for p in model.parameters()) == count
        assert f"{count:,} parameters" in " ".join(str(type(model).__doc__).split())
        assert model(torch.zeros((2, 40), dtype=torch.int64)).shape == (2, 96, 40)


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (build_model("mlp", {}, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["1.weight"], other["1.weight"])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: build_model("mlp", {}, 1),
        lambda: with_adapters(nn.Sequential(nn.Linear(3, 3)), 2),
        lambda: check_task(Task(nn.Linear(6, 3)), EXAMPLES),
    ],
)
def test_threads_take_turns_at_the_generator(draw: Callable[[], object]) -> None:
    drawing = threading.Thread(target=draw, daemon=True)
    with generators_apart():
        drawing.start()
        drawing.join(0.3)
        assert drawing.is_alive()
    drawing.join()


def test_models_by_import_path_and_bad_names() -> None:
    assert isinstance(build_model("fedpriv.experiment.models:mlp", {"hidden": 3}, 0), nn.Module)
    for name, options, message in [
        ("mpl", {}, "did you mean 'mlp'"),
        ("mlp", {"hiden": 3}, "did you mean 'hidden'"),
        ("fedpriv.experiment.models:nothing", {}, "cannot be imported"),
        ("fedpriv.errors:known_names", {"name": "a"}, "needs the option 'known'"),
        ("fedpriv.errors:known_names", {"name": "a", "known": []}, "returned a str"),
    ]:
        with pytest.raises(ModelError, match=message):
            build_model(name, options, 0)
    assert set(MODELS) == {"softmax", "mlp", "cnn"}


def test_a_model_without_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match="'weight' of the model holds no numbers, as it is on the"):
        Task(nn.Linear(6, 3, device="meta"))
    with pytest.raises(ModelError, match="'weight' of the model holds no numbers, as its layer is"):
        Task(nn.LazyLinear(3))
    norm = nn.BatchNorm1d(3, affine=False, device="meta")
    with pytest.raises(ModelError, match=r"'1.running_mean' of the model holds no numbers"):
        Task(nn.Sequential(nn.Linear(6, 3), norm))


def test_refusals_say_what_the_data_are() -> None:
    whole = {**EXAMPLES, "x": EXAMPLES["x"].astype(np.int64)}
    message = r"inputs are int64\[4, 6\], targets int64\[4\], and parameters are trained as float32"
    with pytest.raises(ModelError, match=message):
        check_task(Task(nn.Linear(6, 3)), whole)
    column = {**EXAMPLES, "y": EXAMPLES["y"][:, None]}
    with pytest.raises(ModelError, match=r"targets \[4, 1\], whole numbers"):
        check_task(Task(nn.Linear(6, 3)), column)
    numbers = {**EXAMPLES, "y": EXAMPLES["x"][:, 0]}
    message = r"outputs are \[4, 2\] and targets \[4\]; under mse they must have the same"
    with pytest.raises(ModelError, match=message):
        check_task(Task(nn.Linear(6, 2), loss="mse"), numbers)
    with pytest.raises(ModelError, match=r"targets are float32\[4\]; .* y.astype\(int\)"):
        check_task(Task(nn.Linear(6, 3)), numbers)


def test_a_model_of_nan_is_refused() -> None:
    model = nn.Linear(6, 3)
    nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(ModelError, match="NaN or infinite losses at its initial parameters"):
        check_task(Task(model), EXAMPLES)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
def test_the_mean_loss_of_probabilities_is_that_of_torch(shape: tuple[int, ...]) -> None:
    outputs, targets = torch.randn(shape), torch.randn(shape).softmax(1)
    task = Task(nn.Linear(1, 1))
    loss = task.losses_of(outputs, targets).sum() * task.weight(targets)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(outputs, targets))


def test_wrappers_of_a_model_are_taken_off() -> None:
    layer = nn.Linear(4, 3)
    for wrapped in (
        torch.compile(layer, backend="eager"),
        nn.DataParallel(layer),
        nn.DataParallel(nn.DataParallel(layer)),
    ):
        assert list(Task(wrapped).parameters()) == ["weight", "bias"]


def test_a_loss_that_is_a_class_is_refused() -> None:
    with pytest.raises(ModelError, match=r"class CrossEntropyLoss; .*\(reduction=\"none\"\)"):
        Task(nn.Linear(4, 3), nn.CrossEntropyLoss)


def test_a_class_or_a_namesake_of_another_library_is_named() -> None:
    with pytest.raises(InvalidValueError, match="model is the class Linear itself; it must be of"):
        Task(nn.Linear)
    with pytest.raises(InvalidValueError, match="model is of the type SGD of torch; it must"):
        Task(torch.optim.SGD([torch.zeros(1)], 0.1))
