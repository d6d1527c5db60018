"""A program that asserts on workers of Ray that one user moves one vector, and nothing else.

Its arguments are the kinds of models, of `tests.isolation`.
"""

import pickle
import sys
import threading
from dataclasses import astuple

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpriv.experiment.config import parse_config
from fedpriv.flower.grid import GridTransport, introduced_workers
from fedpriv.flower.grid import app as client_app
from fedpriv.flower.ray import run_on_ray
from tests.isolation import (
    LOCALS,
    PERSONAL,
    READERS,
    USERS,
    Plan,
    User,
    assert_additive,
    crowd,
    request_of,
)

SECONDS = 300.0  # a round takes one, but the machine may be busy with other tests

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, _context: Context) -> None:
    for number, kind in enumerate(sys.argv[1:]):
        plan = Plan(
            kind,
            ["flat", "per-layer", "joint", "groups"][number % 4],
            ["equal", "weights", "floor"][number % 3],
            LOCALS[number % len(LOCALS)],
            adaptive=number % 2 == 0,
            measured=True,
            norm=0.3,
        )
        assert_additive(on_workers(grid, plan), request_of(plan, len(USERS)))
        sys.stdout.write(f"{kind}\n")


def on_workers(grid: Grid, plan: Plan) -> GridTransport:
    """A transport over two workers of a grid, who load one user of each kind."""
    people = [astuple(User(kind, 7 + 3 * n, n)) for n, kind in enumerate(USERS)]
    options = {"users": people, "words": plan.model in READERS}
    model = {"name": "tests.isolation:model", "options": {"kind": plan.model}}
    table = {
        "name": "people",
        "data": {"name": "tests.isolation:crowd", "options": options},
        "model": model | {"personal": list(PERSONAL.get(plan.model, ()))},
        "privacy": {"epsilon": 1.0, "delta": 1e-3},
        "engine": {"device": "cpu", "chunk_mebibytes": 32},
    }
    work = pickle.dumps(parse_config(table, "the plan"))
    store, stopping = crowd(**options).users, threading.Event()
    numbers = introduced_workers(grid, "people", store, 2, work, stopping)
    return GridTransport(grid, numbers, work, SECONDS, stopping)


if __name__ == "__main__":
    run_on_ray(server_app, client_app, 2, 2)
