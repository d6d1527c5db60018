"""Kinds of data, models and settings that people bring: a right number, or one clear sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix
from torch import nn

import fedpriv
from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.run.folder import RunFolder
from tests.commandline import printed

RNG = np.random.default_rng(0)
X = RNG.standard_normal((120, 3)).astype(np.float32)
NAMES = np.array(["ill", "so", "well"])
Y = X.argmax(1)
IDS = np.arange(100) // 4
MECHANISM = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0)).calibrate(
    epsilon=50.0, delta=1e-3, rounds=2
)


def people(x: object = X, y: object = Y, **given: object) -> fedpriv.Population:
    x, y = np.asarray(x), np.asarray(y)
    return fedpriv.Population.from_arrays(
        x[:100], y[:100], IDS, held_out=(x[100:], y[100:]), **given
    )


def simulated(
    out: Path,
    of: fedpriv.Population,
    model: nn.Module | None = None,
    loss: object = "cross-entropy",
    local: fedpriv.SGD | None = None,
    **fields: object,
) -> fedpriv.Run:
    torch.manual_seed(0)
    task = fedpriv.Task(model or nn.Linear(3, 3), loss, **fields)
    local = local or fedpriv.SGD(0.5, epochs=1)
    return fedpriv.simulate(of, task, MECHANISM, local=local, out=out, quiet=True)


@pytest.mark.parametrize("given", [True, False])
def test_figures_call_classes_by_their_public_names(tmp_path: Path, *, given: bool) -> None:
    """By those of held-out rows where no list is given: a name that users alone have is none."""
    y = np.where(np.arange(120) < 100, Y, Y.clip(max=1))
    classes = {"classes": [*NAMES]} if given else {}
    of = people(y=NAMES[y], **classes)
    assert of.public_classes == (("ill", "so", "well") if given else ("ill", "so", "", ""))
    run = simulated(tmp_path, of, by="y", figures={"pairs": "confusion"})
    with torch.no_grad():
        chosen = run.model(torch.tensor(X[100:])).argmax(1).numpy()
    names = ["ill", "so", "well" if given else "class 2"]
    matrix = confusion_matrix(y[100:], chosen, labels=range(3))
    for true in range(3):
        for taken in range(3):
            found = run.figures[f"pairs: {names[true]} as {names[taken]}"]
            assert found == matrix[true, taken]
    for number in (0, 1):
        own = y[100:] == number
        right = accuracy_score(y[100:][own], chosen[own])
        assert run.figures[f"accuracy by y: {names[number]}"] == pytest.approx(right)
    assert RunFolder(tmp_path).results()[-1].figures == run.figures
    page = run.report().read_text(encoding="utf-8")
    assert "accuracy by y" in page
    assert "ill" in page


def test_a_configuration_names_the_classes_of_held_out_rows(tmp_path: Path) -> None:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    text = f"""
        name = "named"
        rounds = 1
        data = "digits"
        model = "softmax"
        privacy = {{ epsilon = 8.0, delta = 1e-3 }}
        evaluation = {{ by = ["y"], classes = {words} }}
    """
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    printed("simulate", "a.toml", "--out", tmp_path / "run", cwd=tmp_path)
    figures = RunFolder(tmp_path / "run").results()[-1].figures
    assert {f"accuracy by y: {word}" for word in words} <= figures.keys()


def test_two_lists_of_classes_are_refused() -> None:
    from fedpriv.experiment.build import on_population
    from fedpriv.experiment.config import parse_config

    table = {
        "name": "two",
        "rounds": 1,
        "data": "digits",
        "model": {"name": "softmax", "options": {"inputs": 3, "classes": 3}},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "evaluation": {"classes": ["a", "b", "c"]},
    }
    with pytest.raises(InvalidValueError, match=r"evaluation\.classes is \['a', 'b', 'c'\].*'ill'"):
        on_population(parse_config(table, "two"), "run", people(y=NAMES[Y], classes=[*NAMES]))


def test_broken_users_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    labels = NAMES[Y].astype(object)
    labels[[5, 40]] = "odd", None
    of = people(y=labels, classes=[*NAMES])
    assert [*of.users.broken] == [10, 1] or [*of.users.broken] == [1, 10]
    assert of.users.sizes[[1, 10]].tolist() == [0, 0]
    with pytest.raises(DataError, match=r"'y' has .* of user '\d+'; 2 of 25 users"):
        simulated(tmp_path / "run", of)
    assert not (tmp_path / "run").exists()


def test_numbers_beyond_the_classes_are_none_of_them() -> None:
    with pytest.raises(
        DataError, match=r"held-out|'y' has no label, or one that is none of .*'so'\]"
    ):
        people(classes=["ill", "so"])
    y = np.where(np.arange(120) < 100, Y, 0)
    own = {*IDS[Y[:100] == 2].tolist()}
    assert {*people(y=y, classes=["ill", "so"]).users.broken} == own
    ignored = people(y=np.where(Y == 2, -100, Y), classes=["ill", "so"])
    assert not ignored.users.broken


def test_bytes_are_text() -> None:
    assert people(y=NAMES.astype("S")[Y]).classes == ("ill", "so", "well")


def test_a_folder_that_no_system_can_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"File name too long: .*zzz"):
        simulated(tmp_path / ("z" * 300), people())


class Words(nn.Module):
    """Scores of the next of `count` words at each position, with the scores last or first."""

    def __init__(self, count: int, *, first: bool) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(count, count), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x).movedim(-1, 1) if self.first else self.words(x)


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")


@pytest.mark.parametrize("count", [5, 7])
def test_scores_after_the_positions_are_refused_or_leave_accuracy_out(
    tmp_path: Path, count: int
) -> None:
    """With as many words as positions, shapes alone do not tell which axis is which."""
    words = RNG.integers(0, count, (120, 5))
    for loss in ("cross-entropy", own_loss):
        if loss == "cross-entropy" or count == 5:
            with pytest.raises(ModelError, match=r"axis 1.*outputs\.movedim\(-1, 1\)"):
                simulated(tmp_path / "no", people(words, words), Words(count, first=False), loss)
    run = simulated(tmp_path / "first", people(words, words), Words(count, first=True))
    with torch.no_grad():
        chosen = run.model(torch.tensor(words[100:])).argmax(1)
    assert run.accuracy == pytest.approx(float((chosen.numpy() == words[100:]).mean()))
    if count == 7:
        last = simulated(tmp_path / "last", people(words, words), Words(7, first=False), own_loss)
        assert last.accuracy is None
        task = {"figures": {"top": {"figure": "top-k", "k": 2}}, "loss": own_loss}
        with pytest.raises(ModelError, match=r"'top'.*axis 1"):
            simulated(tmp_path / "top", people(words, words), Words(7, first=False), **task)


@pytest.mark.parametrize(
    ("shape", "cure"),
    [((6, 6, 3), r"np\.moveaxis\(x, -1, 1\)\.astype\('f4'\) / 255"), ((6, 6), "x.:, None.")],
)
def test_images_of_another_layout_name_the_cure(tmp_path: Path, shape, cure) -> None:
    images = RNG.integers(0, 256, (120, *shape), dtype=np.uint8)
    channels = shape[2] if len(shape) == 3 else 1
    model = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    with pytest.raises(ModelError, match=f"channels first, so give {cure}"):
        simulated(tmp_path / "run", people(images), model)


@pytest.mark.parametrize("kind", ["u1", "i2", "u2", "f4"])
def test_words_of_any_type_are_read_as_the_model_takes_them(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(10, 3))
    words = RNG.integers(0, 9, (120, 5))
    one, other = (
        simulated(tmp_path / dtype, people(words.astype(dtype)), model).task.model
        for dtype in (kind, "i8")
    )
    assert one is model
    assert other is model
    with pytest.raises(ModelError, match="integers from 9 to 9, and an embedding"):
        simulated(tmp_path / "beyond", people(np.full((120, 5), 9, kind)), model)


def test_a_loss_that_compares_all_pairs_is_refused(tmp_path: Path) -> None:
    of, flat = people(y=X[:, 0]), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    with pytest.raises(ModelError, match=r"outputs \[4, 1\] with all targets \[4\].*use .* mse"):
        simulated(tmp_path / "no", of, nn.Linear(3, 1), lambda outputs, y: (outputs - y).abs())
    own, named = (
        simulated(tmp_path / name, of, model, loss).loss
        for name, model, loss in (
            ("own", flat, nn.MSELoss(reduction="none")),
            ("named", nn.Linear(3, 1), "mse"),
        )
    )
    assert own is not None
    assert named is not None


NOTED = {
    "copies": (lambda: fedpriv.Population.from_arrays(X, Y, np.arange(120), held_out=(X, Y)), {}),
    "all 20 held-out targets are 1": (lambda: people(y=np.where(np.arange(120) < 100, Y, 1)), {}),
    "inputs are as large as": (lambda: people(1000 * X), {}),
    "targets are as large as": (
        lambda: people(y=1e4 * X[:, 0]),
        {"model": nn.Linear(3, 1), "loss": "mse"},
    ),
    "losses of classes are negative": (people, {"loss": nn.NLLLoss(reduction="none")}),
    "and the clipping norm is 1": (people, {"local": fedpriv.SGD(1e-5, epochs=1)}),
}


@pytest.mark.parametrize("cause", NOTED)
def test_what_trains_badly_or_flatters_is_noted(tmp_path: Path, cause: str) -> None:
    of, given = NOTED[cause]
    words = "120 held-out rows are also rows of users" if cause == "copies" else cause
    notes = simulated(tmp_path / "noted", of(), **given).warnings
    assert any(words in note for note in notes)
    plain = simulated(tmp_path / "plain", people()).warnings
    assert not any(other in note for other in (words, "also rows") for note in plain)


def test_held_out_rows_that_few_values_make_alike_are_no_copies() -> None:
    rows = RNG.integers(0, 2, (120, 3))
    assert people(rows).copies == 0
    assert people().copies == 0


def test_a_learning_rate_that_moves_nothing_is_noted(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", people(), local=fedpriv.SGD(1e-12, epochs=1))
    assert any("noise hides them: raise learning_rate" in note for note in run.warnings)


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        model = nn.utils.weight_norm(nn.Linear(3, 3))
    with pytest.raises(ModelError, match="cannot be copied"):
        simulated(tmp_path / "run", people(), model)


def test_held_out_numbers_that_are_not_finite_are_named() -> None:
    x = X.copy()
    x[117, 1] = np.inf
    with pytest.raises(DataError, match=r"held-out field 'x' .*in row 17; 1 of 20 rows"):
        people(x)


def test_a_loss_that_changes_targets_in_place_leaves_the_accuracy_true(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(outputs, y.zero_(), reduction="none")
        outputs.data.zero_()[:, 0] = 1.0
        return losses

    run = simulated(tmp_path / "run", people(), loss=loss)
    with torch.no_grad():
        chosen = run.model(torch.tensor(X[100:])).argmax(1).numpy()
    assert run.accuracy == pytest.approx(float((chosen == Y[100:]).mean()))
    assert run.accuracy < 1.0


def test_a_loss_that_returns_nothing_is_not_blamed_on_images(tmp_path: Path) -> None:
    images = RNG.standard_normal((120, 1, 6, 6)).astype(np.float32)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with pytest.raises(ModelError, match="NoneType") as error:
        simulated(tmp_path / "run", people(images), model, loss=lambda *_: None)
    assert "channels first" not in str(error.value)


def test_a_metric_that_is_not_finite_is_named(tmp_path: Path) -> None:
    task = fedpriv.Task(nn.Linear(3, 3), metrics={"logs": lambda outputs, _: outputs[:, 0].log()})
    mechanism = fedpriv.Mechanism.poisson(
        q=0.5, clipping=fedpriv.Flat(1.0), metrics={"logs": {"radius": 1.0}}
    ).calibrate(epsilon=50.0, delta=1e-3, rounds=2)
    with pytest.raises(DataError, match="as its metric 'logs' is not finite"):
        fedpriv.simulate(
            people(), task, mechanism, local=fedpriv.SGD(0.5, epochs=1), out=tmp_path, quiet=True
        )
