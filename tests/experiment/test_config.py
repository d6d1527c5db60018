"""One clear sentence for each way in which a configuration can be wrong."""

import tomllib
from pathlib import Path

import pytest
import tomli_w

from fedpriv import SGD, FedAdam, FedAvg, FedAvgM, Flat, Joint, Poisson
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import Config, DataSection, load_config, parse_config, read_toml

ROOT = Path(__file__).parents[2]
GOOD = {
    "name": "test",
    "rounds": 10,
    "data": {"name": "digits"},
    "model": {"name": "softmax"},
    "local": {"learning_rate": 0.5, "epochs": 1},
    "privacy": {"sampling_probability": 0.3, "epsilon": 2.0, "delta": 1e-3},
    "clipping": {"norm": 0.5},
}


def changed(**assignments: object) -> dict[str, object]:
    """GOOD with keys such as privacy__delta replaced, or removed when None."""
    table: dict[str, object] = {k: dict(v) if isinstance(v, dict) else v for k, v in GOOD.items()}
    for path, value in assignments.items():
        *sections, key = path.split("__")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        if value is None:
            del inner[key]
        else:
            inner[key] = value
    return table


def test_a_good_table_is_read_with_defaults() -> None:
    config = parse_config(GOOD, "test")
    assert config.server.optimizer == "fedavg"
    assert config.clipping.strategy == "flat"
    assert config.local.batch_size == "all"
    assert config.seed is None


BARE = {
    "name": "bare",
    "data": "digits",
    "model": {"name": "softmax"},
    "privacy": {"epsilon": 2.0, "delta": 1e-3},
}


def test_data_model_epsilon_and_delta_are_an_experiment() -> None:
    config = parse_config(BARE, "test")
    assert config.rounds == 100
    assert config.training() == SGD(0.3, batch_size=32, epochs=1)
    assert config.mechanism().clipping == Flat()  # the norm depends on the number of users
    assert config.mechanism().sampling == Poisson(0.3)
    assert config.server.build() == FedAdam(0.03)
    # What is written down after a run says it all.
    assert parse_config(config.model_dump(exclude_none=True), "plan") == config


def test_the_optimiser_belongs_to_the_norm() -> None:
    with_norm = parse_config({**BARE, "clipping": {"norm": 0.5}}, "test")
    assert with_norm.server.build() == FedAvg()
    rest = {"name": "rest", "tensors": ["*"], "norm": 0.5}
    with_groups = parse_config({**BARE, "clipping": {"groups": [rest]}}, "test")
    assert with_groups.server.build() == FedAvg()
    assert with_groups.clipping.norm is None
    named = parse_config({**BARE, "server": {"optimizer": "fedavgm"}}, "test")
    assert (named.clipping.norm, named.server.build()) == (None, FedAvgM())
    slower = parse_config({**BARE, "server": {"options": {"learning_rate": 0.01}}}, "test")
    assert slower.server.build() == FedAdam(0.01)
    joint = parse_config({**BARE, "clipping": {"strategy": "joint"}}, "test")
    assert joint.mechanism().clipping == Joint()


def test_what_is_given_of_local_training_stays() -> None:
    with pytest.raises(InvalidValueError, match=r"key local\.learning_rate is absent"):
        parse_config({**BARE, "local": {"algorithm": "adamw"}}, "test")
    steps = parse_config({**BARE, "local": {"steps": 3}}, "test")
    assert steps.training() == SGD(0.3, steps=3)
    examples = parse_config({**BARE, "privacy": {**BARE["privacy"], "unit": "example"}}, "test")
    assert examples.local is None


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ({"nmae": "x"}, "unknown key nmae"),
        ({"privacy__detla": 0.1}, "unknown key privacy.detla"),
        ({"privacy__delta": None}, "key privacy.delta is absent"),
        ({"privacy__epsilon": None}, "epsilon is absent"),
        ({"privacy__sampling_probability": 0.0}, "privacy.sampling_probability is 0.0"),
        ({"privacy__sampling_probability": 1.1}, "less than or equal to 1"),
        ({"privacy__delta": 1.0}, "privacy.delta is 1.0"),
        ({"privacy__epsilon": -1.0}, "privacy.epsilon is -1.0"),
        ({"privacy__noise_multiplier": 0.0}, "unsafe_no_privacy = true"),
        ({"privacy__noise_multiplier": -0.5}, "privacy.noise_multiplier is -0.5"),
        ({"privacy__unsafe_no_privacy": True}, "noise_multiplier must then be given"),
        ({"clipping__norm": 0.0}, "clipping.norm is 0.0"),
        ({"clipping__norm": float("nan")}, "clipping.norm is nan"),
        ({"clipping__norm": "wide"}, "clipping.norm is 'wide'"),
        ({"local__batch_size": "some"}, "is 'some'"),
        ({"run": "a b"}, "run is 'a b'"),
        ({"local__batch_size": 0}, "local.batch_size is 0"),
        ({"metrics": {"share": 2.0}}, "metrics.share is 2.0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": "ten"}, "rounds is 'ten'"),
        ({"data": 3}, "data is 3"),
        ({"model__name": 3}, "model.name is 3"),
        ({"model__trained": 3}, "model.trained is 3"),
        ({"local__learning_rate": []}, "local.learning_rate is \\[\\]"),
        ({"output__simulation_only": 3}, "simulation_only is 3"),
        ({"engine__activations": 3}, "engine.activations is 3"),
        ({"rounds": 1.5}, "rounds is 1.5"),
        ({"name": "a b"}, "name is 'a b'"),
        ({"run": ".."}, "run is '..'; use letters"),  # which would be the working folder
        ({"model__seed": 2**64}, "model.seed is 18446744073709551616"),
        ({"local__options": {"epochs": 7}}, "local: options has 'epochs'"),
        ({"privacy__ledger": ""}, "privacy.ledger: '' is not a path"),
        ({"privacy__ledger": "a\0b"}, r"privacy.ledger: 'a\\x00b' is not a path"),
        ({"engine__activations": "half"}, "engine.activations is 'half'.*'float32', 'tf32' or 'bf"),
    ],
)
def test_each_mistake_is_one_sentence(assignments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as caught:
        parse_config(changed(**assignments), "test.toml")
    assert str(caught.value).startswith("test.toml: ")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_unknown_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidValueError, match=r"clipping.strategy 'layer' is.*'per-layer'"):
        parse_config(changed(clipping__strategy="layer"), "test.toml").mechanism()
    with pytest.raises(InvalidValueError, match=r"server.optimizer 'adam' is.*'fedadam'"):
        parse_config(changed(server__optimizer="adam"), "test.toml").server.build()


def test_overrides_replace_and_add_keys(tmp_path: Path) -> None:
    path = tmp_path / "test.toml"
    path.write_text(tomli_w.dumps(GOOD))
    config = load_config(
        path,
        [
            "clipping.strategy=joint",
            "clipping.norm = 0.25",
            "data.options.users=100",
            "seed=3",
            'server.options={"learning_rate" = 0.5}',
        ],
    )
    assert config.clipping.strategy == "joint"
    assert config.clipping.norm == 0.25
    assert config.data.options == {"users": 100}
    assert config.seed == 3
    assert config.server.options == {"learning_rate": 0.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("clipping.norm", "not of the form"),
        ("=1", "not of the form"),
        ("rounds.x=1", "rounds is not a table"),
        ("clipping.nrom=1", "did you mean 'norm'"),
        ("rounds=3\nname='other'", 'rounds is "3.*it must be a whole number'),
        (f"rounds={'[' * 5000}", "rounds is .*it must be a whole number"),
    ],
)
def test_bad_overrides_are_refused(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "test.toml"
    path.write_text(tomli_w.dumps(GOOD))
    with pytest.raises(InvalidValueError, match=message):
        load_config(path, [override])


def test_overrides_may_name_what_they_give_options_to(tmp_path: Path) -> None:
    path = tmp_path / "test.toml"
    path.write_text(tomli_w.dumps(GOOD))
    config = load_config(path, ["data=synthetic", "data.options.users=3"])
    assert config.data == DataSection(name="synthetic", options={"users": 3})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"absent\.toml cannot be read: No such file"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(InvalidValueError, match=r"broken\.toml is not valid TOML"):
        load_config(broken)
    broken.write_text("model = 'mlp'\n[model.options]\n")
    with pytest.raises(InvalidValueError, match=r"\[model\] has name = … instead of model = …"):
        load_config(broken)
    broken.write_text(f"name = {'[' * 5000}{']' * 5000}")
    with pytest.raises(InvalidValueError, match=r"broken\.toml is nested too deeply"):
        load_config(broken)
    broken.write_text(f"rounds = {'9' * 5000}")  # more digits than Python reads
    with pytest.raises(InvalidValueError, match=r"broken\.toml is not valid TOML: Exceeds"):
        load_config(broken)


# A file with seeds is a study.
EXPERIMENTS = [
    path
    for folder in ("simulations", "fedpriv/experiment/bundled")
    for path in sorted((ROOT / folder).glob("*.toml"))
    if "seeds" not in tomllib.loads(path.read_text())
]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=[path.name for path in EXPERIMENTS])
def test_committed_experiments_are_valid_and_survive_writing(path: Path) -> None:
    config = load_config(path)
    table = config.model_dump(exclude_none=True)
    assert parse_config(table, "again") == config
    assert isinstance(config, Config)


def test_paths_in_a_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = {"enrolment": "e.toml", "certificates": "/etc/certs", "held_out": "../h.npz"}
    files = {"train": "a.csv", "test": "b/c.csv"}
    folder, other = tmp_path / "here", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    table = changed(data__name="hugging-face", data__options=files, privacy__ledger="l.sqlite")
    (folder / "a.toml").write_text(tomli_w.dumps(table | {"federation": federation}))
    monkeypatch.chdir(other)
    config = load_config(Path("../here/a.toml"), ["federation.held_out=mine.npz"])
    assert config.privacy.ledger == str(folder / "l.sqlite")
    assert config.federation is not None
    assert config.federation.enrolment == str(folder / "e.toml")
    assert config.federation.certificates == "/etc/certs"
    assert config.federation.held_out == "mine.npz"  # typed where the command is
    options = {"train": str(folder / "a.csv"), "test": str(folder / "b/c.csv")}
    assert config.data.options == options


def test_options_of_data_of_ones_own_are_left_alone(tmp_path: Path) -> None:
    data = {"name": "mine:people", "options": {"folder": "x", "train": "y"}}
    (tmp_path / "a.toml").write_text(tomli_w.dumps(changed(data=data)))
    config = load_config(tmp_path / "a.toml")
    assert config.data.options == data["options"]


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "marked.toml"
    file.write_bytes(b"\xef\xbb\xbfrounds = 3\n")
    assert read_toml(file) == {"rounds": 3}
