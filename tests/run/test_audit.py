"""Runs that audit themselves: what is kept and said, and what canaries leave as it was."""

import json
import logging
import re
import shutil
import stat
from functools import cache
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import fedpriv
from fedpriv.audit.canaries import Canaries
from fedpriv.data.population import load_population
from fedpriv.errors import DataError, InvalidValueError, RefutedError
from fedpriv.experiment.models import build_model
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import record_path
from fedpriv.privacy import gaussian_mechanism
from fedpriv.privacy.clipping import Clipping
from fedpriv.run.auditor import Auditor
from fedpriv.run.folder import RunFolder, read_run
from fedpriv.training.rounds import RoundResult, Stop
from tests.commandline import fedpriv as commanded
from tests.commandline import printed, refused

FILE = """
name = "audited"
rounds = 4
seed = 1
[data]
name = "digits"
options = { users = 40 }
[model]
name = "softmax"
options = { inputs = 64, classes = 10 }
[local]
batch_size = "all"
epochs = 1
[clipping]
norm = 0.5
[privacy]
sampling_probability = 0.5
epsilon = 2.0
delta = 1e-2
[audit]
canaries = 60
"""
TRAINING = '[local]\nbatch_size = "all"\nepochs = 1\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "audited.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def rewritten(file: Path, *changes: tuple[str, str]) -> Path:
    text = file.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return file


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished run of the file, and what it printed last."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "audited.toml").write_text(FILE, encoding="utf-8")
    said = last_line(printed("simulate", folder / "audited.toml", "--out", folder / "run"))
    return folder / "run", said


def test_a_run_says_what_its_releases_show(audited: tuple[Path, str]) -> None:
    out, said = audited
    assert said.startswith("audit: ε ≥ ")
    assert re.search(r"at 95% confidence, claimed ≤ (2\.000|1\.99\d): consistent$", said)
    folder = RunFolder(out)
    # Only the owner can tell canaries from users.
    assert stat.S_IMODE(folder.measurements.stat().st_mode) == 0o600
    found = folder.read_audit()
    assert found is not None
    assert found.text == said.removeprefix("audit: ")
    assert (found.canaries, found.rounds, len(found.scores)) == (60, 4, 60)
    assert 15 <= found.included <= 45
    assert json.loads(folder.audit.read_text("utf-8"))["refutations"] == []
    assert read_run(out).audit == found
    page = Path(printed("report", out).strip()).read_text("utf-8")
    assert found.text in page
    assert "Scores of included and of excluded canaries" in page
    verified = printed(
        "ledger",
        "verify",
        out / "ledger.sqlite",
        "--participation",
        record_path(out / "ledger.sqlite"),
    )
    assert "4" in verified
    with Ledger.open(folder.ledger) as ledger:
        (event,) = {row.event for row in ledger.charges()}
    assert (event.sampling.population, event.sampling.canaries) == (40, 60)
    assert event.sampling.expected_cohort_size == 20.0


def test_the_report_rounds_lower_bounds_down(audited: tuple[Path, str], tmp_path: Path) -> None:
    out = Path(shutil.copytree(audited[0], tmp_path / "run"))
    folder = RunFolder(out)
    found = json.loads(folder.audit.read_text("utf-8")) | {"epsilon_low": 0.8819, "mu_low": 0.3499}
    folder.audit.write_text(json.dumps(found), "utf-8")
    page = Path(printed("report", out).strip()).read_text("utf-8")
    assert "ε ≥ 0.881 at δ = 0.01, with 95% confidence (μ-GDP with μ ≥ 0.349)" in page


@cache
def calibrated() -> fedpriv.Mechanism:
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.5))
    return mechanism.calibrate(epsilon=2.0, delta=1e-2, rounds=4, users=40)


def test_python_has_the_same_audit(audited: tuple[Path, str], tmp_path: Path) -> None:
    run = fedpriv.simulate(
        load_population("digits", {"users": 40}),
        fedpriv.Task(build_model("softmax", {"inputs": 64, "classes": 10}, 0)),
        calibrated(),
        local=fedpriv.SGD(0.3, epochs=1),
        server=fedpriv.FedAvg(),
        audit=fedpriv.Audit(canaries=60),
        seed=1,
        out=tmp_path / "run",
        quiet=True,
    )
    assert run.audit is not None
    assert run.audit == RunFolder(audited[0]).read_audit()
    run.check()


def first_result(folder: Path) -> RoundResult:
    return RunFolder(folder).results()[0]


def test_canaries_leave_metrics_counts_and_adaptive_clipping_as_they_are(
    file: Path, tmp_path: Path
) -> None:
    settings = ("--set", "metrics.report={loss={bound=3.0}}", "--set", "clipping.adaptive={}")
    printed("simulate", file, *settings, "--out", tmp_path / "with")
    plain = rewritten(file, ("[audit]\ncanaries = 60\n", ""))
    printed("simulate", plain, *settings, "--out", tmp_path / "without")
    audited, alone = (first_result(tmp_path / name) for name in ("with", "without"))
    assert audited.metrics == alone.metrics
    assert audited.metrics_noise_stddev == alone.metrics_noise_stddev
    assert audited.unclipped == alone.unclipped
    assert audited.epsilon == alone.epsilon
    assert audited.loss != alone.loss  # they do move the model


def test_without_canaries_that_are_there_the_model_is_that_of_a_run_without_audit(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = property(lambda canaries: np.zeros(canaries.count, np.bool_))
    monkeypatch.setattr(Canaries, "included", nobody)
    printed("simulate", file, "--out", tmp_path / "with")
    printed(
        "simulate", rewritten(file, ("[audit]\ncanaries = 60\n", "")), "--out", tmp_path / "without"
    )
    models = [(tmp_path / name / "model.safetensors") for name in ("with", "without")]
    from safetensors.numpy import load_file

    audited, alone = map(load_file, models)
    for name, tensor in alone.items():
        assert np.array_equal(audited[name], tensor)


def interrupt_after(round_number: int):
    def stop(result: RoundResult) -> None:
        if result.round == round_number:
            raise KeyboardInterrupt

    return stop


def audited_run(out: Path, **given: object) -> fedpriv.Run:
    return fedpriv.simulate(
        load_population("digits", {"users": 40}),
        fedpriv.Task(build_model("softmax", {"inputs": 64, "classes": 10}, 0)),
        calibrated(),
        audit=fedpriv.Audit(canaries=60),
        out=out,
        quiet=True,
        **given,
    )


@pytest.fixture(scope="module")
def after_two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        audited_run(out, trackers=[interrupt_after(2)])
    return out


@pytest.fixture
def interrupted(after_two_rounds: Path, tmp_path: Path) -> Path:
    """The folder of a run that was interrupted after two of four rounds."""
    return Path(shutil.copytree(after_two_rounds, tmp_path / "run"))


def test_a_resumed_run_goes_on_with_its_canaries(interrupted: Path) -> None:
    out = interrupted
    folder = RunFolder(out)
    key = next(folder.read_measurements())["key"]
    assert not folder.audit.exists()
    run = audited_run(out, resume=True)
    assert next(folder.read_measurements())["key"] == key
    assert run.audit is not None
    assert run.audit.rounds == 4


def test_a_round_that_is_repeated_after_a_crash_counts_as_what_it_released(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        audited_run(out, trackers=[interrupt_after(3)], checkpoint_every=2)
    run = audited_run(out, resume=True, checkpoint_every=2)
    # Round 3 was released twice, each time with a charge, and nothing is left for round 4.
    rows = [*RunFolder(out).read_measurements()][1:]
    assert [(row["round"], row["attempt"]) for row in rows] == [(1, 0), (2, 0), (3, 0), (3, 1)]
    assert run.stop is Stop.BUDGET
    assert run.audit is not None
    assert run.audit.rounds == 4


def test_an_audit_whose_file_is_gone_is_not_begun_anew(interrupted: Path) -> None:
    out = interrupted
    measurements = RunFolder(out).measurements
    kept = measurements.read_text("utf-8")
    measurements.unlink()
    with pytest.raises(DataError, match=r"audit\.jsonl is missing"):
        audited_run(out, resume=True)
    measurements.write_text(kept.replace('"canaries":60', '"canaries":61'), "utf-8")
    with pytest.raises(DataError, match=r"audit\.jsonl is not from an audit of this plan"):
        audited_run(out, resume=True)
    measurements.write_text(kept, "utf-8")
    audited_run(out, resume=True)


def test_an_audit_whose_file_is_damaged_is_refused_before_more_is_spent(interrupted: Path) -> None:
    out = interrupted
    folder = RunFolder(out)
    kept = folder.measurements.read_bytes()
    head, *rows = kept.splitlines(keepends=True)
    heads = [b"\xff\xfe\n", b"[]\n", b"3\n", head.replace(b'"key":"', b'"key":"zz')]
    heads += [head.replace(b'"key"', b'"kee"'), head.replace(b'"bound":', b'"bound":"x","b":')]
    firsts = [b"\xff\n", b"[]\n", b"{}\n", rows[0].replace(b'"scores":"', b'"scores":"A')]
    for damaged in [bad + b"".join(rows) for bad in heads] + [head + bad for bad in firsts]:
        folder.measurements.write_bytes(damaged)
        with pytest.raises(DataError, match=r"audit\.jsonl is damaged"):
            audited_run(out, resume=True)
    assert len(folder.releases()) == 2
    folder.measurements.write_bytes(kept)
    assert audited_run(out, resume=True).audit is not None


POLICIES = {
    "random-allocation": (
        "sampling.policy=random-allocation", "sampling.options={rounds=2,participations=1}"
    ),
    "every-user": ("sampling.policy=every-user",),
    "separated": ("sampling.policy=separated", "sampling.options={rounds=4,separation=2}"),
    "banded": (
        "sampling.policy=separated", "sampling.options={rounds=4,separation=2}",
        "noise.correlation=banded",
    ),
    "buffered": (
        "sampling.policy=separated", "sampling.options={rounds=4,separation=2}",
        "noise.correlation=buffered",
    ),
    "per-layer": ("privacy.sampling_probability=0.5", "clipping.strategy=per-layer"),
    "joint": ("privacy.sampling_probability=0.5", "clipping.strategy=joint"),
    "weights": (
        "privacy.sampling_probability=0.5",
        "averaging={cap=5,total_weight=40.0}",
    ),
    "examples": (
        "privacy.sampling_probability=0.3", "sampling.policy=poisson-examples",
        "sampling.options={examples_per_user=3}",
    ),
    "unit": ("privacy.sampling_probability=0.1", "privacy.unit=example"),
}  # fmt: skip


SLOW = ("examples", "random-allocation", "unit")


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in POLICIES],
)
def test_every_policy_with_a_statistic_is_audited(file: Path, tmp_path: Path, policy: str) -> None:
    rewritten(file, ("sampling_probability = 0.5\n", ""))
    if policy in ("examples", "unit"):
        rewritten(file, (TRAINING, ""))
    out = tmp_path / "run"
    settings = [part for each in POLICIES[policy] for part in ("--set", each)]
    assert "consistent" in last_line(printed("simulate", file, *settings, "--out", out))
    found = RunFolder(out).read_audit()
    assert found is not None
    assert found.rounds == 4
    assert 0.0 <= found.epsilon_low <= found.epsilon
    there, scores = np.array(found.there), np.array(found.scores)
    assert scores[there].mean() > scores[~there].mean()
    printed(
        "ledger",
        "verify",
        out / "ledger.sqlite",
        "--participation",
        record_path(out / "ledger.sqlite"),
    )


REFUSED = {
    "audit.canaries=19": "canaries is 19",
    "audit.canaries=0": "audit: canaries is 0; it must be in",
    "audit.canaries=1000000000": "canaries is 1000000000",
    "audit.canary=5": "unknown key audit.canary",
    "averaging.floor=0.5": "audit is given and averaging.floor is 0.5",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_audited_is_refused_with_nothing_spent(
    file: Path, tmp_path: Path, setting: str
) -> None:
    assert REFUSED[setting] in refused("simulate", file, "--set", setting, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_policies_without_a_statistic_are_refused(file: Path, tmp_path: Path) -> None:
    without_coins = rewritten(file, ("sampling_probability = 0.5\n", ""))
    fixed = (
        "--set", "sampling.policy=fixed-size", "--set", "sampling.options={cohort_size=9}"
    )  # fmt: skip
    said = refused("simulate", without_coins, *fixed, "--out", tmp_path / "r")
    assert "audit is given and neighbours are replace-one" in said
    assert not (tmp_path / "r").exists()


def test_there_must_be_noise(file: Path, tmp_path: Path) -> None:
    settings = ("privacy.noise_multiplier=0.0", "privacy.unsafe_no_privacy=true")
    given = [part for each in settings for part in ("--set", each)]
    said = refused("simulate", file, *given, "--out", tmp_path / "r")
    assert "audit is given and there is no noise" in said


def test_a_search_is_not_audited(file: Path, tmp_path: Path) -> None:
    said = refused("tune", file, "--on", "public", "--out", tmp_path / "t")
    assert "audit is given; it must be absent" in said


def test_too_few_canaries_for_a_claim_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt  # before anybody trains

    monkeypatch.setattr(Auditor, "beside", interrupt)
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(0.5))
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        fedpriv.simulate(
            load_population("digits", {"users": 40}),
            fedpriv.Task(build_model("softmax", {"inputs": 64, "classes": 10}, 0)),
            mechanism.calibrate(epsilon=8.0, delta=1e-2, rounds=1, users=40),
            audit=fedpriv.Audit(canaries=20),
            out=tmp_path / "run",
            quiet=True,
        )
    (said,) = [each for each in caplog.messages if "canaries" in each]
    assert "20 canaries can show ε ≥ " in said
    assert "so they cannot refute ε ≤ 8.00; more are needed" in said


def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = gaussian_mechanism.rounded_gaussian
    monkeypatch.setattr(
        gaussian_mechanism,
        "rounded_gaussian",
        lambda key, count, stddev: drawn(key, count, stddev / 2.0),
    )


def unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_rounded(clipping: Clipping, rows: np.ndarray, weights: np.ndarray) -> None:
        rows /= clipping.in_units(np.ones(rows.shape[1]))
        np.rint(rows, out=rows)

    monkeypatch.setattr(Clipping, "clip_rows", only_rounded)


def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = gaussian_mechanism.rounded_gaussian
    monkeypatch.setattr(
        gaussian_mechanism,
        "rounded_gaussian",
        lambda _key, count, stddev: drawn(bytes(32), count, stddev),
    )


FAULTS = {
    halved: "the noise is weaker than charged",
    unclipped: "guesses about canaries are right",
    repeated: "noise was used twice",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_program_that_leaks_more_than_it_charges_is_refuted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault
) -> None:
    fault(monkeypatch)
    given = ("--set", "audit.canaries=800", "--set", "rounds=8")
    alone = ("--set", "engine.processes=1")
    done = commanded("simulate", file, *given, *alone, "--out", tmp_path / "run")
    assert done.returncode == 3
    assert FAULTS[fault] in last_line(done.stdout)
    assert "audit: " in last_line(done.stdout)
    assert done.stderr.startswith(f"error: the audit of {tmp_path / 'run'} found ε ≥ ")
    page = Path(printed("report", tmp_path / "run").strip()).read_text("utf-8")
    assert "What was released contradicts the ledger" in page


def test_python_returns_what_was_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halved(monkeypatch)
    run = audited_run(tmp_path / "run")
    assert run.audit is not None
    assert not run.audit.consistent
    with pytest.raises(RefutedError, match="the noise is weaker than charged"):
        run.check()


def test_a_value_that_is_no_number_of_canaries_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"it must be in \[20, 100000\]"):
        fedpriv.Audit(canaries=5)
