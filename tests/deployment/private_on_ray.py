"""A program that asserts, on Flower's simulation, what a private round makes of hostile nodes."""

import math
import sys
import tempfile
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedpriv.flower import connected
from fedpriv.flower.ray import run_on_ray
from tests.flower import apps

ZERO = ["raises", "not a number", "another shape", "an array more", "a pickle", "a long sum"]
"""Nodes that count as zero; after them come one that says all too much, and honest ones."""
FAR = len(ZERO)
NODES = FAR + 4

client_app, server_app = ClientApp(), ServerApp()
far = apps.weights(lambda w: w + 1e30)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    part = int(context.node_config["partition-id"])
    if part < FAR:
        return apps.HOSTILE[ZERO[part]](message, context)
    if part == FAR:
        return far(message, context)
    return (apps.WITH_MOD if part % 2 else apps.USUAL)(message, context)


@server_app.main()
def main(grid: Grid, _context: Context) -> None:
    nodes = connected(grid, NODES)
    with tempfile.TemporaryDirectory() as folder:
        found = apps.arrays_of(apps.run(Path(folder), grid, apps.noiseless(), nodes))
    clipped = [
        apps.slow_clip(apps.update_of(part), [list(apps.SHAPES)], apps.NORM, apps.ONES)
        for part in range(FAR + 1, NODES)
    ]
    for name, start in apps.START.items():
        total = sum(each[name] for each in clipped)
        if name == "conv.weight":
            total += apps.NORM / math.sqrt(start.size)
        np.testing.assert_allclose(found[name], start + total / NODES, rtol=0.0, atol=1e-5)
    sys.stdout.write("as expected\n")


if __name__ == "__main__":
    from tests.deployment.private_on_ray import client_app as by_name  # as workers import it

    run_on_ray(server_app, by_name, NODES, 2)
