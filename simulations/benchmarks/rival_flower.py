"""Flower on Ray as in its guides: one node and message per user, and clipping at the server."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from numpy.typing import NDArray

from fedpriv.training.local import SGD
from simulations.benchmarks.contestants import Train, Turn
from simulations.benchmarks.works import WORKS, Work, flattened, sgd

node_app = ClientApp()


@lru_cache(maxsize=1)
def _work(name: str) -> Work:
    return WORKS[name]()


@node_app.train()
def train_node(message: Message, context: Context) -> Message:
    """Train the model of a message on the user of a node."""
    settings = message.content.config_records["config"]
    work = _work(str(settings["work"]))
    device = torch.device(str(settings["device"]))
    model = work.build()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    user = int(str(settings["first"])) + int(str(context.node_config["partition-id"]))
    local = SGD(**json.loads(str(settings["local"])))
    sgd(model.to(device), [tensor.to(device) for tensor in work.examples_of(user)], local)
    # Users have equal weights, as in the other contestants.
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def flower(name: str, work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """Run a simulation, and use its server; it has one node for each user of a turn."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server, nodes = ServerApp(), work.users_in_a_turn("flower")

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        use(lambda turn: _round(grid, name, work, device, turn))

    workers = torch.get_num_threads()
    gpus = 1.0 / workers if device.type == "cuda" else 0.0
    run_simulation(
        server,
        node_app,
        nodes,
        backend_config={
            "init_args": {"num_cpus": workers, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus},
        },
    )


def _round(
    grid: Grid, name: str, work: Work, device: torch.device, turn: Turn
) -> NDArray[np.float64]:
    start = work.build().state_dict()
    nodes = len(turn.users)  # all nodes
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes),
        noise_multiplier=0.0,
        clipping_norm=work.clipping_norm,
        num_sampled_clients=nodes,
    )
    local = json.dumps(asdict(turn.local))
    settings = ConfigRecord(
        {"work": name, "device": device.type, "first": turn.users.start, "local": local}
    )
    result = strategy.start(grid, ArrayRecord(start), num_rounds=1, train_config=settings)
    end = result.arrays.to_torch_state_dict()
    return nodes * flattened([end[key] - start[key] for key in start])
