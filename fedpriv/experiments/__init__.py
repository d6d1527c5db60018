"""Experiments that come with the package, by name; they need no files."""

from pathlib import Path

from fedpriv.errors import InvalidValueError, known_names

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))


def experiment_file(given: Path, folder: Path = Path()) -> Path:
    """The file that was given, relative to a folder, or that of the experiment with this name.

    A file in the folder comes first. What has a suffix or lies elsewhere is no name.
    InvalidValueError: there is neither; the sentence lists all names.
    """
    if given.suffix or given.name != str(given) or (folder / given).is_file():
        return folder / given
    if given.name not in NAMES:
        raise InvalidValueError(
            f"experiment {given.name!r} is neither a file here nor one that comes with fedpriv; "
            f"{known_names(given.name, NAMES)}"
        )
    return Path(__file__).with_name(f"{given.name}.toml")
