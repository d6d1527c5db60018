"""A population: the enrolled users, and rows that belong to none of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.store import UserStore
from fedpriv.errors import DataError


@dataclass(frozen=True, eq=False)
class Population:
    """Enrolled users and held-out rows to measure a model on.

    The name goes into the privacy ledger as the identity of the population, and the ledger is
    public. So it is made of what is public: N, the number of users, and settings such as names of
    data sets; never of a total or a digest of users' data, against which a guess could be tested. A
    name that stays while the data change is on the safe side: the ledger's charges then add up over
    both.

    Attributes:
        name: one printable line, such as "digits: 287 users, iid, seed 0".
        users: the enrolled users' data; inputs are the field "x", targets the field "y".
        test: name → array [test rows, ...]: rows that no enrolled user trains on, with the same
            fields, dtypes and row shapes as `users`.

    Raises:
        DataError: the name is empty or not one printable line, there is no test row, or the test
            fields do not fit the users' fields.
    """

    name: str
    users: UserStore
    test: Mapping[str, NDArray[np.generic]] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise DataError(f"population name {self.name!r} must be one printable line")
        if self.test.keys() != self.users.fields.keys():
            raise DataError(
                f"test rows have the fields {sorted(self.test)}; "
                f"the users have {sorted(self.users.fields)}"
            )
        for name, array in self.test.items():
            ours = self.users.fields[name]
            # The dtype's type, because strings of different widths do fit.
            if (array.dtype.type, array.shape[1:]) != (ours.dtype.type, ours.shape[1:]):
                raise DataError(
                    f"test field {name!r} is {array.dtype}{list(array.shape[1:])} per row; "
                    f"the users' is {ours.dtype}{list(ours.shape[1:])}"
                )
        counts = {len(array) for array in self.test.values()}
        if len(counts) != 1 or 0 in counts:
            raise DataError(
                f"test fields have {sorted(counts)} rows; all need the same number, at least one"
            )
        object.__setattr__(self, "test", dict(self.test))
