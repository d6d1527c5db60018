"""The server's own rows: those of a file or of the configured data; a bad file is one sentence."""

import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import DataError
from fedpriv.experiment.config import Config, FederationSection
from fedpriv.run.run import held_out_rows

CONFIG = Config.model_validate(
    {
        "name": "n",
        "rounds": 1,
        "data": {"name": "digits", "options": {"users": 10, "seed": 0}},
        "model": {"name": "softmax"},
        "local": {"learning_rate": 0.1, "steps": 1},
        "privacy": {"sampling_probability": 0.5, "delta": 1e-3, "epsilon": 1.0},
        "clipping": {"norm": 1.0},
    }
)
ROWS = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "y": np.arange(4)}


def section(path: Path | None) -> FederationSection:
    return FederationSection(enrolment="e.toml", held_out=None if path is None else str(path))


def test_rows_of_a_file_are_read_as_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", **ROWS)
    rows, _ = held_out_rows(CONFIG, section(tmp_path / "rows.npz"))
    assert list(rows) == list(ROWS)
    for name, array in ROWS.items():
        np.testing.assert_array_equal(rows[name], array)
        assert rows[name].dtype == array.dtype


def test_without_a_file_they_are_those_of_the_configured_data() -> None:
    rows, _ = held_out_rows(CONFIG, section(None))
    counts = {array.shape[0] for array in rows.values()}
    assert len(counts) == 1
    assert counts != {0}


def of_objects(path: Path) -> None:
    np.savez(path, x=np.array([object()]), y=np.arange(1))


def test_a_zip_of_something_else_has_no_rows(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as file:
        file.writestr("x.npy", "no array")
        file.writestr("y", "nor here")
    with pytest.raises(DataError, match="is not an array whose first axis is the rows"):
        held_out_rows(CONFIG, section(tmp_path / "rows.npz"))


def one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(3))


def absent(path: Path) -> None:
    pass


BROKEN: dict[str, Callable[[Path], object]] = {
    "absent": absent,
    "a folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "nonsense": lambda path: path.write_bytes(b"nonsense" * 100),
    "one array": one_array,
    "objects": of_objects,
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    path = tmp_path / "rows.npz"
    BROKEN[case](path)
    with pytest.raises(DataError, match=r"rows\.npz cannot be read as an \.npz file") as caught:
        held_out_rows(CONFIG, section(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"x": np.zeros((3, 2)), "y": np.zeros(4)},
        {"x": np.zeros((0, 2)), "y": np.zeros(0)},
    ],
)
def test_fields_without_rows_or_of_different_numbers_are_refused(
    tmp_path: Path, rows: dict[str, np.ndarray]
) -> None:
    np.savez(tmp_path / "rows.npz", **rows)
    with pytest.raises(DataError, match="all need the same number, at least one"):
        held_out_rows(CONFIG, section(tmp_path / "rows.npz"))


def test_a_number_has_no_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((3, 2)), y=np.zeros(()))
    with pytest.raises(DataError, match=r"'y' in .*rows.npz is not an array whose first axis is"):
        held_out_rows(CONFIG, section(tmp_path / "rows.npz"))


@pytest.fixture(scope="module", params=[np.savez, np.savez_compressed])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    request.param(path, **ROWS)
    return path


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_gives_rows_or_a_data_error(written: Path, data: st.DataObject) -> None:
    content = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = written.with_name("damaged.npz")
    damaged.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    with suppress(DataError):
        rows, _ = held_out_rows(CONFIG, section(damaged))
        assert len({array.shape[0] for array in rows.values()}) == 1
