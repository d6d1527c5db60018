"""Data sets of people: sensors worn by subjects, voices of patients, a census.

Each person is a user with all of its rows. Held-out rows belong to people who are not users; where
they have many rows, the rows name their person, for figures by person. Inputs are scaled by
constants of physics, of medicine or of the questionnaire, never by statistics of the users' data,
which would be a release without a charge. All tasks on the same people have one name in the ledger,
so their costs add up.

Sources: HAR by M. Matey-Sanz, S. Casteleyn, C. Granell, https://doi.org/10.5281/zenodo.8398688,
CC BY 4.0. Parkinsons by A. Tsanas, M. A. Little, P. E. McSharry, L. O. Ramig,
https://doi.org/10.24432/C5ZS3N, CC BY 4.0. Census: Fulton County, Georgia, in the Public Use
Microdata Sample of 2000; public domain.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays
from fedpriv.data.columns import Array, read_npz
from fedpriv.data.population import HELD_OUT_USER, Population, check_count
from fedpriv.errors import DataError, InvalidValueError, known_names
from simulations.datasets.files import find_file, read_csv

Floats = NDArray[np.float64]

HAR_FILE = "har_raw.npz"
ACTIVITIES = ("seated", "standing up", "walking", "turning", "sitting down")
_HAR_HELD_OUT = (19, 20, 21, 22, 23)
_HAR_SOURCE = "the recordings are at https://doi.org/10.5281/zenodo.8398688, see load_har"
_HAR_DEVICES = {"phone": "sp", "watch": "sw"}
_WINDOW = 128  # samples, at 100 Hz
_GRAVITY, _HALF_TURN = 9.81, np.pi  # m/s² and rad/s
# Rough sizes of mean, standard deviation, minimum, maximum and mean absolute difference between
# neighbours in people who move, in the units above. Round numbers, not computed from data.
_STATISTIC_SIZES = (1.0, 0.25, 1.0, 1.0, 0.05)

PARKINSONS_FILES = ("parkinsons_updrs.data.gz", "parkinsons_updrs.data")
_PARKINSONS_SOURCE = "it is no. 189 of the UCI repository, https://doi.org/10.24432/C5ZS3N"
_PATIENT = "subject#"
_EVERY = 5
# Centre and size of the target: points that are common early in the disease, on scales that end
# at 108 and 176. Round numbers, considered public: the patients' own means are published and close.
_UPDRS = {"motor_UPDRS": (20.0, 10.0), "total_UPDRS": (30.0, 10.0)}
# Positive and skewed, so they enter as logarithms of their ratio to a usual value: for jitter and
# shimmer the thresholds of Kay's Multi-Dimensional Voice Program, or else round numbers.
_USUAL = {
    "Jitter(%)": 0.0104,
    "Jitter(Abs)": 83.2e-6,
    "Jitter:RAP": 0.0068,
    "Jitter:PPQ5": 0.0084,
    "Jitter:DDP": 0.0204,
    "Shimmer": 0.0381,
    "Shimmer(dB)": 0.35,
    "Shimmer:APQ3": 0.02,
    "Shimmer:APQ5": 0.02,
    "Shimmer:APQ11": 0.0307,
    "Shimmer:DDA": 0.06,
    "NHR": 0.02,
}
# Centre and size of the others: round numbers, also considered public.
_LINEAR = {
    "HNR": (20.0, 5.0),
    "RPDE": (0.5, 0.1),
    "DFA": (0.65, 0.1),
    "PPE": (0.2, 0.1),
    "age": (65.0, 10.0),
    "sex": (0.5, 0.5),
    "test_time": (90.0, 90.0),
}

CENSUS_FILE = "FultonPUMS5full.csv"
CENSUS_TARGETS = ("employed", "income")
YES_OR_NO = (
    *("sex", "latino", "black", "asian", "married", "divorced", "uscitizen", "children"),
    *("disability", "militaryservice", "employed", "englishability"),
)
INCOME = 50_000  # dollars a year, above which y is 1
_CENSUS_SOURCE = (
    f"it is data/{CENSUS_FILE} of https://github.com/privacytoolsproject/cs208, "
    "of the US census of 2000"
)
_AGES = (25, 35, 45, 55, 65, 75)  # first ages of groups
_LEVELS = 16  # of education, from 1
_CENSUS_PART = 10  # one in ten people is held out


def load_har(
    folder: str | Path | None = None, device: str = "watch", inputs: str = "features"
) -> Population:
    """Load recordings of 23 people with a phone or a watch: 18 users, and 5 held out.

    The recordings are those of Matey-Sanz et al. 2023 ("Dataset of inertial measurements of
    smartphones and smartwatches", doi 10.1016/j.dib.2023.109809), in windows of 128 samples at 100
    Hz that overlap by half. y is the window's commonest activity, int64 in 0..4, by `ACTIVITIES`.
    Subjects 19 to 23 are held out.

    With inputs "windows", x is float32 [rows, 6, 128]: acceleration on three axes in units of
    gravity (9.81 m/s²), and rotation in half turns a second. With "features" it is float32
    [rows, 40]: mean, standard deviation, minimum, maximum and mean absolute change from one sample
    to the next of those six and of both magnitudes, divided by constants of this module.

    The folder (None: FEDPRIV_DATA), or one `har_phone_watch` in it, holds har_raw.npz. For the
    device sp (phone) or sw (watch) that has `sp_x`, numbers [samples, 6] in m/s² and rad/s, and of
    each window the integers `sp_win_start` (its first sample), `sp_win_label`, `sp_win_subject`.
    """
    _check_choice("device", device, _HAR_DEVICES)
    _check_choice("inputs", inputs, ("features", "windows"))
    path = find_file(folder, "HAR", (HAR_FILE,), "har_phone_watch", _HAR_SOURCE)
    samples, start, y, subject = _read_har(path, _HAR_DEVICES[device])
    units = np.repeat(np.array([_GRAVITY, _HALF_TURN], np.float32), 3)
    windows = (samples / units)[start[:, np.newaxis] + np.arange(_WINDOW)].transpose(0, 2, 1)
    x = _features(windows) if inputs == "features" else np.ascontiguousarray(windows)
    return _population("har", "subjects", path, x, y, subject, np.isin(subject, _HAR_HELD_OUT))


def load_parkinsons(folder: str | Path | None = None, target: str = "total_UPDRS") -> Population:
    """Load recordings of 42 voices with Parkinson's disease: 34 patients are users, 8 held out.

    The data are those of Tsanas et al. 2009 ("Accurate telemonitoring of Parkinson's disease
    progression by non-invasive speech tests"): 101 to 168 recordings of each patient. Every fifth
    patient, from the fifth, is held out. x is float32 [rows, 19]: 16 measures of the voice, age,
    sex and days since the start. Positive and skewed measures enter as the natural logarithm of
    their ratio to a constant of this module.

    The target is "motor_UPDRS" or "total_UPDRS", the severity in points. y is float32 [rows, 1],
    for the loss "mse": tens of points above 20 (motor) or 30 (total).

    The folder (None: FEDPRIV_DATA), or its subfolder `parkinsons`, holds UCI's
    parkinsons_updrs.data, or the same with .gz.
    """
    _check_choice("target", target, _UPDRS)
    path = find_file(folder, "Parkinsons", PARKINSONS_FILES, "parkinsons", _PARKINSONS_SOURCE)
    columns = read_csv(path, [_PATIENT, *_USUAL, *_LINEAR, target])
    for name in _USUAL:
        if columns[name].min() <= 0.0:
            raise DataError(f"{path} holds a {name} that is not positive")
    patient = columns[_PATIENT].astype(np.int64)
    if patient.min() < 1 or np.any(patient != columns[_PATIENT]):
        raise DataError(f"{path} holds a {_PATIENT} that is not a whole number from 1")
    logarithms = [np.log(columns[name] / usual) for name, usual in _USUAL.items()]
    linear = [(columns[name] - centre) / size for name, (centre, size) in _LINEAR.items()]
    x = np.stack([*logarithms, *linear], axis=1).astype(np.float32)
    centre, size = _UPDRS[target]
    y = ((columns[target] - centre) / size).astype(np.float32)[:, np.newaxis]
    return _population("parkinsons", "patients", path, x, y, patient, patient % _EVERY == 0)


def find_census(folder: str | Path | None = None) -> Path:
    """Return the census's file in a folder (None: FEDPRIV_DATA), or its subfolder `census_pums`."""
    return find_file(folder, "the census", (CENSUS_FILE,), "census_pums", _CENSUS_SOURCE)


def load_census(
    folder: str | Path | None = None, target: str = "employed", seed: int = 0
) -> Population:
    """Load people of Fulton County, Georgia, in the US census of 2000: each is a user with one row.

    A tenth of 25,766 adults, drawn by the seed, is held out. The target is "employed", or
    "income": whether it is above $50,000. y is int64 in 0..1, and x float32 0 or 1, one-hot by
    `census_facts`: [rows, 45] of 13 facts, or with the fact employed [rows, 47] for incomes. Ids
    are positions in the file.

    The folder (None: FEDPRIV_DATA), or its subfolder `census_pums`, holds FultonPUMS5full.csv.
    """
    _check_choice("target", target, CENSUS_TARGETS)
    random = np.random.default_rng(check_count("seed", seed, least=0))
    path = find_census(folder)
    columns = read_csv(path, ["age", "educ", "income", *YES_OR_NO])
    if not all(np.isin(columns[name], (0.0, 1.0)).all() for name in YES_OR_NO):
        raise DataError(f"{path} holds another answer than 0 and 1 in one of {list(YES_OR_NO)}")
    if not np.isin(columns["educ"], range(1, _LEVELS + 1)).all():
        raise DataError(f"{path} holds an educ that is not a whole number in 1..{_LEVELS}")
    people = len(columns["age"])
    held_out = np.zeros(people, bool)
    held_out[random.permutation(people)[: people // _CENSUS_PART]] = True
    rich = columns["income"] > INCOME
    y = (columns["employed"] == 1.0 if target == "employed" else rich).astype(np.int64)
    x = census_facts(columns, [name for name in YES_OR_NO if name != target])
    population = _population("census", "people", path, x, y, np.arange(people), held_out)
    # With one row per person, figures by person would be meaningless.
    test = {field: rows for field, rows in population.test.items() if field != HELD_OUT_USER}
    return Population(f"{population.name}, seed {seed}", population.users, test)


def census_facts(
    columns: Mapping[str, Floats], yes_or_no: Sequence[str] = YES_OR_NO
) -> NDArray[np.float32]:
    """Return one-hot facts float32 [rows, 23 + 2·answers]: 7 groups of ages, 16 of education.

    Ages are grouped from 25, 35, … 75 years; each answer has a column for no and one for yes.
    """
    age = np.eye(len(_AGES) + 1)[np.digitize(columns["age"], _AGES)]
    school = np.eye(_LEVELS)[columns["educ"].astype(int) - 1]
    answers = [np.eye(2)[columns[name].astype(int)] for name in yes_or_no]
    facts: NDArray[np.float32] = np.hstack([age, school, *answers]).astype(np.float32)
    return facts


def _population(
    name: str,
    people: str,
    path: Path,
    x: Array,
    y: Array,
    person: NDArray[np.int64],
    held_out: NDArray[np.bool_],
) -> Population:
    """Return a population of the people who are not held out, and the others as held-out rows.

    The target is not part of the name, because charges for all targets must add up.
    """
    if held_out.all() or not held_out.any():
        raise DataError(f"{path} must hold {people} who are users and {people} who are held out")
    users = from_arrays({"x": x[~held_out], "y": y[~held_out]}, person[~held_out])
    test = {"x": x[held_out], "y": y[held_out], HELD_OUT_USER: person[held_out]}
    return Population(f"{name}: {users.population} {people}", users, test)


def _check_choice(name: str, value: object, choices: Sequence[str] | Mapping[str, object]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidValueError(f"{name} is {value!r}; {known_names(str(value), choices)}")


def _read_har(
    path: Path, device: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return samples [samples, 6], and each window's first sample, activity and subject: [rows]."""
    arrays = read_npz(path)
    names = [f"{device}_{field}" for field in ("x", "win_start", "win_label", "win_subject")]
    if missing := [name for name in names if name not in arrays]:
        raise DataError(f"{path} has no array {missing[0]!r}")
    samples, *of_windows = (arrays[name] for name in names)
    if samples.dtype.kind != "f" or samples.shape[1:] != (6,):
        kind = f"{samples.dtype}{list(samples.shape)}"
        raise DataError(f"{names[0]!r} in {path} is {kind}; it must be floats [samples, 6]")
    if not np.isfinite(samples).all():
        raise DataError(f"{names[0]!r} in {path} holds a number that is not finite")
    shapes = {array.shape for array in of_windows}
    if len(shapes) != 1 or any(a.dtype.kind not in "iu" or a.ndim != 1 for a in of_windows):
        raise DataError(f"{names[1:]} in {path} must be lists of as many integers each")
    for name, array, end in (
        (names[1], of_windows[0], len(samples) - _WINDOW + 1),
        (names[2], of_windows[1], len(ACTIVITIES)),
    ):
        if array.size and not 0 <= array.min() <= array.max() < end:
            raise DataError(f"{name!r} in {path} must lie in [0, {end})")
    start, label, subject = (array.astype(np.int64) for array in of_windows)
    return samples.astype(np.float32), start, label, subject


def _features(windows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each statistic of eight channels, one after the other: [rows, 6, 128] → [rows, 40]."""
    rows = windows.reshape(len(windows), 2, 3, _WINDOW)
    magnitudes = np.sqrt(np.square(rows).sum(axis=2))
    channels = np.concatenate([windows, magnitudes], axis=1)
    statistics = (
        channels.mean(axis=2),
        channels.std(axis=2),
        channels.min(axis=2),
        channels.max(axis=2),
        np.abs(np.diff(channels, axis=2)).mean(axis=2),
    )
    scaled = [values / size for values, size in zip(statistics, _STATISTIC_SIZES, strict=True)]
    return np.concatenate(scaled, axis=1).astype(np.float32)
