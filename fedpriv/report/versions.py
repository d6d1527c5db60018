"""The software that decides what a run gives, in versions."""

import platform
from importlib.metadata import PackageNotFoundError, version

from fedpriv import __version__

_LIBRARIES = ("numpy", "scipy", "torch")


def versions() -> dict[str, str]:
    """Versions of fedpriv, Python and the libraries that compute, by name; none is imported."""
    found = {"fedpriv": __version__, "Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
