"""Files of studies: what they make, and what they may not say."""

import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from fedpriv.errors import InvalidValueError
from fedpriv.studies.study import load_study, study_toml
from tests.studies.studying import BASE, study_file

ROOT = Path(__file__).parents[2]


def test_axes_cross_and_their_values_become_assignments(tmp_path: Path) -> None:
    axes = {
        "clipping.norm": [0.25, 1],
        "server.optimizer": ["fedavgm"],
        "clipping": {"flat": [], "joint": ["clipping.strategy=joint"]},
    }
    study = load_study(study_file(tmp_path, axes=axes))
    assert [arm.name for arm in study.arms] == [
        "norm-0.25_optimizer-fedavgm_flat",
        "norm-0.25_optimizer-fedavgm_joint",
        "norm-1_optimizer-fedavgm_flat",
        "norm-1_optimizer-fedavgm_joint",
    ]
    config = study.config_of(study.cells[-1])
    assert (config.clipping.strategy, config.clipping.norm) == ("joint", 1)
    assert config.server.optimizer == "fedavgm"
    assert study.baseline == study.arms[0].name


def test_a_misspelt_key_is_told_from_axes(tmp_path: Path) -> None:
    file = study_file(tmp_path, axis={"clipping.norm": [1.0]})
    with pytest.raises(InvalidValueError, match="unknown key axis"):
        load_study(file)


def test_the_base_is_a_file_beside_the_study(tmp_path: Path) -> None:
    study_file(tmp_path)
    base = tmp_path / "study.toml"
    own = load_study(base)
    (tmp_path / "study.toml").rename(tmp_path / "inline.toml")
    (tmp_path / "base.toml").write_text(tomli_w.dumps(BASE))
    assert load_study(study_file(tmp_path, base="base.toml")) == own


def test_what_is_written_out_is_read_as_the_same_study(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, target={"epsilon": [1, 8.0], "delta": 1e-2}))
    (tmp_path / "again.toml").write_text(study_toml(study, tmp_path))
    assert load_study(tmp_path / "again.toml") == study


def test_data_are_found_from_a_studys_file_and_a_study_may_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"name": "hugging-face", "options": {"train": "data/mnist"}}
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "base.toml").write_text(tomli_w.dumps(BASE | {"data": data}))
    study = load_study(study_file(here, base="base.toml"))
    folder = here / "out" / "deep"
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(study_toml(study, folder))
    assert str(tmp_path) not in (folder / "study.toml").read_text()
    monkeypatch.chdir(folder)
    assert load_study(folder / "study.toml") == study
    config = study.config_of(study.cells[0])
    assert config.data.options == {"train": str(here / "data" / "mnist")}
    here.rename(there)
    moved = load_study(there / "out" / "deep" / "study.toml")
    assert moved.config_of(moved.cells[0]).data.options == {"train": str(there / "data" / "mnist")}
    for before, after in zip(study.cells, moved.cells, strict=True):
        assert moved.digest_of(after, there / "out") == study.digest_of(before, here / "out")
        assert moved.digest_of(after, there / "out") != study.digest_of(before, there / "out")


def test_a_path_in_an_arm_is_absolute(tmp_path: Path) -> None:
    data = {"name": "hugging-face", "options": {"train": "data"}}
    arms = [{"name": "a"}, {"name": "b", "set": ["data.options.train=other"]}]
    with pytest.raises(InvalidValueError, match="arm 'b' has the path 'other'"):
        load_study(study_file(tmp_path, base=BASE | {"data": data}, arms=arms, axes=None))


def test_arms_differ_in_what_they_set_and_in_nothing_else(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    flat, joint = (study.config_of(cell) for cell in study.cells if cell.seed == 1)
    assert (flat.run, joint.run) == (f"{flat.name}-seed1", f"{joint.name}-seed1")
    assert flat.seed == joint.seed == flat.model.seed == 1
    assert (flat.privacy.epsilon, flat.privacy.delta) == (8.0, 1e-2)
    assert joint.clipping.strategy == "joint"
    same = {"name", "run", "clipping"}
    assert flat.model_dump(exclude=same) == joint.model_dump(exclude=same)


def test_the_noise_of_the_base_is_replaced(tmp_path: Path) -> None:
    privacy = {"sampling_probability": 0.5, "epsilon": 1.0, "delta": 0.1, "noise_multiplier": 3.0}
    study = load_study(study_file(tmp_path, base=BASE | {"privacy": privacy}))
    assert study.config_of(study.cells[0]).privacy.noise_multiplier is None


def test_the_example_of_the_guide_is_a_study(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "studies.md").read_text()
    example, arms = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "axes.toml").write_text(example)
    assert len(load_study(tmp_path / "axes.toml").arms) == 6
    before, _, _ = re.sub("baseline.*", "", example).partition("[axes]")
    (tmp_path / "arms.toml").write_text(before + arms)
    (arm,) = load_study(tmp_path / "arms.toml").arms
    assert arm.set == ("server.options={learning_rate=0.5}", "rounds=200")


STUDIES = [
    path
    for path in sorted((ROOT / "simulations").glob("*.toml"))
    if "seeds" in tomllib.loads(path.read_text())
]


@pytest.mark.parametrize("path", STUDIES, ids=[path.name for path in STUDIES])
def test_committed_studies_are_valid(path: Path) -> None:
    assert len(load_study(path).arms) > 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axes": None}, "exactly one of arms and axes"),
        ({"arms": [{"name": "a"}]}, "exactly one of arms and axes"),
        ({"axes": {"clipping": {}}}, "'clipping' has no level"),
        ({"axes": {"clipping.norm": []}}, "'clipping.norm' has no level"),
        ({"axes": {"clipping.norm": [0.1, 0.1]}}, "'norm-0.1' more than once"),
        ({"axes": {"model.name": ["mine:net"]}}, "name is 'name-mine:net'; use letters"),
        ({"axes": {"q": {"a/b": []}}}, "a level of axis 'q': name is 'a/b'"),
        ({"axes": {"q": {"a": [1]}}}, "a level of axis 'q': set.0 is 1; it must be text"),
        (
            {"axes": {"clipping.norm": [[1]]}},
            "a level of axis 'clipping.norm': name is 'norm-[1]'; use letters",
        ),
        ({"axes": {"q": 3}}, "axis 'q' is 3"),
        ({"axes": {"a": {"x": [], "y": ["rounds=2"]}}}, "arms 'x' and 'y' are alike"),
        ({"arms": [{"name": "a"}, {"name": "a"}], "axes": None}, "arms hold 'a' more than once"),
        ({"seeds": [1, 2, 1]}, "seeds hold 1 more than once"),
        ({"seeds": []}, "seeds are none"),
        (
            {"target": {"epsilon": [8.0, 8.0000001], "delta": 1e-2}},
            "target.epsilon hold 8.0 more than once",
        ),
        ({"seeds": 0}, "seeds"),
        ({"target": {"epsilon": [1.0, 1.0], "delta": 0.1}}, "target.epsilon hold 1.0 more than"),
        ({"target": {"epsilon": -1.0, "delta": 0.1}}, "target.epsilon is -1.0"),
        ({"target": None}, "key target is absent"),
        ({"baseline": "flatt"}, "baseline is 'flatt', which is not an arm"),
        ({"baselin": "flat"}, "unknown key baselin"),
        ({"base": "nowhere.toml"}, "nowhere.toml cannot be read"),
        ({"axes": {"privacy.epsilon": [2.0]}}, "sets privacy.epsilon; the study's target"),
        ({"axes": {"p": {"x": ["privacy={delta=0.5}"]}}}, "sets privacy.epsilon"),
        ({"axes": {"privacy.ledger": ["x"]}}, "every run of a study has its own"),
        ({"axes": {"privacy.unsafe_no_privacy": [True]}}, "a study compares at equal privacy"),
        ({"axes": {"audit.canaries": [60]}}, "has an audit; a study would not report its result"),
        ({"axes": {"seed": [4]}}, "sets seed; the study's seeds"),
        ({"axes": {"model.seed": [4]}}, "sets model.seed; the study's seeds"),
        ({"axes": {"clipping.nrom": [1.0]}}, "arm 'nrom-1.0': unknown key clipping.nrom"),
        ({"axes": {"a": {"x": ["rounds"]}}}, "--set 'rounds' is not of the form"),
        ({"accuracies": [2.0]}, "accuracies.0 is 2.0"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidValueError) as error:
        load_study(study_file(tmp_path, **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
