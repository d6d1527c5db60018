"""Users' data: the users, their rows, and held-out rows that belong to no user.

Start with `population`. Loaders make populations, `from_*` functions make stores from arrays,
tensors and datasets, and the module `partition` deals rows to synthetic users.
"""

from fedpriv.data import partition
from fedpriv.data.arrays import from_arrays, from_grouped
from fedpriv.data.builtin import load_digits, synthetic_population
from fedpriv.data.hugging_face import from_dataset, from_partitioner
from fedpriv.data.population import Population, UserStore, load_population

__all__ = [
    "Population",
    "UserStore",
    "from_arrays",
    "from_dataset",
    "from_grouped",
    "from_partitioner",
    "load_digits",
    "load_population",
    "partition",
    "synthetic_population",
]
