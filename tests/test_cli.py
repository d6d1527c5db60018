"""The commands as a user types them, with good and bad input."""

import json
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pytest

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.fdp import trade_off
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import RunFolder
from tests.commandline import fedpriv, printed, refused

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "fedpriv/experiment/bundled/digits.toml"
SHORT = ["--set", "rounds=6", "--set", "privacy.noise_multiplier=4.0"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    done = fedpriv("simulate", DIGITS, *SHORT, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "accuracy on held-out rows" in done.stdout
    assert re.search("sums and noise +│ exact", done.stdout)
    assert "operating system" in done.stdout
    return folder


def test_simulate_writes_the_run_folder(run_folder: Path) -> None:
    names = {path.name for path in run_folder.iterdir()}
    assert names == {
        ".gitignore",
        "plan.toml",
        "plan.sha256",
        "ledger.sqlite",
        "ledger.participation.sqlite",
        "metrics.jsonl",
        "checkpoints",
        "model.safetensors",
        "best.safetensors",
        "mean.safetensors",
        "run.json",
    }
    assert (run_folder / "ledger.participation.sqlite").stat().st_mode & 0o777 == 0o600


def test_metrics_hold_the_epsilon_of_the_ledger(run_folder: Path) -> None:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, 7))
    with Ledger.open(run_folder / "ledger.sqlite") as ledger:
        events = [row.event for row in ledger.charges()]
    for count, row in enumerate(rows, start=1):
        assert row["epsilon"] == epsilon_of(events[:count], 1e-3).epsilon
    assert rows[-1]["accuracy"] > 0.15  # a guess is right one time in ten


def test_the_resolved_plan_runs_again(run_folder: Path, tmp_path: Path) -> None:
    plan = run_folder / "plan.toml"
    text = plan.read_text()
    assert "# expected cohort: 86.1" in text
    assert tomllib.loads(text)["privacy"]["noise_multiplier"] == 4.0
    done = fedpriv("simulate", plan, "--out", tmp_path / "again")
    assert done.returncode == 0, done.stderr


def test_a_folder_is_not_overwritten_but_resumed(run_folder: Path) -> None:
    # Also where its charges leave no budget for another round.
    dear = ["--set", "privacy.ledger=" + str(run_folder / "ledger.sqlite")]
    for more in ([], [*dear, "--set", "privacy.epsilon=0.1"]):
        line = refused("simulate", DIGITS, *SHORT, *more, "--out", run_folder)
        assert f"{run_folder} holds a run already; resume it, unless all of its rounds" in line
    before = (run_folder / "metrics.jsonl").read_bytes()
    done = fedpriv("simulate", DIGITS, *SHORT, "--out", run_folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert "after 6 of 6 rounds" in done.stdout
    assert (run_folder / "metrics.jsonl").read_bytes() == before
    again = fedpriv("simulate", run_folder / "plan.toml", "--out", run_folder, "--resume")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["simulate"], "fedpriv.run.simulate"),
        (["simulate", "--engine", "flower"], "fedpriv.flower.ray"),
        (["plan"], "fedpriv.run.simulate"),
        (["tune", "--on", "public"], "fedpriv.run.tune"),
        (["serve"], "fedpriv.server.deployment"),
    ],
)
def test_wrong_settings_are_refused_before_seconds_go_into_imports(
    monkeypatch: pytest.MonkeyPatch, command: list[str], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import of it would fail
    line = refused(*command, DIGITS, "--set", "privacy.epsilon=none")
    assert "privacy.epsilon is 'none'; it must be a number" in line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_output_cannot_encode_ends_no_run(encoding: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedpriv", "simulate", DIGITS, "--set", "rounds=1"]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    command += ["--out", tmp_path / "run"]
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"user-level (\u03b5, \u03b4)" in done.stdout


def test_experiments_and_studies_are_told_apart() -> None:
    study = ROOT / "simulations" / "clipping_digits.toml"
    assert "is a study, not an experiment; use `fedpriv compare`" in refused("simulate", study)
    line = refused("compare", DIGITS)
    assert "is an experiment, not a study; use `fedpriv simulate`" in line


def test_the_folder_of_a_run_stands_for_its_ledger(run_folder: Path, tmp_path: Path) -> None:
    ledger = run_folder / "ledger.sqlite"
    for command in (["epsilon", "--json"], ["ledger", "show"], ["ledger", "export"]):
        assert fedpriv(*command, run_folder) == fedpriv(*command, ledger)
    assert f"{ledger} is intact" in fedpriv("ledger", "verify", run_folder).stdout
    done = fedpriv("ledger", "backup", run_folder, tmp_path / "copy")
    assert "holds 6 charges" in done.stdout


def test_the_folder_of_a_run_stands_for_a_ledger_that_it_shares(tmp_path: Path) -> None:
    shared, run = tmp_path / "shared.sqlite", tmp_path / "run"
    settings = ("--set", "data.options.users=40", "--set", "rounds=1")
    fedpriv("simulate", DIGITS, *settings, "--set", f"privacy.ledger={shared}", "--out", run)
    assert fedpriv("epsilon", "--json", run) == fedpriv("epsilon", "--json", shared)
    assert f"{shared} is intact" in fedpriv("ledger", "verify", run).stdout


def test_resuming_with_another_plan_is_refused(run_folder: Path) -> None:
    changed = ["--set", "rounds=6", "--set", "privacy.noise_multiplier=3.0"]
    message = refused("simulate", DIGITS, *changed, "--out", run_folder, "--resume")
    assert "can only be resumed with the plan it began with" in message


PEOPLE = """
name = "people"
rounds = 3
seed = 1
data = {{ name = "hugging-face", options = {{ train = "{0}/train.parquet", \
test = "{0}/test.parquet", {1}, columns = {{ x = ["a", "b"], y = "y" }} }} }}
model = {{ name = "softmax", options = {{ inputs = 2, classes = 3 }} }}
local = {{ learning_rate = 0.5, epochs = 1 }}
clipping = {{ norm = 0.5 }}
privacy = {{ sampling_probability = 0.5, epsilon = 9.0, delta = 1e-3, noise_multiplier = 1.0 }}
"""
BY_PART = 'partitioner = "IidPartitioner", arguments = { num_partitions = 20 }'
DRAWN = {"ledger_id", "created_at", "day", "cohort_commitment", "hash", "previous_hash"}
"""What a ledger draws or reads from the clock, and digests of that and of the rest."""


def said_in(ledger: Path) -> object:
    """What an exported ledger says, but for what it draws itself."""

    def without(said: object) -> object:
        if isinstance(said, dict):
            return {key: without(value) for key, value in said.items() if key not in DRAWN}
        return [without(each) for each in said] if isinstance(said, list) else said

    lines = fedpriv("ledger", "export", ledger).stdout.splitlines()
    return [without(json.loads(line)) for line in lines]


@pytest.mark.parametrize("users", ['user_column = "user"', BY_PART])
def test_a_ledger_says_how_many_users_there_are_and_nothing_of_their_data(
    tmp_path: Path, users: str
) -> None:
    (tmp_path / "people.toml").write_text(PEOPLE.format(tmp_path, users))
    said = []
    for rows, rng in ((131, np.random.default_rng(0)), (157, np.random.default_rng(1))):
        ids = rng.integers(1000) + np.concatenate([np.arange(20), rng.integers(0, 20, rows - 20)])
        for split, whose in (("train", ids), ("test", np.arange(5) - 5)):
            named = {"user": whose, "y": rng.integers(0, 3, len(whose))}
            columns = named | {name: rng.random(len(whose)) for name in "ab"}
            datasets.Dataset.from_dict(columns).to_parquet(tmp_path / f"{split}.parquet")
        done = fedpriv("simulate", tmp_path / "people.toml", "--out", tmp_path / str(rows))
        assert done.returncode == 0, done.stderr
        said.append(said_in(tmp_path / str(rows) / "ledger.sqlite"))
    assert said[0] == said[1]
    assert len(said[0]) == 5  # the name, three charges, the head
    assert "20 users by" in said[0][0]["population"]


def test_epsilon_prints_what_the_accountants_say(run_folder: Path) -> None:
    ledger = run_folder / "ledger.sqlite"
    done = fedpriv("epsilon", ledger, "--delta", "1e-3")
    assert done.returncode == 0, done.stderr
    with Ledger.open(ledger) as opened:
        events = [row.event for row in opened.charges()]
    for name in ("pld", "rdp"):
        value = epsilon_of(events, 1e-3, name).epsilon
        row = next(line for line in done.stdout.splitlines() if f" {name} " in line)
        printed = float(row.replace("│", " ").replace("┃", " ").split()[3])
        assert value <= printed <= value + 1.001e-3
    assert "operating system" in done.stdout
    only = fedpriv("epsilon", ledger, "--accountant", "rdp")
    assert " pld " not in only.stdout
    assert "δ = 0.001" in only.stdout  # the largest power of ten below 1/287


def test_ledger_show_verify_and_export(run_folder: Path, tmp_path: Path) -> None:
    ledger = run_folder / "ledger.sqlite"
    shown = fedpriv("ledger", "show", ledger, "--last", "2")
    assert shown.returncode == 0
    assert "287" in shown.stdout
    assert len([line for line in shown.stdout.splitlines() if "update: 0.5, 2" in line]) == 2
    participation = run_folder / "ledger.participation.sqlite"
    intact = fedpriv("ledger", "verify", ledger, "--participation", participation)
    assert intact.returncode == 0, intact.stderr
    assert "6 charges, each with the cohort it commits to" in intact.stdout
    head = intact.stdout.split("head ")[1].strip()
    assert fedpriv("ledger", "verify", ledger, "--head", head).returncode == 0
    assert "never had the head" in refused("ledger", "verify", ledger, "--head", "6:" + "0" * 64)
    for wrong in ("six", "1" * 5000 + ":ab"):
        assert "COUNT:HASH" in refused("ledger", "verify", ledger, "--head", wrong)
    out = tmp_path / "ledger.jsonl"
    assert fedpriv("ledger", "export", ledger, "--out", out).returncode == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 8  # the name, six charges, the head
    assert lines[1]["sum_queries"][0]["clipping_norm"] == 0.5
    printed = fedpriv("ledger", "export", ledger)
    assert printed.stdout == out.read_text()
    assert "cannot be used" in refused("ledger", "export", ledger, "--out", tmp_path / "a" / "b")


@pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.participation.sqlite", "plan.toml"])
def test_an_export_replaces_nothing(run_folder: Path, name: str) -> None:
    kept = (run_folder / name).read_bytes()
    line = refused("ledger", "export", run_folder / "ledger.sqlite", "--out", run_folder / name)
    assert f"{name} exists already; it is not overwritten" in line
    assert (run_folder / name).read_bytes() == kept


def test_verify_names_the_row_that_was_changed(run_folder: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.sqlite"
    with sqlite3.connect(run_folder / "ledger.sqlite") as source, sqlite3.connect(forged) as copy:
        source.backup(copy)
    for connection in (source, copy):
        connection.close()
    with sqlite3.connect(forged) as connection:
        triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        for (name,) in triggers.fetchall():
            connection.execute(f'DROP TRIGGER "{name}"')
        connection.execute("UPDATE chain SET text = replace(text, '0.', '0.0') WHERE position = 3")
    connection.close()
    assert "charge 3" in refused("ledger", "verify", forged)
    assert "charge 3" in refused("epsilon", forged)


def test_a_ledger_that_may_shrink_is_not_priced(run_folder: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.sqlite"
    shutil.copy(run_folder / "ledger.sqlite", forged)
    with closing(sqlite3.connect(forged)) as connection:
        connection.execute("DROP TRIGGER chain_no_delete")
    for command in (["ledger", "verify"], ["ledger", "show"], ["epsilon"]):
        assert "tables or triggers were altered: chain_no_delete" in refused(*command, forged)


def test_a_ledger_without_a_head_is_one_sentence(run_folder: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.sqlite"
    shutil.copy(run_folder / "ledger.sqlite", forged)
    with closing(sqlite3.connect(forged)) as connection, connection:
        connection.execute("DROP TRIGGER head_no_delete")
        connection.execute("DELETE FROM head")
    assert "the ledger has no head" in refused("ledger", "verify", forged)


def test_a_path_in_a_message_is_the_one_that_was_given(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused("ledger", "backup", run_folder / "ledger.sqlite", tmp_path / "file" / "b")
    assert line == f"error: {tmp_path}/file cannot be used: File exists"
    line = refused("ledger", "show", "absent", cwd=tmp_path)
    assert line == "error: ledger absent cannot be opened: No such file or directory"


@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
def test_clippings_differ_by_one_key(strategy: str, tmp_path: Path) -> None:
    key = f"clipping.strategy={strategy}"
    done = fedpriv(
        "simulate",
        DIGITS,
        *SHORT,
        "--set",
        "model.name=mlp",
        "--set",
        key,
        "--set",
        "model.options={inputs=64, hidden=8}",
        "--out",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        (event,) = {row.event for row in ledger.charges()}
    (*groups, counting) = event.queries
    assert len(groups) == (2 if strategy == "per-layer" else 1)
    assert counting.group == "metrics/contributors"
    assert event.noise_multiplier == pytest.approx(4.0)


def test_seeded_runs_repeat_and_say_so(tmp_path: Path) -> None:
    outputs = []
    for name in ("one", "two"):
        done = fedpriv("simulate", DIGITS, *SHORT, "--set", "seed=5", "--out", tmp_path / name)
        assert "seeded: reproducible, not a guarantee" in done.stdout
        outputs.append((tmp_path / name / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]
    epsilon = fedpriv("epsilon", tmp_path / "one" / "ledger.sqlite")
    assert "seeded: reproducible, not a guarantee" in epsilon.stdout


def test_runs_over_one_population_add_up_in_one_ledger(tmp_path: Path) -> None:
    shared = tmp_path / "shared.sqlite"
    key = f"privacy.ledger={shared}"
    for name in ("one", "two"):
        done = fedpriv("simulate", DIGITS, *SHORT, "--set", key, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert "this run alone" in done.stdout
    printed = fedpriv("epsilon", shared, "--delta", "1e-3")
    assert "all runs" in printed.stdout
    with Ledger.open(shared) as ledger:
        assert len({row.run for row in ledger.charges()}) == 2
        assert ledger.head.count == 12
    other = ["--set", "data.options.users=100", "--set", key, "--out", str(tmp_path / "three")]
    assert "is of population" in refused("simulate", DIGITS, *SHORT, *other)


def test_the_budget_stops_a_run(tmp_path: Path) -> None:
    limited = ["--set", "privacy.noise_multiplier=4.0", "--set", "privacy.epsilon=1.0"]
    done = fedpriv("simulate", DIGITS, *limited, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "the next round would pass the privacy budget" in done.stdout
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        events = [row.event for row in ledger.charges()]
    assert 0 < len(events) < 100
    assert epsilon_of(events, 1e-3).epsilon <= 1.0
    assert epsilon_of([*events, events[0]], 1e-3).epsilon > 1.0


def test_a_large_delta_is_warned_about(tmp_path: Path) -> None:
    done = fedpriv(
        "simulate", DIGITS, *SHORT, "--set", "privacy.delta=0.01", "--out", tmp_path / "run"
    )
    assert done.returncode == 0
    assert "warning: δ is 0.01 for 287 users: " in done.stdout


def test_no_privacy_has_to_be_asked_for_and_is_infinite(tmp_path: Path) -> None:
    off = ["--set", "privacy.noise_multiplier=0.0", "--set", "rounds=3"]
    assert "unsafe_no_privacy = true" in refused("simulate", DIGITS, *off)
    done = fedpriv(
        "simulate",
        DIGITS,
        *off,
        "--set",
        "privacy.unsafe_no_privacy=true",
        "--out",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    assert "no ε holds" in done.stdout
    assert "∞" in fedpriv("epsilon", tmp_path / "run" / "ledger.sqlite").stdout


JOINT = ["--set", "clipping.strategy=joint"]
MODELS = """
import torch
from fedpriv.data.arrays import from_grouped
from fedpriv.data.population import Population

class NaN(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) * float("nan")

def nan():
    return NaN(64, 10)

def normalised():
    layers = torch.nn.Flatten(), torch.nn.SyncBatchNorm(64), torch.nn.Linear(64, 10)
    return torch.nn.Sequential(*layers)

def absent():
    open("none.csv")

def twice():
    row = {"x": torch.zeros(1, 64).numpy(), "y": torch.zeros(1, dtype=torch.int64).numpy()}
    return Population("twice", from_grouped([("ann", row), ("bob", row), ("ann", row)]), row)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.toml"], "absent.toml cannot be read: No such file"),
        ([DIGITS, "--set", "privcy.delta=1"], "did you mean 'privacy'"),
        ([DIGITS, "--set", "privacy.sampling_probability=1.5"], "is 1.5"),
        ([DIGITS, "--set", "privacy.sampling_probability=0"], "is 0"),
        ([DIGITS, "--set", "clipping.norm=-1"], "clipping.norm is -1"),
        ([DIGITS, "--set", "clipping.norm=0"], "clipping.norm is 0"),
        ([DIGITS, "--set", "data.name=digit"], "did you mean 'digits'"),
        ([DIGITS, "--set", "data.options.usres=3"], "did you mean 'users'"),
        ([DIGITS, "--set", "model.name=softmx"], "did you mean 'softmax'"),
        ([DIGITS, "--set", "engine.device=gpu"], "'gpu'"),
        ([DIGITS, "--set", "privacy.accountant=pdl"], "did you mean 'pld'"),
        ([DIGITS, "--set", "privacy.accountant=gdp"], "'gdp', whose estimate can be below"),
        ([DIGITS, *JOINT, "--set", "clipping.scales={a=1.0}"], "1.bias"),
        ([DIGITS, "--set", "local.steps=2"], "exactly one"),
        ([DIGITS, "--set", "server.options.momentum=0.5"], "momentum"),
        ([DIGITS, "--resume"], "--resume needs --out"),
        ([DIGITS, "--set", "model={name='mine:nan'}"], "NaN"),
        ([DIGITS, "--set", "model={name='mine:normalised'}"], "'1' is SyncBatchNorm"),
        ([DIGITS, "--set", "data={name='mine:twice'}"], "'ann'"),
        ([DIGITS, "--set", "data={name='mine:absent'}"], "none.csv cannot be used: No such file"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str | Path], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    assert message in refused("simulate", *arguments, cwd=tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [["epsilon"], ["ledger", "show"], ["ledger", "verify"]])
def test_files_that_are_no_ledgers_are_refused(command: list[str], tmp_path: Path) -> None:
    assert "absent.sqlite" in refused(*command, tmp_path / "absent.sqlite")
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"not a database at all" * 100)
    assert "other.sqlite" in refused(*command, other)


def test_bad_accountant_and_delta_are_refused(run_folder: Path) -> None:
    ledger = run_folder / "ledger.sqlite"
    assert "'moments'" in refused("epsilon", ledger, "--accountant", "moments")
    assert "2" in refused("epsilon", ledger, "--delta", "2")


@pytest.mark.parametrize(
    ("command", "function", "told"),
    [
        (
            "simulate",
            "fedpriv.run.simulate.run_simulation",
            "interrupted; continue with --resume\n",
        ),
        ("serve", "fedpriv.server.deployment.serve", "interrupted; continue with --resume\n"),
        (
            "compare",
            "fedpriv.run.compare.run_study",
            "interrupted; continue with the same command\n",
        ),
        ("plan", "fedpriv.run.simulate.show_allocation", "interrupted\n"),
    ],
)
def test_what_is_interrupted_says_whether_it_can_go_on(
    command: str, function: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, Mock(side_effect=KeyboardInterrupt))
    done = fedpriv(command, DIGITS)
    assert (done.returncode, done.stderr) == (130, told)


def test_an_interrupted_run_says_which_folder_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpriv.run.terminal.conduct", Mock(side_effect=KeyboardInterrupt))
    done = fedpriv("simulate", DIGITS, *SHORT, "--set", "seed=5", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "interrupted; continue with --resume\n")
    assert "runs/digits-seed5 holds the run so far" in done.stdout


def test_an_interrupt_of_the_imports_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "fedpriv", "--version"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_empty_value_is_no_folder(tmp_path: Path) -> None:
    for arguments in (["--out", ""], ["--out="]):
        line = refused("simulate", DIGITS, *SHORT, *arguments, cwd=tmp_path)
        assert line == "error: --out has an empty value; it must not be empty"
    assert list(tmp_path.iterdir()) == []


def test_a_command_is_suggested_once() -> None:
    assert refused("simulat").count("mean 'simulate'") == 1
    assert refused("ledger", "sow").count("mean 'show'") == 1


def test_a_flag_has_no_opposite() -> None:
    assert "--no-" not in fedpriv("tune", "--help").stdout


def test_a_key_that_is_set_is_not_said_to_be_in_the_file() -> None:
    line = refused("simulate", DIGITS, "--set", "rounds=0")
    assert f"{DIGITS} with --set: rounds is 0" in line


def test_a_long_list_of_names_is_left_out() -> None:
    line = refused("simulate", DIGITS, "--set", "model.name=os:getcw")
    assert "did you mean 'getcwd'" in line
    assert len(line) < 200


def test_a_charge_has_few_lines_in_a_narrow_terminal(run_folder: Path) -> None:
    command = [sys.executable, "-m", "fedpriv", "ledger", "show", run_folder / "ledger.sqlite"]
    narrow = os.environ | {"COLUMNS": "80"}
    shown = subprocess.run(command, env=narrow, capture_output=True, text=True, check=True).stdout
    rows = [line for line in shown.splitlines() if line.startswith("│")]
    assert len(rows) <= 6 * 4
    assert "sampling: poisson, add-or-remove-one" in shown
    assert "noise of update: exact, B = 281474976710656, σ/γ =" in shown


def test_help_names_every_command() -> None:
    for arguments, expected in [
        ((), ["simulate", "epsilon", "ledger"]),
        (("ledger",), ["show", "verify", "export"]),
    ]:
        done = fedpriv(*arguments, "--help")
        assert done.returncode == 0
        assert all(name in done.stdout for name in expected)


def test_the_installed_command_answers() -> None:
    assert "nonsense" in refused("nonsense")
    command = Path(sys.executable).with_name("fedpriv")
    for arguments, code in (["--help"], 0), (["nonsense"], 2):
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr


def test_the_module_is_the_command_and_says_its_version() -> None:
    command = [sys.executable, "-m", "fedpriv"]
    version = f"fedpriv {metadata.version('fedpriv')}"
    for arguments, expected in (["--version"], version), (["epsilon", "-h"], "Usage: fedpriv eps"):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        assert expected in done.stdout
    asked = {"_FEDPRIV_COMPLETE": "complete_bash", "COMP_WORDS": "fedpriv si", "COMP_CWORD": "1"}
    done = subprocess.run(
        command, env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["simulate"]


def test_what_memory_does_not_hold_is_one_sentence() -> None:
    done = fedpriv(
        "plan", "digits", "--set", 'data={name="synthetic",options={users=10_000_000_000_000}}'
    )
    assert done.returncode == 1
    assert re.fullmatch("error: there is too little memory\\. Unable to allocate .*\n", done.stderr)


def test_a_working_folder_that_was_removed_is_not_missed(tmp_path: Path) -> None:
    (folder := tmp_path / "gone").mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); sys.argv[1:] = ['--version']"
    command = [sys.executable, "-c", f"{code}; from fedpriv.cli import main; main()"]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_programs_read_runs_and_plans_as_json(run_folder: Path) -> None:
    state = json.loads(printed("report", run_folder, "--json"))
    last = RunFolder(run_folder).results()[-1]
    kept = {key: state[key] for key in ("round", "epsilon", "delta", "accuracy", "loss")}
    assert kept == {key: getattr(last, key) for key in kept}
    with Ledger.open(run_folder / "ledger.sqlite") as ledger:
        assert state["head"] == f"{ledger.head.count}:{ledger.head.hash}"
        told = trade_off(ledger.spent())
    assert state["risks"]["advantage"] == told.advantage
    assert not (run_folder / "report.html").exists()
    assert "--open" in refused("report", run_folder, "--json", "--open")
    plan = json.loads(printed("plan", DIGITS, "--json"))
    assert math.fsum(group["share"] for group in plan["groups"]) == pytest.approx(1.0)
    noise = {group["name"]: group["noise_stddev"] for group in plan["groups"]}
    assert noise["update"] > plan["noise_multiplier"] * 0.5
    assert 0.5 < plan["risks"]["success"] == pytest.approx(0.5 + plan["risks"]["advantage"] / 2)
