"""One run of a study: its result is true, its figures are those of the folder, nothing is left."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.data.population import load_population
from fedpriv.errors import DataError, FedprivError, InvalidValueError
from fedpriv.experiment.config import load_config
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.run import compare
from fedpriv.run.compare import calibrated, run_cell, run_study
from fedpriv.run.folder import RunFolder
from fedpriv.run.simulate import run_simulation
from fedpriv.studies import Cell, RunResult, Study
from fedpriv.studies.results import RESULT, read_results, results_text
from fedpriv.studies.study import load_study, study_of_settings, study_toml
from tests.studies.studying import BASE, result, study_file


def run(study: Study, cell: Cell, folder: Path, noise_multiplier: float) -> RunResult:
    _, result = run_cell(study, cell, folder, noise_multiplier)
    return result


def cohorts(folder: RunFolder) -> list[tuple[int, ...]]:
    record = record_path(folder.ledger)
    with Ledger.open(folder.ledger) as ledger, ParticipationRecord.open(record) as participation:
        commitments = [row.cohort_commitment for row in ledger.charges()]
        return [tuple(participation.users_of(one).tolist()) for one in commitments]


def test_a_result_is_what_ledger_model_and_metrics_say(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    cell = study.cells[-1]
    result = run(study, cell, tmp_path, calibrated(study)[cell.arm, cell.target])
    folder = RunFolder(tmp_path / cell.path)
    assert read_results(folder.path / RESULT) == [result]
    with Ledger.open(folder.ledger) as ledger:
        spent = ledger.spent()
    assert result.epsilon == epsilon(spent, 1e-2).epsilon <= 8.0
    for event in spent:
        assert event.noise_multiplier == pytest.approx(result.noise_multiplier, rel=1e-12)
    rows = list(folder.read_metrics())
    assert result.evaluations == tuple((r["round"], r["accuracy"]) for r in rows)
    assert (result.rounds, result.accuracy, result.loss) == (
        2,
        rows[-1]["accuracy"],
        rows[-1]["loss"],
    )
    test = load_population("synthetic", study.config_of(cell).data.options).test
    model = load_file(folder.model)
    scores = test["x"].reshape(len(test["x"]), -1) @ model["1.weight"].T + model["1.bias"]
    assert result.accuracy == np.mean(scores.argmax(1) == test["y"])
    figures = folder.collected()
    for name in ("clipped", "update_norms", "signal_to_noise"):
        of_rounds = [getattr(row, f"simulation_only_{name}") for row in figures]
        (key,) = of_rounds[0]
        mean = getattr(result, f"simulation_only_{name}")[key]
        assert mean == pytest.approx(np.mean([row[key] for row in of_rounds]))


def test_arms_of_a_seed_have_the_same_users_and_seeds_have_others(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    drawn = {}
    for cell in study.cells:
        run(study, cell, tmp_path, 2.0)
        drawn[cell.arm.name, cell.seed] = cohorts(RunFolder(tmp_path / cell.path))
    assert drawn["flat", 0] == drawn["joint", 0]
    assert drawn["flat", 1] == drawn["joint", 1]
    assert drawn["flat", 0] != drawn["flat", 1]
    assert len(drawn["flat", 0]) == 2


def test_the_same_settings_and_seed_release_the_same_whatever_they_are_called(
    tmp_path: Path,
) -> None:
    """In a study or alone, with or without a name for the ledger."""
    results, models = [], []
    for name in ("tiny-study", "another"):
        (tmp_path / name).mkdir()
        study = load_study(study_file(tmp_path / name, name=name, base=BASE | {"name": name}))
        cell = study.cells[-1]
        found = run(study, cell, tmp_path / name, 2.0)
        results.append(replace(found, settings="", simulation_only_users_per_second=0.0))
        models.append(load_file(RunFolder(tmp_path / name / cell.path).model))
    assert results[0] == results[1]
    plan = tmp_path / "another" / cell.path / "plan.toml"
    assert load_config(plan).run == "another-joint-seed1"
    renamed = load_config(plan, ["name=third", "run=mine"])
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(renamed.model_dump(exclude_none=True)))
    run_simulation(tmp_path / "plan.toml", [], tmp_path / "mine", resume=False)
    models.append(load_file(RunFolder(tmp_path / "mine").model))
    for name, released in models[0].items():
        for model in models[1:]:
            np.testing.assert_array_equal(model[name], released)
    with Ledger.open(RunFolder(tmp_path / "mine").ledger) as ledger:
        assert {charge.run for charge in ledger.charges()} == {"mine"}


def test_a_run_that_was_cut_short_is_done_again_and_releases_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(study_file(tmp_path))
    cell = study.cells[0]

    noise_multiplier = calibrated(study)[cell.arm, cell.target]
    charge = Ledger.charge

    def killed(ledger: Ledger, proposed: ProposedCharge, *others: object) -> object:
        if proposed.round == 2:
            raise KeyboardInterrupt
        return charge(ledger, proposed, *others)

    monkeypatch.setattr(Ledger, "charge", killed)
    with pytest.raises(KeyboardInterrupt):
        run(study, cell, tmp_path, noise_multiplier)
    monkeypatch.undo()
    folder = RunFolder(tmp_path / cell.path)
    (half,) = folder.read_metrics()
    assert read_results(folder.path / RESULT) == []
    result = run(study, cell, tmp_path, noise_multiplier)
    assert result.rounds == 2
    rows = list(folder.read_metrics())
    same = ("round", "attempt", "epsilon", "loss", "accuracy")
    assert [rows[0][name] for name in same] == [half[name] for name in same]
    with Ledger.open(folder.ledger) as ledger:
        assert len(list(ledger.charges())) == 2
    kept = folder.path.with_name(f"{folder.path.name}.cut-1")
    with Ledger.open(RunFolder(kept).ledger) as ledger:
        assert len(list(ledger.charges())) == 1
    plan = tomllib.loads(folder.plan.read_text())
    assert plan["privacy"]["noise_multiplier"] == result.noise_multiplier


def test_a_run_that_was_finished_meanwhile_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = study_file(tmp_path)
    study, folder = load_study(file), tmp_path / "study"
    noise = calibrated(study)

    def beside_another_process(study: Study, _: object) -> object:
        cell = study.cells[0]
        run(study, cell, folder, noise[cell.arm, cell.target])
        return noise

    monkeypatch.setattr(compare, "calibrated", beside_another_process)
    with pytest.raises(InvalidValueError, match="finished meanwhile"):
        run_study(file, folder, 1)
    (finished,) = folder.glob("runs/*/*/*")
    assert (finished / RESULT).exists()


def test_a_run_on_other_files_of_the_same_names_does_not_stand(tmp_path: Path) -> None:
    def of_site(site: str) -> Path:
        options = {part: f"{site}/{part}.jsonl" for part in ("train", "test")}
        data = {"name": "hugging-face", "options": {"user_column": "u"} | options}
        (tmp_path / "base.toml").write_text(tomli_w.dumps(BASE | {"data": data}))
        return study_file(tmp_path, base="base.toml")

    file, out = of_site("a"), tmp_path / "out"
    study = load_study(file)
    for cell in study.cells:
        (out / cell.path).mkdir(parents=True)
        (out / cell.path / RESULT).write_text(results_text([result(study, cell, out)]))
    (out / "study.toml").write_text(study_toml(study, out))
    run_study(file, out, 1)  # no run is missing
    with pytest.raises(DataError, match="holds a run with settings that differ"):
        run_study(of_site("b"), out, 1)
    assert load_study(out / "study.toml") == study


def test_every_arm_has_the_least_noise_of_its_own_rounds_and_sampling(tmp_path: Path) -> None:
    axes = {"rounds": [1, 20], "privacy.sampling_probability": [0.1, 1.0]}
    study = load_study(study_file(tmp_path, axes=axes))
    noise = {arm.name: z for (arm, _), z in calibrated(study).items()}
    assert len(set(noise.values())) == 4
    for cell in study.cells:
        config, z = study.config_of(cell), noise[cell.arm.name]
        q = config.privacy.sampling_probability
        spent = epsilon([poisson_gaussian(q, z, config.rounds)], 1e-2).epsilon
        less = epsilon([poisson_gaussian(q, 0.995 * z, config.rounds)], 1e-2).epsilon
        assert spent <= 8.0 < less


def test_arms_that_cannot_be_built_or_calibrated_are_refused_by_name(tmp_path: Path) -> None:
    for assignment, words in (
        ("model.options.hidden=3", "arm 'bad': model 'softmax' has no option 'hidden'"),
        ("data.name=nobody", "arm 'bad': population 'nobody' is unknown"),
        ("model.personal=['1.bias']", "arm 'bad': .*so nothing would be measured; personalisation"),
        ("clipping.split={x=1.0}", "arm 'bad': clipping norms and parts differ"),
    ):
        study = load_study(
            study_file(
                tmp_path,
                axes={
                    "a": {
                        "good": ["clipping.strategy=per-layer"],
                        "bad": [assignment, "clipping.strategy=per-layer"],
                    }
                },
            )
        )
        with pytest.raises(FedprivError, match=words):
            calibrated(study)
    study = load_study(study_file(tmp_path, target={"epsilon": 1e-9, "delta": 1e-9}))
    with pytest.raises(InvalidValueError, match=r"arm 'flat': .* no noise multiplier"):
        calibrated(study)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("fixed-size", "{cohort_size=2}"), ("every-user", "{relation='replace-one'}")],
)
def test_arms_for_other_neighbours_are_refused(tmp_path: Path, policy: str, options: str) -> None:
    q = "privacy.sampling_probability"
    privacy = {key: value for key, value in BASE["privacy"].items() if f"privacy.{key}" != q}
    other = [f"sampling.policy={policy}", f"sampling.options={options}"]
    axes = {"policy": {"coins": [f"{q}=0.5"], "other": other}}
    study = load_study(study_file(tmp_path, axes=axes, base=BASE | {"privacy": privacy}))
    sentence = "arms 'coins' and 'other' are for add-or-remove-one and replace-one neighbours"
    with pytest.raises(InvalidValueError, match=sentence):
        calibrated(study)


def test_a_name_that_cannot_be_one_of_a_folder_is_refused_in_one_sentence() -> None:
    with pytest.raises(InvalidValueError, match="name is 'one model'"):
        study_of_settings({"one model": {"privacy": {"epsilon": 1.0, "delta": 1e-3}}}, name="s")
