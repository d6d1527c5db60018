"""The server's own rows, which it measures released models on."""

from pathlib import Path

from fedpriv.config import Config
from fedpriv.data.npz import read_npz
from fedpriv.data.registry import load_population
from fedpriv.errors import DataError
from fedpriv.experiment import HeldOut
from fedpriv.sections import FederationSection


def held_out_rows(config: Config, section: FederationSection) -> HeldOut:
    """Rows of no enrolled user: those of `federation.held_out`, or of the configured data.

    Raises:
        DataError: the file cannot be read, or its fields have no rows, or not as many each.
    """
    if section.held_out is None:
        return load_population(config.data.name, config.data.options).test
    path = Path(section.held_out)
    rows = read_npz(path)
    counts = {len(array) for array in rows.values()}
    if len(counts) != 1 or 0 in counts:
        raise DataError(
            f"{path} holds fields with {sorted(counts)} rows; all need the same number, at least "
            "one"
        )
    return rows
