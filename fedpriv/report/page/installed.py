"""Whether what makes pages is installed."""

from importlib.util import find_spec

from fedpriv.errors import InvalidValueError

_NEEDED = ("jinja2", "plotly")


def require_report() -> None:
    """Refuse where what makes pages is not installed.

    Raises:
        InvalidValueError: something is not.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidValueError(
            f"{' and '.join(missing)} cannot be imported; pip install 'fedpriv[report]' installs it"
        )
