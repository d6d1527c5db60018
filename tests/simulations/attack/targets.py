"""A plan that is attacked in seconds: one round of everybody, and a model of 21 parameters."""

from functools import cache

import numpy as np

from fedpriv.data.builtin import synthetic_population
from fedpriv.data.population import Population, UserStore, offsets_of
from fedpriv.experiment.config import Config, parse_config
from simulations.attack import AttackedPlan
from simulations.attack.populations import Crowd

EPSILON, DELTA = 1.0, 1e-3


def config_of(*, inputs: int = 6, **sections: object) -> Config:
    """The configuration of a run at ε = 1; sections replace its own, or take them away if None."""
    table = {
        "name": "tiny",
        "data": {"name": "synthetic"},
        "model": {"name": "softmax", "options": {"inputs": inputs, "classes": 3}},
        "local": {"learning_rate": 0.5, "batch_size": "all", "epochs": 1},
        "clipping": {"norm": 0.1},
        "privacy": {"epsilon": EPSILON, "delta": DELTA, "sampling_probability": 1.0},
    }
    changed = {**table, **sections}
    return parse_config({name: s for name, s in changed.items() if s is not None}, "a table")


def people(users: int, *, inputs: int = 6) -> Population:
    """So many users of ten rows."""
    return synthetic_population(users, 10, (inputs,), classes=3, test_rows=50)


@cache
def tiny_target(users: int = 20, inputs: int = 6, rounds: int = 1) -> AttackedPlan:
    """The target of `config_of` with its own users."""
    return AttackedPlan.of(config_of(inputs=inputs), people(users, inputs=inputs), rounds, users)


def crowd_of(users: int = 4, *, most: int | None = None, replaced: bool = False) -> Crowd:
    """Ordinary users of a plan with labels 0 to 2."""
    return Crowd(people(users).users, ("x",), "y", most, replaced)


def words_crowd() -> Crowd:
    """Users whose inputs and targets are rows of whole numbers, as of text."""
    words = np.arange(40).reshape(8, 5) % 7
    return Crowd(UserStore({"x": words, "y": words}, offsets_of([2, 2, 2, 2])), ("x",), "y")
