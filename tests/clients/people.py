"""Users of a node, what they are welcomed to and asked; without torch, as in its main process."""

from collections.abc import Sequence

import numpy as np

from fedpriv.clients.worker import HostSettings
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import TaskDescription, Welcome

FEATURES, CLASSES = 4, 3
IDS = ["u10", "u2", "u01", "u7", "u40", "u5", "u33", "u8", "u6"]  # as the store orders them
GOOD = ["u01", "u10", "u6", "u8"]  # those whose data do nothing to a process
ORDER = sorted(IDS)
POSITIONS = np.arange(len(IDS), dtype=np.int64) * 3
TASK = TaskDescription(
    "tests.clients.hostile:model", {"features": FEATURES}, seed=3, loss="cross-entropy"
)
PARAMETERS = {
    "1.weight": np.random.default_rng(1).standard_normal((CLASSES, FEATURES)).astype(np.float32),
    "1.bias": np.zeros(CLASSES, np.float32),
}


def source_of(
    function: str, memory_mebibytes: int | None = None, processes: int | None = 1
) -> HostSettings:
    """Of users that a function of `hostile` makes."""
    users = f"tests.clients.hostile:{function}"
    return HostSettings(users, "cpu", memory_mebibytes=memory_mebibytes, processes=processes)


def positions_of(names: Sequence[str]) -> np.ndarray:
    return np.array(sorted(POSITIONS[ORDER.index(name)] for name in names))


def welcome(task: TaskDescription = TASK, names: Sequence[str] = IDS) -> Welcome:
    return Welcome("people", 100, positions_of(names), task)


def request_to(names: Sequence[str]) -> RoundRequest:
    layout = Layout.of(PARAMETERS)
    return RoundRequest(
        "run",
        0,
        0,
        PARAMETERS,
        Clipping(layout, flat(layout, 0.1), weighted=("update",), weight_cap=4),
        LocalTraining(0.1, batch_size=2, epochs=2, max_examples=3),
        positions_of(names),
        bytes(range(32)),
    )
