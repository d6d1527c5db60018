"""Users for tests that spread them among nodes; the last has a label that makes the loss raise."""

import numpy as np

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.data.builtin import synthetic_population
from fedpriv.data.population import Population, UserStore
from fedpriv.experiment.build import build_task
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import Price, TaskDescription

USERS = 7
PRICE = Price(poisson_gaussian(0.5, 1.0, population=USERS), 0, 2.0, 1e-6, 0)
TASK = TaskDescription("softmax", {"inputs": 8, "classes": 3}, 0, "cross-entropy")


def population(pixel: float = 0.0, moved: int = 0) -> Population:
    """The crowd; its name tells nothing of what may be other.

    Args:
        pixel: first value of the first user's first row.
        moved: how many rows of the second user are the first one's.
    """
    made = synthetic_population(USERS, (1, 9), (8,), classes=3, seed=0)
    fields, offsets = made.users.fields, made.users.offsets.copy()
    fields["y"][made.users.rows_of(USERS - 1)] = 99
    fields["x"][0, 0] = pixel
    offsets[1] += moved
    return Population("crowd", UserStore(fields, offsets), made.test)


def request_to(users: list[int], attempt: int = 0) -> RoundRequest:
    task = build_task(TASK.model, TASK.options, TASK.seed, TASK.loss)
    parameters = task.parameters()
    layout = Layout.of(parameters)
    clipping = Clipping(layout, flat(layout, 0.01))
    local = LocalTraining(0.5, batch_size=2, epochs=2, max_examples=7)
    drawn = np.array(users, np.int64)
    return RoundRequest("run", 3, attempt, parameters, clipping, local, drawn, bytes(range(32)))
