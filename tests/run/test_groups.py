"""Figures of groups of held-out rows, by fields of them: `Task.by` and `evaluation.by`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import nn

import fedpriv
from fedpriv.errors import InvalidValueError
from fedpriv.run.folder import RunFolder
from tests.commandline import printed, refused

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 3)).astype(np.float32)
Y = (X[:, 0] + RNG.normal(0.0, 0.7, 300) > 0.0).astype(np.int64)
SITE = RNG.choice(["Bern", "Lyon", "Oslo"], 300)
OWNERS = np.array([f"guest {n}" for n in np.arange(100) // 10])
MECHANISM = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0)).calibrate(
    epsilon=8.0, delta=1e-3, rounds=2
)


def people() -> fedpriv.Population:
    held_out = {"x": X[200:], "site": SITE[200:], "age": np.arange(100), "two": X[200:]}
    ids = np.arange(200) // 4
    return fedpriv.Population.from_arrays(X[:200], Y[:200], ids, held_out=(held_out, Y[200:]))


def simulated(out: Path, users: fedpriv.Population, **fields: object) -> fedpriv.Run:
    torch.manual_seed(0)
    task = fedpriv.Task(nn.Linear(3, 2), figures={"area": "auc"}, **fields)
    local = fedpriv.SGD(1.0, epochs=1)
    return fedpriv.simulate(users, task, MECHANISM, local=local, out=out, quiet=True)


@pytest.mark.parametrize("owners", [None, OWNERS])
def test_figures_of_groups_are_those_of_their_rows(tmp_path: Path, owners) -> None:
    test = people().test if owners is None else people().test | {"held_out_user": owners}
    run = simulated(tmp_path, fedpriv.Population("p", people().users, test), by=("site", "y"))
    with torch.no_grad():
        scores = run.model(torch.tensor(X[200:])).double().softmax(1).numpy()
    for field, groups in (("site", SITE[200:]), ("y", Y[200:])):
        expected = dict[str, list[float]]()
        for group in np.unique(groups):
            y, chosen = Y[200:][groups == group], scores[groups == group]
            right = accuracy_score(y, chosen.argmax(1))
            loss = log_loss(y, chosen, labels=[0, 1])
            areas = [roc_auc_score(y, chosen[:, 1])] if field == "site" else []
            for name, value in zip(
                ("accuracy", "loss", "area"), [right, loss, *areas], strict=False
            ):
                assert run.figures[f"{name} by {field}: {group}"] == pytest.approx(value, abs=1e-5)
                expected.setdefault(name, []).append(value)
        for name, values in expected.items():
            gap = run.figures[f"{name} by {field}: gap"]
            assert gap == pytest.approx(max(values) - min(values), abs=1e-5)
    assert "area by y: 0" not in run.figures  # one class has no area
    last = RunFolder(tmp_path).results()[-1]
    assert last.figures == run.figures
    assert ("accuracy" in last.held_out_users) == (owners is not None)
    page = run.report().read_text(encoding="utf-8")
    assert page.count("accuracy by site") > 0


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("sit", "by 'sit'.*'site'"),
        ("age", "by 'age', which has 100 values"),
        ("two", r"by 'two', which has arrays \[3\] in the"),
    ],
)
def test_fields_that_make_no_groups_are_refused_before_anything_is_spent(
    tmp_path: Path, by: str, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        simulated(tmp_path / "run", people(), by=by)
    assert not (tmp_path / "run").exists()


def test_a_figure_may_be_several_numbers(tmp_path: Path) -> None:
    def shares(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"ones": float(targets.double().mean()), "chosen": float(outputs.argmax(1).sum())}

    torch.manual_seed(0)
    task = fedpriv.Task(nn.Linear(3, 2), figures={"of class 1": shares})
    local = fedpriv.SGD(1.0, epochs=1)
    run = fedpriv.simulate(people(), task, MECHANISM, local=local, out=tmp_path, quiet=True)
    assert run.figures["of class 1: ones"] == Y[200:].mean()
    chosen = run.model(torch.tensor(X[200:])).argmax(1).sum()
    assert run.figures["of class 1: chosen"] == chosen


def test_a_file_and_a_study_say_by_what(tmp_path: Path) -> None:
    experiment = """
        name = "small"
        rounds = 2
        data = "digits"
        model = "softmax"
        privacy = { epsilon = 8.0, delta = 1e-3 }
        evaluation = { by = ["y"] }
    """
    (tmp_path / "a.toml").write_text(experiment, encoding="utf-8")
    study = """
        name = "two"
        base = "a.toml"
        seeds = 2
        target = { epsilon = 8.0, delta = 1e-3 }
        arms = [{ name = "a" }, { name = "b", set = ["clipping.norm=0.3"] }]
    """
    (tmp_path / "s.toml").write_text(study, encoding="utf-8")
    shown = printed("compare", "s.toml", "--out", tmp_path / "s", cwd=tmp_path)
    assert "accuracy by y: 9" in shown
    assert "accuracy by y: gap" in shown
    said = refused("simulate", "a.toml", "--set", 'evaluation.by=["z"]', cwd=tmp_path)
    assert "by 'z'" in said


@pytest.mark.parametrize("apart", [False, True])
def test_a_frame_has_columns_that_group_its_held_out_rows(tmp_path: Path, apart) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    frame = frame.assign(y=Y, site=SITE, who=np.arange(300) // 4)
    rows = {"held_out": 0.3}
    if apart:
        rows = {"held_out": frame[200:].drop(columns="who")}
        frame = frame[:200]
    users = fedpriv.Population.from_frame(frame, y="y", user="who", by=["site"], **rows)
    assert users.users.fields["x"].shape[1] == 3
    figures = simulated(tmp_path, users, by="site").figures
    assert {f"accuracy by site: {name}" for name in ("Bern", "Lyon", "Oslo")} <= figures.keys()
