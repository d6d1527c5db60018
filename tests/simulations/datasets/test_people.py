"""Tests of HAR, Parkinsons and the census: on small made-up files, and on the real ones."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedpriv.data import load_population
from fedpriv.errors import DataError, InvalidValueError
from simulations.datasets.people import YES_OR_NO, load_census, load_har, load_parkinsons
from tests.simulations.datasets.people_files import (
    CENSUS,
    FILES,
    PARKINSONS,
    adults,
    har,
    patients,
    table,
    write,
)

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "data"
REAL = Path(os.environ.get("FEDPRIV_DATA", SHARED))
INSIDE = {"har": "har_phone_watch", "parkinsons": "parkinsons", "census": "census_pums"}
LOADERS = {"har": load_har, "parkinsons": load_parkinsons, "census": load_census}


def slow_features(window):
    """One window [128, 6] in m/s² and rad/s; statistics by their definitions."""
    channels = [window[:, axis] / (9.81 if axis < 3 else np.pi) for axis in range(6)]
    channels += [sum(c**2 for c in channels[i : i + 3]) ** 0.5 for i in (0, 3)]
    found = [sum(c) / 128 for c in channels]
    found += [(sum((c - sum(c) / 128) ** 2) / 128) ** 0.5 / 0.25 for c in channels]
    found += [min(c) for c in channels] + [max(c) for c in channels]
    return found + [sum(abs(c[1:] - c[:-1])) / 127 / 0.05 for c in channels]


@pytest.mark.parametrize("device", ["phone", "watch"])
def test_subjects_are_users_of_windows_in_units_of_gravity_and_half_turns(tmp_path, device):
    arrays = har()
    write("har", tmp_path, arrays)
    population = load_har(tmp_path, device, "windows")
    samples = arrays["sp_x" if device == "phone" else "sw_x"]
    units = [9.81] * 3 + [np.pi] * 3
    windows = [samples[64 * row : 64 * row + 128].T / np.array(units)[:, None] for row in range(4)]
    users = population.users
    assert [users.id_of(user) for user in range(users.population)] == ["1", "2"]
    np.testing.assert_allclose(users.examples_of(0)["x"], [windows[0]], rtol=1e-6)
    np.testing.assert_allclose(users.examples_of(1)["x"], [windows[1], windows[3]], rtol=1e-6)
    assert users.examples_of(1)["y"].tolist() == [4, 3]
    np.testing.assert_allclose(population.test["x"], [windows[2]], rtol=1e-6)
    assert population.test["y"].tolist() == [2]
    assert population.test["held_out_user"].tolist() == [19]
    kinds = {name: field.dtype for name, field in users.fields.items()}
    assert kinds == {"x": np.float32, "y": np.int64}
    assert population.name == "har: 2 subjects"


def test_features_are_the_statistics_of_each_window(tmp_path):
    arrays = har()
    write("har", tmp_path, arrays)
    population = load_har(tmp_path)
    for user, rows in ((0, [0]), (1, [1, 3])):
        slow = [slow_features(arrays["sw_x"][64 * r : 64 * r + 128].astype(float)) for r in rows]
        np.testing.assert_allclose(population.users.examples_of(user)["x"], slow, atol=2e-5)


def test_patients_are_users_and_every_fifth_is_held_out(tmp_path):
    write("parkinsons", tmp_path)
    population = load_parkinsons(tmp_path)
    users = population.users
    enrolled = [patient for patient in range(1, 12) if patient % 5]
    assert [users.id_of(user) for user in range(users.population)] == list(map(str, enrolled))
    assert users.sizes.tolist() == [3] * 9
    assert population.name == "parkinsons: 9 patients"
    # Ages are 60 and the patient's number, and age is the fifth from last of 19 inputs.
    ages = np.round(65 + 10 * population.test["x"][:, 16]).tolist()
    assert ages == [65] * 3 + [70] * 3
    assert population.test["held_out_user"].tolist() == [5] * 3 + [10] * 3
    # Patient 1 has measures of 0.02 in the first row, and of 0.03 in the second.
    x = users.examples_of(0)["x"]
    np.testing.assert_allclose(x[1, :12] - x[0, :12], np.log(1.5), rtol=1e-4)
    np.testing.assert_allclose(x[0, 0], np.log(0.02 / 0.0104), rtol=1e-5)
    assert x.shape == (3, 19)
    assert population.test["held_out_user"].tolist() == [5] * 3 + [10] * 3


@pytest.mark.parametrize(("target", "tens"), [("motor_UPDRS", 0.4), ("total_UPDRS", 0.0)])
def test_severity_is_in_tens_of_points(tmp_path, target, tens):
    write("parkinsons", tmp_path)
    y = load_parkinsons(tmp_path, target).users.examples_of(3)["y"]
    assert (y.shape, y.dtype) == ((3, 1), np.float32)
    np.testing.assert_allclose(y, tens, rtol=1e-6)


def test_the_file_of_uci_may_be_compressed_or_not(tmp_path):
    (tmp_path / "parkinsons_updrs.data").write_text(table(PARKINSONS, patients()))
    assert load_parkinsons(tmp_path).users.population == 9


@pytest.mark.parametrize("target", ["employed", "income"])
def test_people_are_users_of_one_row_whose_facts_do_not_tell_the_target(tmp_path, target):
    rows = adults()
    write("census", tmp_path, table(CENSUS, rows))
    population = load_census(tmp_path, target, seed=3)
    users = population.users
    assert users.population == 36
    assert set(users.sizes.tolist()) == {1}
    assert population.name == "census: 36 people, seed 3"
    asked = [name for name in YES_OR_NO if name != target]
    for user in range(36):
        row = dict(zip(CENSUS, rows[int(users.id_of(user))], strict=True))
        mine = users.examples_of(user)
        facts = {min(6, max(0, (row["age"] - 15) // 10)), 7 + row["educ"] - 1}
        facts |= {23 + 2 * place + row[name] for place, name in enumerate(asked)}
        assert set(np.flatnonzero(mine["x"][0])) == facts
        assert mine["x"].sum() == len(facts) == 2 + len(asked)
        assert mine["y"][0] == (row["employed"] if target == "employed" else row["income"] > 50_000)
    assert len(population.test["y"]) == 4
    assert population.test.keys() == {"x", "y"}


def test_who_is_held_out_depends_on_the_seed_and_not_on_what_is_asked(tmp_path):
    write("census", tmp_path)
    ids = {
        (target, seed): tuple(load_census(tmp_path, target, seed).users.user_ids)
        for target in ("employed", "income")
        for seed in (0, 1)
    }
    assert ids["employed", 0] == ids["income", 0] != ids["income", 1]
    # So charges for both targets must meet in one ledger, which knows people by this name.
    assert load_census(tmp_path, "employed").name == load_census(tmp_path, "income").name


@pytest.mark.parametrize("name", LOADERS)
def test_folder_is_itself_or_its_parent_given_or_in_the_environment(name, tmp_path, monkeypatch):
    place = tmp_path / INSIDE[name]
    write(name, place)
    given = LOADERS[name](tmp_path)
    for named in (place, tmp_path):
        monkeypatch.setenv("FEDPRIV_DATA", str(named))
        found = load_population(f"simulations.datasets.people:load_{name}", {})
        assert found.name == given.name
        np.testing.assert_array_equal(found.users.fields["x"], given.users.fields["x"])


@pytest.mark.parametrize("name", LOADERS)
def test_no_folder_and_an_absent_file_are_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDPRIV_DATA", raising=False)
    with pytest.raises(DataError, match=f"^no folder for .* FEDPRIV_DATA .*{FILES[name]}"):
        LOADERS[name]()
    with pytest.raises(DataError, match=f"{FILES[name]}.* is absent from .* and .*https://") as got:
        LOADERS[name](tmp_path)
    assert "\n" not in str(got.value)


def har_with(**changed):
    return {**har(), **{f"sw_{name}": value for name, value in changed.items()}}


def of_patients(column, value):
    rows = patients()
    rows[4][PARKINSONS.index(column)] = value
    return table(PARKINSONS, rows)


def of_adults(column, value):
    rows = adults()
    rows[4][CENSUS.index(column)] = value
    return table(CENSUS, rows)


NOT_FINITE = np.full((320, 6), np.nan, np.float32)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("har", b"secret", "cannot be read as an .npz file"),
        ("har", {"sp_x": np.zeros((3, 6))}, "has no array 'sw_x'"),
        ("har", har_with(x=np.zeros((320, 5), np.float32)), "is float32.*must be floats"),
        ("har", har_with(x=np.zeros((320, 6), np.int32)), "is int32.*must be floats"),
        ("har", har_with(x=NOT_FINITE), "a number that is not finite"),
        ("har", har_with(win_label=np.arange(3)), "must be lists of as many integers each"),
        ("har", har_with(win_label=np.zeros(4)), "must be lists of as many integers each"),
        ("har", har_with(win_label=np.array([0, 1, 2, 5])), r"win_label' .* lie in \[0, 5\)"),
        ("har", har_with(win_start=np.array([0, 1, 2, 193])), r"win_start' .* in \[0, 193\)"),
        ("har", har_with(win_start=np.array([0, 1, 2, -1])), r"win_start' .* in \[0, 193\)"),
        ("har", har(subjects=(1, 2, 3, 4)), "subjects who are users and subjects who are held out"),
        ("har", har(subjects=(19, 20)[:2], labels=(0, 1)), "subjects who are users and"),
        ("parkinsons", b"secret", "cannot be read as a table of numbers"),
        ("parkinsons", b"", "cannot be read: its first line does not name .*'subject#'"),
        ("parkinsons", "secret\n1\n", "its first line does not name the column 'subject#'"),
        ("parkinsons", table(PARKINSONS, []), "has no rows"),
        ("parkinsons", of_patients("age", "secret"), "cannot be read as a table of numbers"),
        ("parkinsons", of_patients("age", "nan"), "a number that is not finite"),
        ("parkinsons", of_patients("NHR", 0), "a NHR that is not positive"),
        ("parkinsons", of_patients("subject#", 2.5), "a subject# that is not a whole number"),
        ("parkinsons", table(PARKINSONS, patients(4)), "patients who are users and"),
        ("census", "", "cannot be read: its first line does not name the column 'age'"),
        ("census", "secret", "its first line does not name the column 'age'"),
        ("census", b"\xff\xfe", "cannot be read as a table of numbers"),
        ("census", table(CENSUS, []), "has no rows"),
        ("census", of_adults("income", "secret"), "cannot be read as a table of numbers"),
        ("census", of_adults("sex", 2), "another answer than 0 and 1"),
        ("census", of_adults("educ", 17), "an educ that is not a whole number in 1..16"),
        ("census", of_adults("educ", 2.5), "an educ that is not a whole number in 1..16"),
        ("census", table(CENSUS, adults(9)), "people who are users and people who are held out"),
    ],
    ids=lambda value: "" if isinstance(value, (str, bytes, dict)) else None,
)
def test_a_damaged_file_is_named_and_not_quoted(tmp_path, name, content, sentence):
    path = write(name, tmp_path, content.encode() if content == "" else content)
    with pytest.raises(DataError, match=sentence) as got:
        LOADERS[name](tmp_path)
    assert str(path) in str(got.value)
    assert "secret" not in str(got.value)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("har", {"device": "wach"}, "device is 'wach'"),
        ("har", {"inputs": 3}, "inputs is 3"),
        ("parkinsons", {"target": "UPDRS"}, "target is 'UPDRS'"),
        ("census", {"target": ["income"]}, r"target is \['income'\]"),
        ("census", {"seed": -1}, "seed is -1"),
        ("census", {"folder": 3}, "folder is 3"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(tmp_path, monkeypatch, name, options, sentence):
    write(name, tmp_path)
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    with pytest.raises((DataError, InvalidValueError), match=sentence):
        load_population(f"simulations.datasets.people:load_{name}", options)


@pytest.fixture
def real(request):
    name = request.param
    for place in (REAL, REAL / INSIDE[name]):
        if (place / FILES[name]).is_file():
            return place
    pytest.skip(f"{FILES[name]} is absent: set FEDPRIV_DATA to the folder that holds it")


@pytest.mark.parametrize("real", ["har"], indirect=True)
def test_real_har_has_the_published_numbers_and_features(real):
    population = load_har(real, "phone")
    assert population.users.population == 18
    assert population.users.rows + len(population.test["y"]) == 3_714
    watch = load_har(real, "watch")
    assert watch.users.rows + len(watch.test["y"]) == 3_771
    kept = real / "har_features.npz"
    if not kept.is_file():
        pytest.skip("har_features.npz is absent")
    arrays = np.load(kept)
    mine = (arrays["device"] == 1) & (arrays["subject"] >= 19)
    ours = watch.test["x"].reshape(-1, 5, 8)
    units = np.array([9.81] * 3 + [np.pi] * 3 + [9.81, np.pi])
    sizes = np.array([1.0, 0.25, 1.0, 1.0, 0.05])[:, None]
    theirs = arrays["X"][mine].reshape(-1, 5, 8)
    np.testing.assert_allclose(ours * sizes * units, theirs, atol=1e-4)
    np.testing.assert_array_equal(watch.test["y"], arrays["y"][mine])


@pytest.mark.parametrize("real", ["parkinsons"], indirect=True)
def test_real_parkinsons_has_the_published_numbers(real):
    population = load_parkinsons(real)
    assert population.users.population == 34
    assert population.users.rows + len(population.test["y"]) == 5_875
    assert 101 <= population.users.sizes.min() <= population.users.sizes.max() <= 168
    # Scaled by public constants, inputs are still about as large as if standardised.
    assert 0.5 < population.users.fields["x"].std() < 1.5


@pytest.mark.parametrize("real", ["census"], indirect=True)
def test_the_real_census_has_the_published_shares(real):
    population = load_census(real)
    y = np.concatenate([population.users.fields["y"], population.test["y"]])
    assert len(y) == 25_766
    assert round(y.mean(), 3) == 0.628
