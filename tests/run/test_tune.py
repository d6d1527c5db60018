"""Searching settings: free of charge on public people, at the price that is charged on users."""

import errno
import json
import logging
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv import SGD, FedAvg, Flat, Mechanism, Population, StepDecay, Task
from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.errors import InvalidValueError, RunError
from fedpriv.ledger.events import PrivacyBudget, Randomness, RoundEvent
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.run import tune as module
from tests.commandline import fedpriv as command
from tests.commandline import printed, refused

Y = np.arange(4).repeat(30)
X = np.eye(4, dtype=np.float32)[Y]
FILE = """
name = "small"
rounds = 4
data = "mine:enrolled"
[model]
name = "softmax"
options = { inputs = 4, classes = 4 }
[local]
learning_rate = 0.5
epochs = 1
[clipping]
norm = 0.5
[privacy]
sampling_probability = 0.5
epsilon = 4.0
delta = 1e-3
[engine]
processes = 1
[tune]
trials = 3
held_out_is_public = true
[tune.public]
name = "mine:public"
[tune.space]
"clipping.norm" = { low = 0.1, high = 1.0 }
rounds = [2, 4]
"""
MINE = """
import numpy as np
from fedpriv import Population

def widest(outputs, targets):
    return float(outputs.abs().max())

def public():
    y = np.arange(4).repeat(30)
    x = np.eye(4, dtype=np.float32)[y]
    return Population.from_arrays(x, y, np.arange(120), held_out=(x, y), name="public")

def enrolled():
    open("opened", "w").close()
    return public()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE, encoding="utf-8")
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path


def people(**others: object) -> Population:
    return Population.from_arrays(X, Y, np.arange(120), held_out=(X, Y), name="people")


def calibrated(epsilon: float = 4.0) -> Mechanism:
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(0.5))
    return mechanism.calibrate(epsilon=epsilon, delta=1e-3, rounds=2)


def searched(out: Path, on: str = "users", model: nn.Module | None = None, **others: object):
    arguments = {
        "local": SGD(0.5, epochs=1),
        "space": {"local.learning_rate": (0.1, 1.0)},
        "held_out_is_public": True,
        "trials": 3,
        "quiet": True,
        "out": out,
    } | others
    mechanism = arguments.pop("mechanism", None) or calibrated()
    users = arguments.pop("population", None) or people()
    task = Task(model or nn.Linear(4, 4), figures=arguments.pop("figures", {}))
    return fedpriv.tune(users, task, mechanism, on=on, **arguments)


def widest(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """A figure of one's own: the largest score."""
    del targets
    return float(outputs.abs().max())


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The figure `widest` of every trial, computed from its model."""
    found, trained = [], module._trained

    def watched(experiment, transport):
        state, result = trained(experiment, transport)
        scores = X @ state.model["weight"].T + state.model["bias"]
        found.append(float(np.abs(scores).max()))
        return state, result

    monkeypatch.setattr(module, "_trained", watched)
    return found


def events(path: Path) -> list[RoundEvent]:
    with Ledger.open(path) as ledger:
        ledger.verify()
        return [row.event for row in ledger.charges()]


class TestOnPublicUsers:
    def test_enrolled_users_are_never_opened(self, folder: Path) -> None:
        printed("tune", "small.toml", "--on", "public", "--out", folder / "found", cwd=folder)
        assert not (folder / "opened").exists()
        printed("tune", "small.toml", "--on", "users", "--price", cwd=folder)
        assert (folder / "opened").exists()

    def test_a_search_settles_the_road_of_its_model_once(self, tmp_path, caplog) -> None:
        caplog.set_level("INFO", logger="fedpriv.engine.transport")
        searched(tmp_path / "found", on="public")
        assert caplog.text.count("users train") == 1

    def test_a_seed_repeats_the_search(self, folder: Path) -> None:
        found = []
        for name in "ab":
            options = ("--on", "public", "--set", "seed=3", "--out", folder / name)
            printed("tune", "small.toml", *options, cwd=folder)
            found.append((folder / name / "trials.jsonl").read_text("utf-8"))
        assert found[0] == found[1]

    def test_the_best_is_the_one_with_the_highest_score(self, folder: Path) -> None:
        printed("tune", "small.toml", "--on", "public", "--out", folder / "a", cwd=folder)
        rows = [
            json.loads(line)
            for line in (folder / "a" / "trials.jsonl").read_text("utf-8").splitlines()
        ]
        # The first trial is the experiment as it is.
        assert (rows[0]["clipping.norm"], rows[0]["rounds"]) == (0.5, 4)
        best = max(rows, key=lambda row: row["score"])
        written = tomllib.loads((folder / "a" / "experiment.toml").read_text("utf-8"))
        assert written["clipping"]["norm"] == best["clipping.norm"]
        assert written["rounds"] == best["rounds"]
        assert "tune" not in written
        for row in rows:
            assert 0.1 <= row["clipping.norm"] <= 1.0
            assert row["rounds"] in (2, 4)

    def test_a_norm_that_is_left_out_is_that_of_the_enrolled_users(self, folder: Path) -> None:
        text = FILE.replace("[clipping]\nnorm = 0.5", "").replace("trials = 3", "trials = 1")
        space = '[tune.space]\n"local.learning_rate" = { low = 0.1, high = 1.0 }\n'
        for name, given in (("a", space), ("b", "")):
            (folder / "small.toml").write_text(text.partition("[tune.space]")[0] + given)
            users = ("--set", "tune.users=3200", "--out", folder / name)
            printed("tune", "small.toml", "--on", "public", *users, cwd=folder)
            written = tomllib.loads((folder / name / "experiment.toml").read_text("utf-8"))
            assert written["clipping"]["norm"] == pytest.approx(0.4)  # √(0.5·3,200)/100
            assert written["server"]["optimizer"] == "fedadam"
            (trial,) = (folder / name / "trials.jsonl").read_text("utf-8").splitlines()
            assert ("clipping.norm" in json.loads(trial)) is (name == "b")
        found = searched(
            folder / "c", "public", trials=1, users=3200,
            mechanism=Mechanism.poisson(q=0.5).calibrate(epsilon=4.0, delta=1e-3, rounds=2),
        )  # fmt: skip
        assert found.arguments["mechanism"].clipping.norm == pytest.approx(0.4)

    def test_the_search_begins_with_the_experiment_wherever_it_is(self, folder: Path) -> None:
        text = FILE.partition("[tune.space]")[0].replace("trials = 3", "trials = 4")
        (folder / "small.toml").write_text(text.replace("norm = 0.5", "norm = 2.0"))
        given = ("--set", "local.learning_rate=3", "--set", "seed=1", "--out", folder / "a")
        printed("tune", "small.toml", "--on", "public", *given, cwd=folder)
        trials = (folder / "a" / "trials.jsonl").read_text("utf-8").splitlines()
        first, *others = [json.loads(line) for line in trials]
        assert (first.pop("clipping.norm"), first.pop("rounds")) == (2.0, 4)
        assert any(each["rounds"] != 4 for each in others)
        # What is given on the command line stays as it is.
        assert "local.learning_rate" not in first
        written = tomllib.loads((folder / "a" / "experiment.toml").read_text("utf-8"))
        assert written["local"]["learning_rate"] == 3

    def test_the_first_trial_has_the_rate_that_the_file_leaves_out(self, folder: Path) -> None:
        space = 'tune.space={"server.options.learning_rate"={low=0.5,high=2.0}}'
        given = ("--set", space, "--set", "tune.trials=1", "--out", folder / "a")
        printed("tune", "small.toml", "--on", "public", *given, cwd=folder)
        first = json.loads((folder / "a" / "trials.jsonl").read_text("utf-8"))
        assert first["server.options.learning_rate"] == 1.0

    def test_the_loss_is_made_small(self, tmp_path: Path) -> None:
        found = searched(tmp_path / "a", "public", objective="loss", trials=4, seed=0)
        assert found.score == min(each.score for each in found.tried)
        assert found.score < max(each.score for each in found.tried)

    @pytest.mark.parametrize(("better", "best"), [("larger", max), ("smaller", min)])
    def test_a_figure_of_ones_own_can_be_the_objective(
        self, tmp_path: Path, by_hand: list[float], better: str, best: Callable[..., float]
    ) -> None:
        given = {"figures": {"widest": widest}, "objective": "widest", "better": better}
        given["space"] = {"clipping.norm": (0.1, 1.0)}
        found = searched(tmp_path / "a", "public", seed=0, **given)
        assert [each.score for each in found.tried] == pytest.approx(by_hand, rel=1e-5)
        assert len(set(by_hand)) == 3
        assert found.score == pytest.approx(best(by_hand), rel=1e-5)

    def test_a_figure_of_a_file_can_be_the_objective(self, folder: Path) -> None:
        for objective, better, best in (
            ("widest", "larger", max),
            ("calibration-error", None, min),
        ):
            settings = [
                'evaluation.figures={widest="mine:widest",calibration-error="calibration-error"}',
                f"tune.objective={objective}",
                *([f"tune.better={better}"] if better else []),
            ]
            given = [word for setting in settings for word in ("--set", setting)]
            out = folder / objective
            said = printed("tune", "small.toml", "--on", "public", *given, "--out", out, cwd=folder)
            rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
            chosen = best(rows, key=lambda row: row["score"])
            written = tomllib.loads((out / "experiment.toml").read_text("utf-8"))
            assert written["clipping"]["norm"] == chosen["clipping.norm"]
            assert f"{objective} {chosen['score']:.4f}" in said

    def test_noise_is_that_of_as_many_users_as_are_enrolled(self, tmp_path, monkeypatch) -> None:
        noise = []
        trained = module._trained

        def watched(experiment, transport):
            noise.append(experiment.plan.noise_multiplier)
            return trained(experiment, transport)

        monkeypatch.setattr(module, "_trained", watched)
        searched(tmp_path / "a", "public", trials=1)
        searched(tmp_path / "b", "public", trials=1, users=1200)
        # The noise on an average is z·S/(q·N).
        assert noise[1] == pytest.approx(noise[0] / 10)

    def test_trials_that_fail_are_worst_and_stop_nothing(self, tmp_path, monkeypatch) -> None:
        trained, calls = module._trained, []

        def failing(experiment, transport):
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("no")
            return trained(experiment, transport)

        monkeypatch.setattr(module, "_trained", failing)
        found = searched(tmp_path / "a", "public", trials=4)
        assert [each.score is None for each in found.tried] == [True, True, False, False]
        assert found.settings in [each.settings for each in found.tried[2:]]
        calls.clear()
        with pytest.raises(RunError, match="none of 2 trials ended"):
            searched(tmp_path / "b", "public", trials=2)

    def test_what_was_found_goes_into_simulate(self, tmp_path: Path) -> None:
        space = {"server.options.learning_rate": (0.5, 1.0), "rounds": [3], "clipping.norm": [0.3]}
        found = searched(tmp_path / "a", "public", space=space, server=FedAvg(0.7))
        assert found.tried[0].settings["server.options.learning_rate"] != 0.7  # 3 is not its T
        run = fedpriv.simulate(
            people(), Task(nn.Linear(4, 4)), out=tmp_path / "run", quiet=True, **found.arguments
        )
        assert len(run.rounds) == 3
        assert run.rounds[0].clipping_norms == {"update": 0.3}
        assert run.epsilon <= 4.0


class TestOnUsers:
    def test_one_charge_is_made_before_the_first_trial(self, tmp_path, monkeypatch) -> None:
        seen = []
        trained = module._trained

        def watched(experiment, transport):
            seen.append(events(tmp_path / "a" / "ledger.sqlite"))
            return trained(experiment, transport)

        monkeypatch.setattr(module, "_trained", watched)
        found = searched(tmp_path / "a", space={"rounds": [2, 3], "local.learning_rate": (0.1, 1)})
        charged = events(tmp_path / "a" / "ledger.sqlite")
        assert len(charged) == 1
        assert all(each == charged for each in seen)
        assert seen
        (event,) = charged
        assert [trial.rounds for trial in event.selection.trials] == [2, 3]
        assert (event.selection.mean, event.selection.shape) == (3.0, 1.0)
        price = ACCOUNTANTS["rdp"].epsilon(charged, 1e-3).epsilon
        assert found.epsilon == price <= 4.0
        # No noise is wasted: a hundredth less would pass the budget.
        trials = tuple(
            replace(trial, noise_multiplier=trial.noise_multiplier * 0.99)
            for trial in event.selection.trials
        )
        query = replace(event.queries[0], noise_stddev=event.queries[0].noise_stddev * 0.99)
        cheaper = replace(
            event, queries=(query,), selection=replace(event.selection, trials=trials)
        )
        assert ACCOUNTANTS["rdp"].epsilon([cheaper], 1e-3).epsilon > 4.0

    def test_trials_have_the_noise_that_was_charged(self, tmp_path, monkeypatch) -> None:
        plans = []
        trained = module._trained

        def watched(experiment, transport):
            plans.append(experiment.plan)
            return trained(experiment, transport)

        monkeypatch.setattr(module, "_trained", watched)
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 8)
        searched(tmp_path / "a", space={"rounds": [2, 3]})
        (event,) = events(tmp_path / "a" / "ledger.sqlite")
        charged = {trial.rounds: trial for trial in event.selection.trials}
        assert len(plans) == 8
        for plan in plans:
            trial = charged[plan.rounds]
            z = plan.mechanism.event.noise_multiplier
            assert trial.noise_multiplier <= z <= trial.noise_multiplier * (1 + 1e-6)
            assert plan.sampling.sampling_probability == trial.sampling_probability
        # Each trial draws cohorts and noise of its own.
        assert len({plan.run for plan in plans}) == 8

    def test_a_figure_of_public_rows_can_be_the_objective(
        self, tmp_path: Path, by_hand: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 4)
        given = {"figures": {"widest": widest}, "objective": "widest", "better": "smaller"}
        given["space"] = {"clipping.norm": (0.1, 1.0)}
        found = searched(tmp_path / "a", **given)
        assert len(set(by_hand)) == 4
        assert found.score == pytest.approx(min(by_hand), rel=1e-5)
        with pytest.raises(InvalidValueError, match="held_out_is_public is false"):
            searched(tmp_path / "b", held_out_is_public=False, **given)
        assert not (tmp_path / "b").exists()

    def test_only_the_best_is_released(self, tmp_path, monkeypatch, capfd) -> None:
        scores = iter([0.2, 0.9, 0.4, 0.9, 0.1])
        states = []

        def score(state):
            states.append(state)
            return next(scores)

        monkeypatch.setattr(module, "_scorer", lambda *_: score)
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 5)
        found = searched(tmp_path / "a", quiet=False)
        assert found.score == 0.9
        assert found.tried == ()
        from safetensors.numpy import load_file

        model = load_file(tmp_path / "a" / "model.safetensors")
        for name, tensor in states[1].model.items():
            np.testing.assert_array_equal(model[name], tensor)
        files = {path.name for path in (tmp_path / "a").iterdir()}
        assert files == {
            ".gitignore",
            "experiment.toml",
            "ledger.participation.sqlite",
            "ledger.sqlite",
            "model.safetensors",
        }
        told = capfd.readouterr()
        text = (tmp_path / "a" / "experiment.toml").read_text("utf-8") + told.out + told.err
        for said in ("0.2000", "0.4000", "0.1000", "trial 1", "of 5", "5 trials"):
            assert said not in text

    def test_trials_that_crash_count_as_worst_and_say_nothing(
        self, tmp_path, monkeypatch, capfd, caplog
    ) -> None:
        calls = []

        def failing(experiment, transport):
            calls.append(1)
            logging.getLogger("fedpriv.engine").warning("user 7 has cancer")
            raise ValueError("user 7 has cancer")

        monkeypatch.setattr(module, "_trained", failing)
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 3)
        found = searched(tmp_path / "a", quiet=False)
        assert len(calls) == 3
        assert (found.settings, found.score, found.arguments) == ({}, None, {})
        told = capfd.readouterr()
        assert "cancer" not in told.out + told.err + caplog.text
        assert len(events(tmp_path / "a" / "ledger.sqlite")) == 1

    def test_what_was_paid_for_waits_for_room_on_a_full_disk(self, tmp_path, monkeypatch) -> None:
        full, write = set(), module.write_atomically

        def full_at_first(path: Path, content: bytes) -> None:
            if path not in full:
                full.add(path)
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write(path, content)

        def no_room_at_first(*given: object) -> object:
            if "trial" not in full:
                full.add("trial")
                raise OSError(errno.ENOSPC, "No space left on device")
            return trained(*given)

        trained = module._trained
        monkeypatch.setattr(module, "_trained", no_room_at_first)
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 1)
        monkeypatch.setattr(module, "write_atomically", full_at_first)
        monkeypatch.setattr("time.sleep", lambda _: None)
        found = searched(tmp_path / "a")
        assert found.score is not None
        full.remove("trial")
        assert {path.name for path in full} == {"model.safetensors", "experiment.toml"}
        assert all(path.exists() for path in full)

    def test_settings_do_not_depend_on_scores(self, tmp_path, monkeypatch) -> None:
        """Adaptive searchers have no price: two searches with other scores draw the same."""
        drawn = []
        for first in (1.0, -1.0):
            settings, prepared = [], module.on_population

            def watched(config, run, *others, _s=settings, _p=prepared, **named):
                if run.startswith("trial-"):
                    _s.append(config.local.learning_rate)
                return _p(config, run, *others, **named)

            scores = iter([first, 0.0, 0.0, 0.0])
            with monkeypatch.context() as patch:
                patch.setattr(module, "on_population", watched)
                patch.setattr(module, "_scorer", lambda *_, s=scores: lambda *_: next(s))
                patch.setattr(module, "number_of_trials", lambda *_: 4)
                searched(tmp_path / str(first), seed=5)
            drawn.append(settings)
        assert len(set(drawn[0])) == 4
        assert drawn[0] == drawn[1]

    def test_trials_of_a_seed_share_neither_cohorts_nor_noise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn, key = list[tuple[str, bytes]](), SeededEntropy.key

        def watched(entropy: SeededEntropy, purpose: str) -> bytes:
            drawn.append((purpose, found := key(entropy, purpose)))
            return found

        monkeypatch.setattr(SeededEntropy, "key", watched)
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 3)
        searched(tmp_path / "a", seed=1)
        streams = [each for each in drawn if each[0].startswith(("sampling/", "noise/", "local/"))]
        assert len(streams) >= 3 * 2 * 3 > len({purpose for purpose, _ in streams})
        assert len(streams) == len({found for _, found in streams})

    def test_a_seed_is_recorded_and_warned_of(self, folder: Path) -> None:
        options = ("--on", "users", "--set", "seed=1", "--out", folder / "a")
        done = command("tune", "small.toml", *options, cwd=folder)
        assert "warning: seed is given" in done.stdout
        with Ledger.open(folder / "a" / "ledger.sqlite") as ledger:
            assert [row.randomness for row in ledger.charges()] == [Randomness.SEEDED]

    def test_runs_after_a_search_count_it(self, folder: Path) -> None:
        out = folder / "a"
        printed("tune", "small.toml", "--on", "users", "--out", out, cwd=folder)
        larger = ("--set", "privacy.epsilon=6.0", "--set", "rounds=2")
        printed("simulate", out / "experiment.toml", *larger, "--out", folder / "b", cwd=folder)
        charged = events(out / "ledger.sqlite")
        assert [event.selection is None for event in charged] == [False, True, True]
        budget = PrivacyBudget(6.0, 1e-3, ACCOUNTANTS["rdp"].upper_epsilon)
        assert 5.9 < budget.epsilon_of(charged) <= 6.0

    def test_runs_in_python_after_a_search_count_it(self, tmp_path: Path) -> None:
        found = searched(tmp_path / "a")
        assert found.arguments["ledger"] == str(tmp_path / "a" / "ledger.sqlite")
        with pytest.raises(InvalidValueError, match="must be larger"):
            fedpriv.simulate(
                people(), Task(nn.Linear(4, 4)), out=tmp_path / "run", quiet=True, **found.arguments
            )
        assert len(events(tmp_path / "a" / "ledger.sqlite")) == 1

    def test_a_search_that_released_nothing_has_another_exit_code(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "number_of_trials", lambda *_: 0)
        done = command("tune", "small.toml", "--on", "users", "--out", folder / "a", cwd=folder)
        assert (done.returncode, "no trial ended" in done.stdout) == (1, True)
        assert len(events(folder / "a" / "ledger.sqlite")) == 1

    def test_the_price_alone_charges_nothing(self, folder: Path) -> None:
        out = folder / "a"
        said = printed("tune", "small.toml", "--on", "users", "--price", "--out", out, cwd=folder)
        assert "The search will cost ε = 4.000 at δ = 0.001" in said or "ε = 3.99" in said
        assert not out.exists()

    def test_what_a_shared_ledger_holds_counts(self, folder: Path) -> None:
        shared = folder / "shared.sqlite"
        settings = ("--set", f"privacy.ledger={shared}", "--set", "privacy.accountant=rdp")
        alone = ("--set", "privacy.epsilon=1.0")
        printed("simulate", "small.toml", *settings, *alone, "--out", folder / "run", cwd=folder)
        printed("tune", "small.toml", *settings, "--on", "users", "--out", folder / "a", cwd=folder)
        charged = events(shared)
        assert [each.selection is None for each in charged] == [True] * 4 + [False]
        budget = PrivacyBudget(4.0, 1e-3, ACCOUNTANTS["rdp"].upper_epsilon)
        assert 3.9 < budget.epsilon_of(charged) <= 4.0
        # The default accountant has no analysis of what was charged.
        tight = ("--set", f"privacy.ledger={shared}", "--set", "privacy.epsilon=9")
        sentence = refused("simulate", "small.toml", *tight, "--out", folder / "b", cwd=folder)
        assert "privacy.accountant must be 'rdp'" in sentence
        listed = printed("ledger", "show", shared)
        assert "trials" in listed


@pytest.mark.parametrize(
    ("on", "settings", "said"),
    [
        ("users", ["tune.held_out_is_public=false"], "comparing them on private rows has no price"),
        ("users", ["tune.space={rounds={low=2,high=9}}"], "rounds is a range"),
        ("users", ["privacy.noise_multiplier=0.5"], "privacy.epsilon is 4.0 and must be larger"),
        ("users", ["tune.trials=1"], "the mean number of trials is 1.0"),
        ("users", ["federated_evaluation={noise_multiplier=9.0}"], "federated_evaluation is given"),
        ("public", ["tune.objective=auc"], "tune.objective is 'auc'"),
        (
            "public",
            ["tune.objective=mine", 'evaluation.figures={mine="mine:widest"}'],
            "tune.better is absent",
        ),
        (
            "users",
            ["tune.objective=mine", 'evaluation.figures={mine="mine:widest"}'],
            "tune.better is absent",
        ),
        (
            "users",
            ["tune.objective=m", "tune.better=larger", 'evaluation.figures={m="confusion"}'],
            "tune.objective is 'm', which is not one number",
        ),
        ("public", ["tune.better=higher"], "tune.better is 'higher'"),
        ("public", ["tune.space={rounds=[]}"], "tune.space.rounds is empty"),
        ("public", ["tune.space={rounds={low=9,high=2}}"], "low is 9 and high is 2"),
        ("public", ['tune.space={"privacy.epsilon"=[1,2]}'], "which no trial may change"),
        ("public", ["tune.space={seed=[1,2]}"], "tune.space has seed, which no trial may change"),
        ("users", ["tune.space={privacy=[{unit='example'}]}"], "tune.space has privacy, which no"),
        ("users", ["tune.space={'clipping.nrm'=[0.5]}"], "unknown key clipping.nrm"),
        ("users", ["tune.space={'clipping.strategy'=['flat','typo']}"], "'typo'"),
        ("users", ["tune.space={'clipping.norm'={low=0.1,high=1e31}}"], "clipping_norm"),
        ("users", ["tune.space={'sampling.policy'=['poisson','every-user']}"], "every-user"),
        ("public", ["tune.space={'clipping.norm'=[1979-05-27]}"], "its values must be numbers"),
        ("public", ["tune.space={'clipping.norm'=[0.5,-1]}"], "clipping.norm is -1; it must be"),
        ("public", ['tune.public.name="mine:nobody"'], "nobody"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_spent(
    folder: Path, on: str, settings: list[str], said: str
) -> None:
    given = [word for setting in settings for word in ("--set", setting)]
    out = folder / "out"
    assert said in refused("tune", "small.toml", "--on", on, *given, "--out", out, cwd=folder)
    assert not out.exists()


def test_options_that_do_not_go_together_are_refused(folder: Path) -> None:
    both = ("tune", "small.toml", "--on")
    assert "costs nothing" in refused(*both, "public", "--price", cwd=folder)
    (folder / "bare.toml").write_text(FILE.partition("[tune]")[0], encoding="utf-8")
    assert "tune.public is absent" in refused("tune", "bare.toml", "--on", "public", cwd=folder)


def test_a_folder_that_holds_a_search_is_not_used_again(folder: Path) -> None:
    for on in ("public", "users"):
        printed("tune", "small.toml", "--on", on, "--out", folder / on, cwd=folder)
        again = command("tune", "small.toml", "--on", on, "--out", folder / on, cwd=folder)
        assert (again.returncode, again.stdout) == (2, "")  # not even a price, which takes long
        assert "holds a search already" in again.stderr
    assert len(events(folder / "users" / "ledger.sqlite")) == 1
    run = folder / "run"
    run.mkdir()
    (run / "plan.toml").write_text("")
    sentence = refused("tune", "small.toml", "--on", "public", "--out", run, cwd=folder)
    assert "holds a run already" in sentence


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"clipping.norm": (0.1, 0.5, 1.0)}, "it must be a pair (low, high) of numbers or a list"),
        ({"clipping.norm": ()}, "space has () for clipping.norm"),
        ({"clipping.norm": (1,)}, "space has (1,) for clipping.norm"),
        ({"clipping.norm": ("a", "b")}, "for clipping.norm; it must be a pair"),
        ({"clipping.norm": 3}, "space has 3 for clipping.norm"),
        ({"clipping.norm": "ab"}, "space has 'ab' for clipping.norm"),
        ({"clipping.norm": {0.5, 1.0}}, "for clipping.norm; it must be a pair"),
        ({3: [1]}, "space has 3, which is not a key"),
        (3, "space is of the type int"),
        ({"server.options.learning_rate": [StepDecay(1.0, 0.5, 2)]}, "must be numbers, text, true"),
        ({"clipping.norm": [0.5, {1}]}, "tune.space.clipping.norm has {1}"),
    ],
)
@pytest.mark.parametrize("on", ["public", "users"])
def test_a_space_that_cannot_be_searched_is_refused_before_any_trial(
    tmp_path: Path, on: str, space: Any, said: str
) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(said)):
        searched(tmp_path / "a", on, space=space)
    assert not (tmp_path / "a").exists()


def test_ranges_are_pairs_and_all_other_values_are_lists(tmp_path: Path) -> None:
    space = {"clipping.norm": np.array([0.25, 0.5]), "rounds": range(2, 4)}
    space["server.options.learning_rate"] = (np.float32(0.5), 1)
    found = searched(tmp_path / "a", "public", space=space, seed=0)
    for each in found.tried:
        assert each.settings["clipping.norm"] in (0.25, 0.5)
        assert each.settings["rounds"] in (2, 3)
        assert 0.5 <= each.settings["server.options.learning_rate"] <= 1.0


def test_python_refuses_what_is_no_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"unknown key local\.nothing"):
        searched(tmp_path / "a", "public", space={"local.nothing": [1]})
    with pytest.raises(InvalidValueError, match="on is 'user'"):
        searched(tmp_path / "a", "user")
    with pytest.raises(InvalidValueError, match="the mechanism has no budget"):
        searched(tmp_path / "a", mechanism=Mechanism.poisson(q=0.5, clipping=Flat(0.5)))
    torch.manual_seed(0)
