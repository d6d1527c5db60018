"""Trackers are told of a run from its start to its end, of what is released, and cannot stop it."""

import json
import logging
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedpriv as library
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import parse_config
from fedpriv.experiment.trackers import EndedRun, StartedRun, Tracker, shown_settings
from fedpriv.run.folder import RunFolder
from fedpriv.run.simulate import run_simulation
from fedpriv.training.rounds import RoundResult, Stop
from tests.commandline import fedpriv, printed, refused
from tests.run.test_callbacks import experiment, rows
from tests.studies.studying import BASE

NOTEBOOK = """
import dataclasses, json
from fedpriv import Tracker

def write(what, value):
    with open("told.jsonl", "a") as file:
        file.write(json.dumps([what, dataclasses.asdict(value)], default=str) + "\\n")

class Notebook(Tracker):
    def on_start(self, run):
        write("start", run)

    def on_round(self, result):
        write("round", result)

    def on_end(self, run):
        write("end", run)

def stop(released):
    if released.round == 2:
        raise KeyboardInterrupt
"""


def told(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    return [tuple(json.loads(line)) for line in (folder / "told.jsonl").read_text().splitlines()]


def test_an_own_tracker_is_told_of_start_rounds_and_end_and_again_on_resuming(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(NOTEBOOK)
    path = experiment(tmp_path, trackers=["mine:Notebook", "mine:stop"], seed=3)
    assert fedpriv("simulate", path, "--out", "run", cwd=tmp_path).returncode == 130
    ((_, start), *_, (_, end)) = said = told(tmp_path)
    assert [what for what, _ in said] == ["start", "round", "round", "end"]
    assert (start["name"], start["group"], start["released"]) == ("tiny-seed3", "tiny", 0)
    assert start["settings"]["privacy.epsilon"] == 1.0
    assert start["settings"]["privacy.noise_multiplier"] > 0.0
    assert start["settings"]["parameters"] == 4 * 3 + 3
    assert end["stop"] is None
    (tmp_path / "told.jsonl").unlink()
    again = ("--resume", "--set", 'trackers=["mine:Notebook"]')
    printed("simulate", path, "--out", "run", *again, cwd=tmp_path)
    ((_, resumed), *_, (_, end)) = said = told(tmp_path)
    assert [what for what, _ in said] == ["start", "round", "end"]
    assert (resumed["key"], resumed["released"]) == (start["key"], 2)
    assert said[1][1] == rows(tmp_path / "run")[-1] | {"simulation_only_seconds": None}
    assert end == {"stop": str(Stop.ROUNDS), "last": said[1][1]}
    # Another run of the same name is another run.
    printed("simulate", path, "--out", "other", "--set", 'trackers=["mine:Notebook"]', cwd=tmp_path)
    assert told(tmp_path)[3][1]["key"] != start["key"]


class Breaking(Tracker):
    """Raises in one of its methods, and notes what it is told."""

    def __init__(self, where: str) -> None:
        self.where, self.told = where, list[str]()

    def _note(self, what: str) -> None:
        self.told.append(what)
        if what == self.where:
            raise ConnectionError("no\nnetwork")

    def on_start(self, _: StartedRun) -> None:
        self._note("at the start")

    def on_round(self, result: RoundResult) -> None:
        self._note(f"in round {result.round}")

    def on_end(self, _: EndedRun) -> None:
        self._note("at the end")


@pytest.mark.parametrize("where", ["at the start", "in round 2", "at the end", "nowhere"])
def test_a_tracker_that_fails_is_named_once_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    x, y = np.eye(4, dtype=np.float32).repeat(10, 0), np.arange(4).repeat(10)
    people = library.Population.from_arrays(x, y, np.arange(40), held_out=(x, y))
    mechanism = library.Mechanism.poisson(q=0.5, clipping=library.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-2, rounds=3)
    task, local = library.Task(torch.nn.Linear(4, 4)), library.SGD(1.0, epochs=1)
    broken, sound = Breaking(where), Breaking("")
    with caplog.at_level(logging.WARNING):
        run = library.simulate(
            people, task, mechanism, local=local, out=tmp_path / "run", quiet=True,
            trackers=(broken, sound),
        )  # fmt: skip
    assert run.stop is Stop.ROUNDS
    assert len(run.rounds) == 3
    events = ["at the start", *(f"in round {n}" for n in (1, 2, 3)), "at the end"]
    assert sound.told == events
    assert broken.told == (events if where == "nowhere" else events[: events.index(where) + 1])
    expected = (
        f"tests.experiment.test_trackers:Breaking raised ConnectionError {where}: no network; "
    )
    messages = [message.partition("0: ")[2] for message in caplog.messages]
    assert (
        messages == []
        if where == "nowhere"
        else [f"{expected}the run goes on without it, and metrics.jsonl has every round"]
    )


class Noting(Tracker):
    """Notes what it is told, and of which run."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.told, self.run = failing, dict[str, list[Any]](), ""
        self.started = list[StartedRun]()

    def on_start(self, run: StartedRun) -> None:
        self.started.append(run)
        self.run = run.name
        self.told[run.name] = []
        if run.name == self.failing:
            raise ConnectionError("no network")

    def on_round(self, result: RoundResult) -> None:
        self.told[self.run].append(result)

    def on_end(self, run: EndedRun) -> None:
        self.told[self.run].append(run.stop)


def test_a_comparison_tells_arms_and_seeds_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = np.eye(4, dtype=np.float32).repeat(10, 0), np.arange(4).repeat(10)
    people = library.Population.from_arrays(x, y, np.arange(40), held_out=(x, y))
    mechanism = library.Mechanism.poisson(q=0.5, clipping=library.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-2, rounds=2)
    arms = {"average": {}, "adam": {"server": library.FedAdam(0.1)}}
    torch.manual_seed(0)
    given = (people, library.Task(torch.nn.Linear(4, 4)), mechanism, arms)
    more = {"seeds": (3, 5), "out": tmp_path / "study", "name": "both", "quiet": True}
    sound, failing = Noting(), Noting("both-adam-seed3")
    with caplog.at_level(logging.WARNING):
        study = library.compare(*given, **more, trackers=[sound, failing, library.TensorBoard()])
    names = [f"both-{arm}-seed{seed}" for seed in (3, 5) for arm in arms]
    assert [run.name for run in sound.started] == names
    assert [run.group for run in sound.started] == ["both-average", "both-adam"] * 2
    assert len({run.key for run in sound.started}) == 4
    for run, seed in zip(sound.started, (3, 3, 5, 5), strict=True):
        *rounds, stop = sound.told[run.name]
        assert (run.released, run.settings["seed"]) == (0, seed)
        assert rounds == [
            replace(each, simulation_only_seconds=None) for each in RunFolder(run.folder).results()
        ]
        assert stop is Stop.ROUNDS
        assert EventAccumulator(str(run.folder / "tensorboard")).Reload().Tags()["scalars"]
    assert sound.started[0].settings["server.optimizer"] == "fedavg"
    assert sound.started[1].settings["server.optimizer"] == "fedadam"
    # One that fails is left alone for that run, and told of the next.
    assert failing.told == {**sound.told, "both-adam-seed3": []}
    (message,) = caplog.messages
    assert "Noting raised ConnectionError at the start" in message
    # Finished runs are not run again, so nobody is told of them.
    again = Noting()
    assert library.compare(*given, **more, resume=True, trackers=[again]).arms == study.arms
    assert again.started == []


def test_settings_say_nothing_of_machines() -> None:
    secret = {"name": "mine:people", "options": {"password": "hush", "folder": "/home/ann/x"}}
    federation = {"enrolment": "/home/ann/enrolment.toml", "address": "10.0.0.1:7"}
    privacy = BASE["privacy"] | {"ledger": "/home/ann/shared.sqlite"}
    config = parse_config(
        BASE
        | {"data": secret, "federation": federation, "privacy": privacy, "seed": 1}
        | {"tune": {"public": secret}},
        "test",
    )
    shown = shown_settings(config)
    assert shown["data.name"] == "mine:people"
    assert shown["privacy.ledger"] == "shared.sqlite"
    assert shown["clipping.norm"] == 0.5
    text = json.dumps(shown)
    assert "hush" not in text
    assert "ann" not in text
    assert "10.0.0.1" not in text
    nested = {"name": "dirichlet", "options": {"population": "mine:people", "password": "hush"}}
    assert "hush" not in json.dumps(shown_settings(parse_config(BASE | {"data": nested}, "test")))
    files = {"name": "images", "options": {"train": "/home/ann/digits", "classes": 3}}
    shown = shown_settings(parse_config(BASE | {"data": files}, "test"))
    assert (shown["data.options.train"], shown["data.options.classes"]) == ("digits", 3)


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of an offline run's one file: a header of 7 bytes, then a log as of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_weights_and_biases_gets_what_is_released_and_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    path = experiment(tmp_path, trackers=["wandb"], seed=1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "hospital")
    printed("simulate", path, "--out", "run", cwd=tmp_path)
    wandb.teardown()  # the process that it leaves in the background
    found = list(wandb_records(tmp_path / "run" / "wandb"))
    kinds = {record.WhichOneof("record_type") for record in found}
    # Neither output nor load of the machine, nor files of the program.
    assert kinds <= {
        "header", "run", "telemetry", "metric", "summary", "history", "exit", "final", "footer",
    }  # fmt: skip
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.run_group, run.project) == ("tiny-seed1", "tiny", "hospital")
    assert run.host == "fedpriv"
    settings = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert (settings["privacy.epsilon"], settings["enrolled"]) == (1.0, 40)
    sent = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    written = rows(tmp_path / "run")
    assert [row["round"] for row in sent] == [1, 2, 3]
    for row, line in zip(sent, written, strict=True):
        assert row["test/accuracy"] == pytest.approx(line["accuracy"])
        assert row["privacy/epsilon"] == pytest.approx(line["epsilon"])
        own = {"round", "_timestamp", "_runtime", "_step"}
        assert row.keys() - own == RoundResult(**line).scalars.keys()
    (ending,) = [r.exit for r in found if r.WhichOneof("record_type") == "exit"]
    assert ending.exit_code == 0


@pytest.mark.filterwarnings("ignore")  # of SQLAlchemy, which MLflow keeps its runs with
def test_mlflow_gets_what_is_released_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="without it MLflow has no store on this machine")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    (tmp_path / "mine.py").write_text(NOTEBOOK)
    path = experiment(tmp_path, trackers=["mlflow"], seed=1)
    stopping = ("--set", 'trackers=["mlflow", "mine:stop"]')
    ended = fedpriv("simulate", path, "--out", "run", *stopping, cwd=tmp_path)
    assert ended.returncode == 130, ended.stderr
    client = mlflow.MlflowClient(store)
    experiment_id = client.get_experiment_by_name("fedpriv").experiment_id
    (run,) = client.search_runs([experiment_id])
    assert run.info.status == "KILLED"
    with caplog.at_level(logging.WARNING, "fedpriv"):
        run_simulation(path, [], tmp_path / "run", resume=True)
    assert caplog.messages == []
    (run,) = client.search_runs([experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny-seed1", "FINISHED")
    assert run.data.tags["fedpriv.group"] == "tiny"
    assert run.data.tags["fedpriv.end"] == f"3 of 3 rounds: {Stop.ROUNDS}"
    assert run.data.params["clipping.strategy"] == "per-layer"
    written = rows(tmp_path / "run")
    for name, key in (("test/accuracy", "accuracy"), ("privacy/epsilon", "epsilon")):
        history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda m: m.step)
        assert [each.step for each in history] == [1, 2, 3]
        assert [each.value for each in history] == pytest.approx([row[key] for row in written])
    assert set(run.data.metrics) == set(RoundResult(**written[-1]).scalars)


def test_event_files_have_the_settings_and_the_end(tmp_path: Path) -> None:
    path = experiment(tmp_path, trackers=["tensorboard"])
    printed("simulate", path, "--out", "run", cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (settings,) = events.Tensors("settings/text_summary")
    (end,) = events.Tensors("end/text_summary")
    assert b"| clipping.strategy | per-layer |" in settings.tensor_proto.string_val[0]
    assert end.tensor_proto.string_val[0] == f"3 of 3 rounds: {Stop.ROUNDS}".encode()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_without_its_package_a_tracker_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("fedpriv.support.importing.find_spec", lambda _name: None)
    file = experiment(tmp_path, trackers=[name])
    with pytest.raises(InvalidValueError, match=rf"pip install 'fedpriv\[{name}\]'"):
        run_simulation(file, [], tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("json:JSONEncoder", "trackers 'json:JSONEncoder' is another class"),
        ("nowhere:Log", "trackers 'nowhere:Log' cannot be imported"),
        ("fedpriv:WandBee", "has no function 'WandBee'"),
        ("fedpriv:Tracker", "cannot be made: TypeError"),
    ],
)
def test_bad_trackers_are_refused_before_the_run(tmp_path: Path, path: str, words: str) -> None:
    file = experiment(tmp_path, trackers=[path])
    assert words in refused("simulate", file, "--out", "run", cwd=tmp_path)
    assert not (tmp_path / "run").exists()
