"""Datasets from files of this machine: nothing is fetched and nothing is written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedpriv.data.huggingface import datasets_package
from fedpriv.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import Table


def open_dataset(path: str | Path) -> "Dataset":
    """Read a dataset into memory.

    Guarantees: no network is asked, and users' data stay out of the package's cache in the home
    folder.

    Args:
        path: one of

            * a folder saved by `Dataset.save_to_disk`, or that of one split in a folder saved by
              `DatasetDict.save_to_disk`, such as "mine/train";
            * a .parquet file, a .csv file with a line of names, or a .jsonl or .json file with an
              object per line;
            * a folder of such files of one kind, which are read in the order of their names.

    Raises:
        DataError: the package datasets is not installed, or the path is none of these.
    """
    place, package = Path(path), datasets_package()
    if not place.exists():
        raise DataError(f"{place} does not exist")
    try:
        if (place / "state.json").is_file():
            return package.load_from_disk(place, keep_in_memory=True)
        if (place / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(str(p) for p in place.iterdir() if p.is_dir()))
            raise DataError(f"{place} holds several splits; name one of them: {splits}")
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        return package.Dataset(_table(files, place))
    except DataError:
        raise
    # Readers raise errors of many classes, and their texts may quote the content.
    except Exception as error:
        raise DataError(
            f"{place} cannot be read ({type(error).__name__}); it must be a whole dataset"
        ) from error


def _table(files: Sequence[Path], place: Path) -> "Table":
    """Rows of all files, one after the other; package datasets brings pyarrow."""
    import pyarrow  # noqa: PLC0415

    readers = _readers()
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= readers.keys():
        raise DataError(
            f"{place} is no dataset; legal are a folder saved by save_to_disk, and "
            f"{', '.join(readers)} files, one or a folder of one kind"
        )
    read = readers[kinds.pop()]
    return pyarrow.concat_tables([read(file) for file in files], promote_options="permissive")


def _readers() -> Mapping[str, Callable[[Path], "Table"]]:
    from pyarrow import csv, json, parquet  # noqa: PLC0415

    return {
        ".parquet": parquet.read_table,
        ".csv": csv.read_csv,
        ".json": json.read_json,
        ".jsonl": json.read_json,
    }
