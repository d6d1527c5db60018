"""The suite of tasks: what an arm leaves, when it is trained again, and that tools are alike."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import fedpriv
from simulations.datasets.shakespeare import load_speakers
from simulations.suite import __main__ as command
from simulations.suite import report
from simulations.suite.arms import PRIVACY, Arm, digest, ours, train
from simulations.suite.tasks import TASKS, guess
from tests.simulations.plays import plays_in

SHORT = Arm("digits", "2", "fedpriv", 0, rounds=2)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str, code: int = 0) -> list[Arm]:
    """Arms that a command starts, none of which trains; each ends with the code."""
    started = []

    def start(line, **_options):
        started.append(Arm(**json.loads(line[3])))
        return subprocess.CompletedProcess(line, code)

    monkeypatch.setattr(subprocess, "run", start)
    chosen = ["digits", "--privacy", "2", "--tools", "fedpriv", "--seeds", "1", *arguments]
    monkeypatch.setattr("sys.argv", ["suite", *chosen, "--out", str(out)])
    assert command.main() == bool(started and code)
    return started


def test_an_arm_leaves_its_result_and_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = train(SHORT, tmp_path / "arms", ours)
    kept = json.loads((tmp_path / "arms" / "digits_2_fedpriv_0_2.json").read_text())
    assert kept == json.loads(json.dumps(found))
    assert 1.9 < kept["epsilon"] <= 2.0
    assert (kept["users"], kept["parameters"]) == (287, 650)
    assert kept["score"] > 1.5 * kept["guess"]
    assert run(monkeypatch, tmp_path, "--rounds", "2") == []
    assert "finished before" in capsys.readouterr().out
    (arm,) = report.read(tmp_path)
    assert arm["command"].endswith("digits --privacy 2 --tools fedpriv --seeds 1 --rounds 2")
    assert (tmp_path / "accuracy.png").stat().st_size > 1_000
    other = run(monkeypatch, tmp_path, "--rounds", "3", code=1)
    assert other == [Arm("digits", "2", "fedpriv", 0, rounds=3)]


def test_arms_are_all_tools_settings_and_seeds_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    chosen = ["--privacy", "none", "8", "--tools", "fedpriv", "pfl", "--seeds", "2"]
    started = run(monkeypatch, tmp_path, *chosen, code=1)
    assert [(arm.seed, arm.privacy, arm.tool) for arm in started] == [
        (seed, privacy, tool)
        for seed in (0, 1)
        for privacy in ("none", "8")
        for tool in ("fedpriv", "pfl")
    ]


def test_without_pfl_its_arms_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    started = run(monkeypatch, tmp_path, "--tools", "fedpriv", "pfl", code=1)
    assert [arm.tool for arm in started] == ["fedpriv"]
    assert "pfl is not installed" in capsys.readouterr().out


def test_as_if_there_were_a_million_the_users_who_are_there_pay_more(tmp_path: Path) -> None:
    found = train(Arm("digits", "2-as-if", "fedpriv", 0, rounds=2), tmp_path, ours)
    assert found["epsilon"] <= 2.0
    assert found["enrolled_epsilon"] > 100.0
    assert found["settings"]["delta"] == 1e-6


def test_without_privacy_nothing_is_clipped(tmp_path: Path) -> None:
    mechanism = PRIVACY["none"].mechanism(TASKS["digits"](), 287)
    assert mechanism.noise_multiplier == 0.0
    assert mechanism.clipping == fedpriv.Flat(float("inf"))
    assert mechanism.sampling == fedpriv.Poisson(86 / 287)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_be_said_in_the_words_of_both_tools(name: str) -> None:
    task = TASKS[name]()
    assert task.local.epochs
    assert (task.local.momentum, task.local.proximal, task.local.max_examples) == (0.0, 0.0, None)
    assert task.cohort <= task.noise_cohort < 1_000_000
    assert 1e-6 <= task.delta <= 1e-3


def test_scores_and_guesses_by_hand() -> None:
    x = np.zeros((4, 1), np.float32)
    y = np.array([0, 1, 1, 1])
    people = fedpriv.Population.from_arrays(x, y, np.arange(4), held_out=(x, 1 - y))
    assert guess(TASKS["digits"](), people) == 0.25
    y = y.astype(np.float32)
    people = fedpriv.Population.from_arrays(x, y, np.arange(4), held_out=(x, y + 2.0))
    severity = TASKS["parkinsons"]()
    assert guess(severity, people) == pytest.approx(10.0 * np.sqrt(4.0 + 3.0 / 16.0))
    assert severity.score(2.25, None) == 15.0
    both = report.Cell("parkinsons", "2", "pfl", [{"score": 14.0}, {"score": 16.0}])
    assert both.text == "15.0 ± 1.4"
    assert report.Cell("digits", "2", "pfl", [{"score": 0.5}]).text == "50.0%"


def test_words_of_held_out_plays_are_the_vocabulary(tmp_path: Path) -> None:
    plays_in(tmp_path)
    people = load_speakers(words=14, folder=tmp_path)
    assert people.users.population == 30 * 3
    x, y = people.users.fields["x"], people.users.fields["y"]
    assert x.shape[1] == 20
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    # Of twelve words and marks that all say equally often, ten are known.
    assert np.unique(x).tolist() == [1, *range(4, 14)]
    assert np.mean(x == 1) == pytest.approx(2 / 12, abs=0.02)
    assert set(people.test["x"].ravel()) == set(x.ravel())


def test_a_digest_is_of_all_rows_of_each_user() -> None:
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3)
    one = digest([(x, y)])
    assert one == digest([(x.copy(), y.copy())])
    assert one != digest([(x[:2], y[:2]), (x[2:], y[2:])])
    assert one != digest([(x, y[::-1])])


def test_pfl_is_given_the_same_users() -> None:
    pytest.importorskip("pfl", reason="pfl is in the environment of `make suite`")
    from simulations.suite.rival import users_of

    people = TASKS["digits"]().population()
    given = users_of(people)
    assert len(given) == 287
    for user, (start, end) in enumerate(
        zip(people.users.offsets[:-1], people.users.offsets[1:], strict=True)
    ):
        for tensor, name in zip(given[user].raw_data, ("x", "y"), strict=True):
            np.testing.assert_array_equal(tensor, people.users.fields[name][start:end])


def test_committed_results_compare_like_with_like() -> None:
    arms = report.read(report.RESULTS)
    pairs = 0
    by = {(a["task"], a["settings"]["rounds"], a["privacy"], a["seed"], a["tool"]): a for a in arms}
    assert len(by) == len(arms)
    for (task, rounds, privacy, seed, tool), theirs in by.items():
        if tool != "pfl":
            continue
        found = by[task, rounds, privacy, seed, "fedpriv"]
        same = ("users", "users_sha256", "parameters", "noise_multiplier", "settings", "machine")
        assert {name: found[name] for name in same} == {name: theirs[name] for name in same}
        if PRIVACY[privacy].epsilon is not None:
            assert found["epsilon"] <= PRIVACY[privacy].epsilon
            assert found["epsilon"] == pytest.approx(theirs["epsilon"], rel=0.01)
        pairs += 1
    assert pairs > 40


def test_results_of_other_numbers_of_rounds_stand_apart(tmp_path: Path) -> None:
    arms = report.read(report.RESULTS)
    (short,) = (arm for arm in arms if arm["task"] == "cifar-iid" and arm["tool"] == "pfl")
    whole = short | {"score": 0.6, "settings": short["settings"] | {"rounds": 1_500}}
    found = report.cells([whole, *(arm for arm in arms if arm is not whole)])
    parts = [cell.part for cell in found if cell.task == "cifar-iid" and cell.tool == "pfl"]
    assert parts == [("cifar-iid", "100 of 1,500"), ("cifar-iid", "1,500")]
    page = report.page(report.PAGE.read_text(encoding="utf-8"), found)
    rows = [line for line in page.splitlines() if line.startswith("| CIFAR-10 |")]
    assert ["| 100 of 1,500 |" in row for row in rows] == [True, False]
    assert "|  | pfl | 60.0% |" in page


def test_the_committed_page_is_of_the_committed_numbers() -> None:
    found = report.cells(report.read(report.RESULTS))
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.page(text, found)
    assert text.count("fedpriv |") == len({cell.part for cell in found})
