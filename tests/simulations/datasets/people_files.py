"""Made-up files of HAR, Parkinsons and the census, of the right form."""

import gzip

import numpy as np

from simulations.datasets.people import CENSUS_FILE, HAR_FILE, PARKINSONS_FILES, YES_OR_NO

FILES = {"har": HAR_FILE, "parkinsons": PARKINSONS_FILES[0], "census": CENSUS_FILE}

VOICE = [
    *("Jitter(%)", "Jitter(Abs)", "Jitter:RAP", "Jitter:PPQ5", "Jitter:DDP"),
    *("Shimmer", "Shimmer(dB)", "Shimmer:APQ3", "Shimmer:APQ5", "Shimmer:APQ11", "Shimmer:DDA"),
    *("NHR", "HNR", "RPDE", "DFA", "PPE"),
]
PARKINSONS = ["subject#", "age", "sex", "test_time", "motor_UPDRS", "total_UPDRS", *VOICE]


def har(subjects=(1, 2, 19, 2), labels=(0, 4, 2, 3)):
    """Arrays of both devices with a window every 64 samples."""
    draw = np.random.default_rng(0)
    count = 128 + 64 * (len(subjects) - 1)
    arrays = {}
    for device in ("sp", "sw"):
        arrays[f"{device}_x"] = draw.normal(0, 5, (count, 6)).astype(np.float32)
        arrays[f"{device}_win_start"] = 64 * np.arange(len(subjects), dtype=np.int32)
        arrays[f"{device}_win_label"] = np.array(labels, np.uint8)
        arrays[f"{device}_win_subject"] = np.array(subjects, np.uint8)
    return arrays


def table(names, rows):
    lines = [",".join(f'"{name}"' for name in names)]
    return "\n".join([*lines, *(",".join(map(str, row)) for row in rows)]) + "\n"


def patients(count=11, each=3):
    """Rows of the Parkinsons file: whole columns of numbers that tell rows apart."""
    rows = []
    for patient in range(1, count + 1):
        for number in range(each):
            voice = [0.01 * (1 + patient + number)] * len(VOICE)
            rows.append([patient, 60 + patient, patient % 2, number, 20 + patient, 30.0, *voice])
    return rows


CENSUS = ["state", "age", "educ", "income", *YES_OR_NO]


def adults(count=40):
    draw = np.random.default_rng(1)
    answers = draw.integers(0, 2, (count, len(YES_OR_NO)))
    educ, income = draw.integers(1, 17, count), draw.integers(0, 100_001, count)
    return [[13, 18 + n, educ[n], income[n], *answers[n]] for n in range(count)]


def write(name, place, content=None):
    """A data set's file, well-formed unless its content is given."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / FILES[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name == "har":
        np.savez(path, **(content or har()))
    elif name == "parkinsons":
        path.write_bytes(gzip.compress((content or table(PARKINSONS, patients())).encode()))
    else:
        path.write_text(content or table(CENSUS, adults()))
    return path
