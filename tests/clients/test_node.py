"""Nodes that host parts of a population give together what one process gives."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.clients.training import NodeTrainer
from fedpriv.data.builtin import synthetic_population
from fedpriv.data.population import UserStore
from fedpriv.engine.schedule import Integers
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from tests.training.transport_conformance import TransportConformance

USERS = 12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Nodes(Transport):
    """A transport over nodes in this process."""

    nodes: tuple[NodeTrainer, ...]

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        for number, node in enumerate(self.nodes):
            yield replace(node.answer(request), node=f"node {number}")


def make_task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), cross_entropy)


def make_users() -> UserStore:
    users = synthetic_population(USERS, (1, 9), (8,), classes=3, seed=0).users
    users.fields["y"][users.rows_of(USERS - 1)] = 99  # the loss raises for this user
    return users


@cache
def make_nodes() -> Nodes:
    """The same for all tests, as each node tries a shape before it first trains in it."""
    users, task = make_users(), make_task()
    parts = [np.array([0, 4, 5, 11]), np.array([1, 2, 3]), np.array([6, 7, 8, 9, 10])]
    return Nodes(
        tuple(NodeTrainer(make_transport(task, users.subset(part), part)) for part in parts)
    )


def make_transport(task: Task, users: UserStore, hosted: Integers | None) -> InProcessTransport:
    """Train users alone, so that rounding does not depend on how many go side by side."""
    return InProcessTransport(task, users, CPU, 10**6, hosted, processes=1, path="alone")


def make_request() -> RoundRequest:
    parameters = make_task().parameters()
    return RoundRequest(
        "run",
        0,
        0,
        parameters,
        Clipping(Layout.of(parameters), flat(Layout.of(parameters), 0.1)),
        LocalTraining(0.1, batch_size=2, epochs=2),
        np.arange(USERS),
        bytes(range(32)),
    )


class TestNodes(TransportConformance):
    def transport(self) -> Transport:
        return make_nodes()

    def request(self) -> RoundRequest:
        return make_request()


def test_nodes_together_equal_one_process() -> None:
    request = replace(make_request(), users=np.array([0, 2, 3, 7, 9, 11]))
    alone = make_transport(make_task(), make_users(), None)
    expected = sum(partial.total for partial in alone.collect(request))
    partials = list(make_nodes().collect(request))
    assert [partial.users for partial in partials] == [1, 2, 2]
    np.testing.assert_array_equal(sum(p.total for p in partials), expected)


def test_no_node_has_an_observer() -> None:
    transport = InProcessTransport(make_task(), make_users(), CPU, 10**6, observer=print)
    with pytest.raises(InvalidValueError, match="a node has a transport with an observer"):
        NodeTrainer(transport)


def test_a_node_without_drawn_users_answers_with_zero() -> None:
    request = replace(make_request(), users=np.array([1]))
    partial = make_nodes().nodes[0].answer(request)
    assert partial.users == partial.weight == 0
    np.testing.assert_array_equal(partial.total, 0)
