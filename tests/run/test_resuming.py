"""A run goes on with the plan that it began with, and with no other, wherever it was killed."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedpriv as private
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import load_config
from fedpriv.flower.grid import GridSimulation
from fedpriv.ledger.ledger import ChargedRow, Head, Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.run.folder import RunFolder, read_run
from fedpriv.run.run import RunSetup
from fedpriv.server import certificates
from fedpriv.server.enrolment import Enrolment
from tests.commandline import fedpriv, refused

SIMULATIONS = Path(__file__).parents[2] / "simulations"
DIGITS = SIMULATIONS.parent / "fedpriv/experiment/bundled/digits.toml"
SETTINGS = ("--set", "rounds=3", "--set", "data.options.users=40")
BOUND = "a run can only be resumed with the plan it began with"
# `fedpriv`, killed as soon as the first charge is on the disk: before a release, and a checkpoint.
KILLED = """
import os, signal
from fedpriv.cli import main
from fedpriv.ledger import Ledger

charge = Ledger.charge

def charged(*given):
    charge(*given)
    os.kill(os.getpid(), signal.SIGKILL)

Ledger.charge = charged
main()
"""
OTHER_PLANS = (
    "local.learning_rate=0.4",
    "rounds=4",
    "clipping.norm=0.6",
    "privacy.noise_multiplier=9.0",
    "privacy.sampling_probability=0.2",
    "data.options.seed=1",
    "run=other",
    "seed=7",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one charge, and nothing that was released."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    command = [sys.executable, "-c", KILLED, "simulate", DIGITS, *SETTINGS, "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    run = RunFolder(folder)
    assert not run.checkpoints.exists()
    assert not run.metrics.exists()
    assert head_of(run).count == 1
    return folder


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(killed, tmp_path / "run")))


def head_of(run: RunFolder) -> Head:
    with Ledger.open(run.ledger) as ledger:
        return ledger.head


def content(run: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.path.iterdir() if path != run.ledger}


def resumed(run: RunFolder, *more: str) -> tuple[str | Path, ...]:
    return ("simulate", DIGITS, *SETTINGS, *more, "--out", run.path, "--resume")


@pytest.mark.parametrize("changed", OTHER_PLANS)
def test_another_plan_is_refused_from_the_first_charge_on(run: RunFolder, changed: str) -> None:
    before = content(run), head_of(run)
    said = refused(*resumed(run, "--set", changed, "--set", "output.evaluate_every=2"))
    key, _, value = changed.partition("=")
    assert BOUND in said
    assert re.search(rf" \({re.escape(key)} is {value}, was [^ ]+\); a run", said)
    assert (content(run), head_of(run)) == before


OWN = """
from dataclasses import replace
from fedpriv.data import load_digits

def people(seed=0):
    return replace(load_digits(40, seed), name="people")

others = people

def stop(released):
    raise KeyboardInterrupt
"""


def test_other_data_of_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    run, given = RunFolder(tmp_path / "run"), ("--set", "rounds=3", "--set", "data=mine:people")
    command = ("simulate", DIGITS, *given, "--out", run.path)
    assert fedpriv(*command, '--set=trackers=["mine:stop"]', cwd=tmp_path).returncode == 130
    before = run.plan.read_bytes(), head_of(run)
    for changed, was in (
        ("data.options.seed=1", "absent"),
        ("data.name=mine:others", "mine:people"),
    ):
        said = refused(*command, "--resume", "--set", changed, cwd=tmp_path)
        assert said == f"error: {changed.replace('=', ' is ')}, was {was}; {BOUND}"
        assert (run.plan.read_bytes(), head_of(run)) == before
    assert fedpriv(*command, "--resume", cwd=tmp_path).returncode == 0


def test_the_same_file_of_data_may_be_written_as_another_path(tmp_path: Path) -> None:
    for name, first in (("train.csv", 0), ("test.csv", 100), ("other.csv", 200)):
        rows = (f"{first + row // 5},{row % 2},{row % 2}\n" for row in range(100))
        (tmp_path / name).write_text("".join(["w,x,y\n", *rows]))
    options = 'train="train.csv", test="test.csv", user_column="w", columns={x=["x"], y="y"}'
    given = [f'data={{name="hugging-face", options={{{options}}}}}', "model.options.inputs=1"]
    given = [f"--set={each}" for each in (*given, "rounds=1", "privacy.epsilon=9.0")]
    command = ("simulate", DIGITS, *given, "--out", "run")
    assert fedpriv(*command, cwd=tmp_path).returncode == 0
    command = (*command, "--resume", "--set")
    there = f"data.options.test={tmp_path / 'test.csv'}"
    for setting in ("rounds=1", there):
        done = fedpriv(*command, setting, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    said = refused(*command, "data.options.test=other.csv", cwd=tmp_path)
    assert said == f"error: data.options.test is ../other.csv, was ../test.csv; {BOUND}"


@pytest.mark.parametrize("others", [(), ("--set", "output.evaluate_every=2")])
def test_the_same_plan_goes_on_with_a_new_attempt(run: RunFolder, others: tuple[str, ...]) -> None:
    """The noise is that of the begin, so the attempt that was lost is a round less."""
    before = run.plan.read_bytes(), run.plan_digest.read_bytes()
    done = fedpriv(*resumed(run, *others))
    assert done.returncode == 0, done.stderr
    assert "after 0 of 3 rounds" in done.stdout
    with Ledger.open(run.ledger) as ledger:
        charges = [(row.round, row.attempt) for row in ledger.charges()]
    assert charges == [(1, 0), (1, 1), (2, 0)]
    assert [row["round"] for row in run.read_metrics()] == [1, 2]
    assert (run.plan.read_bytes(), run.plan_digest.read_bytes()) == before


def test_a_resumed_run_is_reported_beside_the_budget_that_it_then_has(run: RunFolder) -> None:
    before = run.plan.read_text()
    others = ("privacy.epsilon=50.0", "privacy.delta=0.0001", "output.checkpoint_every=2")
    given = [part for setting in others for part in ("--set", setting)]
    done = fedpriv(*resumed(run, *given))
    assert done.returncode == 0, done.stderr
    record = read_run(run.path)
    assert (record.budget, record.delta) == (50.0, 0.0001)
    expected = before.replace("epsilon = 2.0\n", "epsilon = 50.0\n")
    expected = expected.replace("delta = 0.001\n", "delta = 0.0001\n")
    assert run.plan.read_text() == expected != before  # what is no part of a budget stays
    done = fedpriv("simulate", run.plan, "--out", run.path, "--resume")
    assert done.returncode == 0, done.stderr


def test_a_ledger_that_is_refused_does_not_get_into_the_plan(tmp_path: Path) -> None:
    shared, other, out = tmp_path / "shared.sqlite", tmp_path / "other.sqlite", tmp_path / "run"
    for ledger, folder in ((shared, out), (other, tmp_path / "others")):
        given = ("--set", f"privacy.ledger={ledger}", "--out", folder)
        assert fedpriv("simulate", DIGITS, *SETTINGS, *given).returncode == 0
    before = (out / "plan.toml").read_text()
    given = ("--set", f"privacy.ledger={other}", "--out", out, "--resume")
    assert "ledger" in refused("simulate", DIGITS, *SETTINGS, *given)
    assert (out / "plan.toml").read_text() == before
    moved = shared.rename(tmp_path / "moved.sqlite")
    record_path(shared).rename(record_path(moved))
    given = ("--set", f"privacy.ledger={moved}", "--out", out, "--resume")
    assert fedpriv("simulate", DIGITS, *SETTINGS, *given).returncode == 0
    assert read_run(out).ledger.path == moved


def test_the_resolved_plan_goes_on_too(run: RunFolder) -> None:
    done = fedpriv("simulate", run.plan, "--out", run.path, "--resume")
    assert done.returncode == 0, done.stderr
    assert head_of(run).count == 3


@pytest.mark.parametrize("name", ["run[lr=0.1]", "run[/bold]", "run:tada:"])
def test_the_name_of_a_folder_is_no_markup(killed: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(killed, tmp_path / name)
    done = fedpriv("simulate", f"./{name}/plan.toml", "--out", name, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resuming {name} after 0 of 3 rounds" in done.stdout


def test_checkpoints_that_are_far_apart_bind_no_later(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def stop(released):\n    raise KeyboardInterrupt\n")
    settings = ["output.checkpoint_every=100", 'trackers=["mine:stop"]']
    given = [*SETTINGS, *(word for text in settings for word in ("--set", text))]
    run = RunFolder(tmp_path / "run")
    assert fedpriv("simulate", DIGITS, *given, "--out", run.path, cwd=tmp_path).returncode == 130
    assert not run.checkpoints.exists()
    assert BOUND in refused(*resumed(run, "--set", "local.learning_rate=0.4"))
    assert head_of(run).count == 1


def test_a_run_that_lost_its_checkpoints_keeps_its_model(run: RunFolder) -> None:
    assert fedpriv(*resumed(run)).returncode == 0
    shutil.rmtree(run.checkpoints)
    before = content(run), head_of(run)
    assert "holds no checkpoint" in refused(*resumed(run))
    assert (content(run), head_of(run)) == before


def test_a_run_that_lost_its_checkpoints_pays_for_no_round_again(tmp_path: Path) -> None:
    stop = "def stop(released):\n    if released.round == 3:\n        raise KeyboardInterrupt\n"
    (tmp_path / "mine.py").write_text(stop)
    settings = ["rounds=6", "output.checkpoint_every=2", 'trackers=["mine:stop"]']
    given = [*SETTINGS, *(word for text in settings for word in ("--set", text))]
    run = RunFolder(tmp_path / "run")
    assert fedpriv("simulate", DIGITS, *given, "--out", run.path, cwd=tmp_path).returncode == 130
    shutil.rmtree(run.checkpoints)
    before = head_of(run)
    again = ("--set", "rounds=6", "--set", "output.checkpoint_every=2")
    said = refused(*resumed(run, *again))
    assert "the run that charged round 3 had one; restore it, or start" in said
    assert head_of(run) == before
    # With checkpoints that are far apart it may have had none.
    done = fedpriv(*resumed(run, *again, "--set", "output.checkpoint_every=3"))
    assert "after 0 of 6 rounds" in done.stdout


def test_reports_are_of_the_rounds_that_led_to_the_model(tmp_path: Path) -> None:
    """Rounds after the checkpoint were repeated, as far as the budget went."""
    stop = "def stop(released):\n    if released.round == 5:\n        raise KeyboardInterrupt\n"
    (tmp_path / "mine.py").write_text(stop)
    settings = ["rounds=6", "data.options.users=40", "output.checkpoint_every=3"]
    given = [word for text in settings for word in ("--set", text)]
    run, callback = RunFolder(tmp_path / "run"), 'trackers=["mine:stop"]'
    to = ("--out", run.path)
    begun = fedpriv("simulate", DIGITS, *given, "--set", callback, *to, cwd=tmp_path)
    assert begun.returncode == 130
    done = fedpriv("simulate", DIGITS, *given, *to, "--resume")
    assert "4 of 6, 6 charged: stopped" in done.stdout, done.stderr
    assert [row["round"] for row in run.read_metrics()] == [1, 2, 3, 4, 5, 4]
    record = read_run(run.path)
    assert [(each.round, each.attempt) for each in record.rounds] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 1),
    ]
    assert record.verification.releases == 6
    with safe_open(run.model, "numpy") as file:
        released = json.loads(file.metadata()["release"])
    assert released["epsilon"] == record.rounds[-1].epsilon


def test_rounds_that_a_resumed_run_cannot_repeat_led_to_no_model(tmp_path: Path) -> None:
    """What they released is in the ε of the model that is left all the same."""
    x = np.eye(4, dtype=np.float32).repeat(10, 0)
    people = private.Population.from_arrays(x, np.arange(4).repeat(10), np.arange(40))
    mechanism = private.Mechanism.poisson(q=0.5, clipping=private.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-2, rounds=4)

    def stop(released: private.RoundResult) -> None:
        if released.round == 4:
            raise KeyboardInterrupt

    def begun(**more: Any) -> private.Run:
        task, local = private.Task(torch.nn.Linear(4, 4)), private.SGD(1.0, epochs=1)
        given = {"rounds": 4, "checkpoint_every": 3, "seed": 1, "out": tmp_path / "run", **more}
        return private.simulate(people, task, mechanism, local=local, quiet=True, **given)

    with pytest.raises(KeyboardInterrupt):
        begun(trackers=[stop])
    done, folder = begun(resume=True), RunFolder(tmp_path / "run")
    assert done.state.round == 3
    for results in (done.rounds, read_run(folder.path).rounds):
        assert [each.round for each in results] == [1, 2, 3]
        assert results[-1].epsilon == done.epsilon
    with safe_open(folder.model, "numpy") as file:
        released = json.loads(file.metadata()["release"])
    assert (released["round"], released["epsilon"]) == (3, done.epsilon)


def test_a_run_that_goes_on_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is charged and released while it is read is none of what is read."""
    run = RunFolder(tmp_path / "run")
    assert fedpriv("simulate", DIGITS, *SETTINGS, "--out", run.path).returncode == 0
    lines, all_charges = run.metrics.read_text().splitlines(keepends=True), Ledger.charges
    run.metrics.write_text("".join(lines[:2]))

    def charges(ledger: Ledger) -> Iterator[ChargedRow]:
        before = [*all_charges(ledger)][:2]
        run.metrics.write_text("".join(lines))
        return iter(before)

    monkeypatch.setattr(Ledger, "verify", lambda *_: None)
    monkeypatch.setattr(Ledger, "charges", charges)
    assert [each.round for each in read_run(run.path).rounds] == [1, 2]


def half(run: RunFolder) -> None:
    text = run.plan.read_text()
    run.plan.write_text(text[: len(text) // 2])


def renamed(run: RunFolder) -> None:
    run.plan.write_text(run.plan.read_text().replace('run = "digits-', 'run = "other-'))


def without_a_run(run: RunFolder) -> None:
    lines = run.plan.read_text().splitlines(keepends=True)
    run.plan.write_text("".join(line for line in lines if not line.startswith("run = ")))


def with_less_noise(run: RunFolder) -> None:
    run.plan.write_text(
        run.plan.read_text().replace("noise_multiplier = ", "noise_multiplier = 0.1 # ")
    )


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda run: run.plan.write_bytes(b""), "plan.toml: key name is absent"),
        (lambda run: run.plan.write_bytes(b"\xff"), "plan.toml is not valid TOML"),
        (half, "plan.toml"),
        (without_a_run, "plan.toml is damaged: it must have run"),
        (renamed, BOUND),
        (with_less_noise, BOUND),
        (lambda run: run.plan_digest.unlink(), "the run began with plan 'unknown', this is"),
        (lambda run: run.plan_digest.write_bytes(b"\xff\n0"), BOUND),
    ],
)
def test_a_run_whose_plan_is_damaged_is_not_resumed(
    run: RunFolder, damage: object, sentence: str
) -> None:
    damage(run)
    before = content(run), head_of(run)
    assert sentence in refused(*resumed(run))
    assert (content(run), head_of(run)) == before


def test_workers_are_not_started_for_another_plan(run: RunFolder) -> None:
    assignments = list(SETTINGS[1::2])
    GridSimulation.of(RunSetup.at(load_config(DIGITS, assignments), run.path, resume=True), 2)
    changed = RunSetup.at(load_config(DIGITS, [*assignments, "rounds=4"]), run.path, resume=True)
    with pytest.raises(InvalidValueError, match=BOUND):
        GridSimulation.of(changed, 2)


@pytest.mark.parametrize("lost", ["ledger", "participation record"])
def test_a_run_does_not_go_on_without_what_was_spent(run: RunFolder, lost: str) -> None:
    path = run.ledger if lost == "ledger" else record_path(run.ledger)
    path.unlink()
    before = content(run)
    assert f"{lost} {path} is missing; restore it from a backup" in refused(*resumed(run))
    assert content(run) == before


def test_a_run_does_not_begin_or_go_on_with_a_ledger_that_was_set_back(
    killed: Path, tmp_path: Path
) -> None:
    run = RunFolder(Path(shutil.copytree(killed, tmp_path / "run")))
    kept = shutil.copy(run.ledger, tmp_path / "kept")
    # No checkpoint has seen the charges of these rounds.
    ended = fedpriv(*resumed(run, "--set", "output.checkpoint_every=100"))
    assert ended.returncode == 0, ended.stderr
    shutil.rmtree(run.checkpoints)
    shutil.copy(kept, run.ledger)
    set_back = f"ledger {run.ledger} lacks charges that {record_path(run.ledger)} has seen"
    assert set_back in refused(*resumed(run))
    shared = ("--set", f"privacy.ledger={run.ledger}", "--out", tmp_path / "new")
    assert set_back in refused("simulate", DIGITS, *SETTINGS, *shared)
    assert not RunFolder(tmp_path / "new").plan.exists()


def test_a_server_does_not_go_on_with_another_plan(tmp_path: Path) -> None:
    enrolment, run = tmp_path / "enrolment.toml", RunFolder(tmp_path / "run")
    node = f'[nodes.a]\nusers = ["ann", "bob"]\ncertificate = "{"ab" * 32}"\n'
    enrolment.write_text(f'population = "{"5f" * 16}"\n{node}')
    file = SIMULATIONS / "federation.toml"
    at = [f"federation.enrolment={enrolment}", "federation.least_nodes=1"]
    beginning = RunSetup.at(load_config(file, at), run.path, resume=True)
    section = beginning.config.federation
    assert section is not None
    enrolled = Enrolment.load(enrolment)
    experiment = beginning.on_nodes(section, enrolled.population_id, enrolled.user_ids)
    beginning.write_plan(experiment)
    plan, record = experiment.plan, record_path(run.ledger)
    with PrivacyRecords.open(run.ledger, record, plan.population, experiment.budget) as records:
        event = plan.mechanism.event
        records.ledger.charge(
            ProposedCharge(plan.run, 1, 0, experiment.entropy.randomness, event, "0" * 64)
        )
    before = content(run), head_of(run)
    certificates.init(tmp_path / "certs", ["localhost"])
    shown = f"federation.certificates={tmp_path / 'certs' / 'server'}"
    settings = [f"--set={each}" for each in (*at, shown)]
    given = ("serve", file, *settings, "--out", run.path, "--resume")
    for changed in ("local.learning_rate=0.4", "rounds=4", "clipping.norm=0.6"):
        assert BOUND in refused(*given, "--set", changed)
        assert (content(run), head_of(run)) == before
    going_on = RunSetup.at(load_config(file, at), run.path, resume=True)
    again = going_on.on_nodes(section, enrolled.population_id, enrolled.user_ids)
    going_on.refuse_other_plan(again)
    assert again.plan.digest == plan.digest
    with ParticipationRecord.open(record) as kept:
        kept.bind(plan.run, experiment.enrolled)
    enrolment.write_text(enrolment.read_text().replace("bob", "eve"))
    head = head_of(run)
    assert f"not those that run {plan.run!r} began with" in refused(*given)
    assert head_of(run) == head
