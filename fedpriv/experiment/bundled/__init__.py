"""Experiments that come with the package, by name; they need no files."""

from pathlib import Path

from fedpriv.errors import InvalidValueError, known_names

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))


def experiment_file(given: Path, folder: Path = Path()) -> Path:
    """Return the path of an experiment, given as a file relative to a folder or as a name.

    A file in the folder takes precedence. A path with a suffix or a folder is never a name.
    InvalidValueError: there is neither such a file nor such a name (the message lists all names),
    or the path is a folder.
    """
    path, is_name = folder / given, not given.suffix and given.name == str(given)
    if path.is_dir() and not (is_name and given.name in NAMES):
        plan = path / "plan.toml"
        cure = f"it must be a file, such as {plan}" if plan.exists() else "it must be a file"
        raise InvalidValueError(f"{path} is a folder; {cure}")
    if not is_name or path.is_file():
        return path
    if given.name not in NAMES:
        raise InvalidValueError(
            f"experiment {given.name!r} is neither a file here nor one that comes with fedpriv; "
            f"{known_names(given.name, NAMES)}"
        )
    return Path(__file__).with_name(f"{given.name}.toml")
