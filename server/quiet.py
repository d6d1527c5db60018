"""Keeps what fedpriv starts from calling anybody: Flower and Ray report on their users."""

import os
from importlib.util import find_spec

from fedpriv.errors import InvalidValueError

_OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do, and warns of until then
}


def switch_off_reports() -> None:
    """Switch telemetry, update checks, run-time installation and usage statistics off.

    For this process and those that it starts; Flower reads it when it is imported, so call it
    before.
    """
    os.environ.update(_OFF)


def require_flower() -> None:
    """Refuse where Flower or Ray is not installed.

    Raises:
        InvalidValueError: one of them is not.
    """
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise InvalidValueError(
            f"{' and '.join(missing)} cannot be imported; pip install 'fedpriv[flower]' installs it"
        )
