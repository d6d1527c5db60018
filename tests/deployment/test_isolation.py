"""One user moves one vector, and nothing else: over gRPC with TLS."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedpriv import wire
from fedpriv.clients.training import NodeTrainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.training.local import AdamW, Scaffold
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import federation_pb2 as pb
from tests.engine.everyone import torch_threads
from tests.isolation import (
    LOCALS,
    READERS,
    USERS,
    Plan,
    User,
    assert_additive,
    plans,
    request_of,
    store_of,
    task_of,
)
from tests.server.loopback import Site, nodes, site, summed

HOSTED = {"large": range(5), "small": range(5, 7), "seven": range(7, 8), "eight": range(8, 9)}
NUMBER = 9

users_at_nodes = st.lists(
    st.builds(User, st.sampled_from(USERS), st.sampled_from([0, 1, 3, 8, 11, 40]), st.just(0)),
    min_size=NUMBER,
    max_size=NUMBER,
)


@dataclass
class Hosts:
    """The nodes of an enrolment, which train what they are given at the moment."""

    transports: Mapping[str, InProcessTransport]

    def give(self, plan: Plan, users: list[User]) -> None:
        store, task = store_of(users, words=plan.model in READERS), task_of(plan.model)
        self.transports = {
            node: InProcessTransport(
                task, store.subset(own), torch.device("cpu"), 2**22, np.array(own), processes=1
            )
            for node, own in HOSTED.items()
        }

    def answer(
        self, node: str, offer: wire.RoundOffer, request: RoundRequest
    ) -> Iterator[pb.UploadPart]:
        return summed(offer, NodeTrainer(self.transports[node]).answer(request))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Hosts]]:
    """A server with TLS, and nodes that are connected to it."""
    enrolled = {node: [str(user) for user in own] for node, own in HOSTED.items()}
    hosts, one_at_a_time = Hosts({}), threading.Lock()

    def of(node: str):
        def answer(offer: wire.RoundOffer, request: RoundRequest) -> list[pb.UploadPart]:
            with one_at_a_time:  # the nodes are threads here, and share a model
                return list(hosts.answer(node, offer, request))

        return answer

    with (
        site(tmp_path_factory.mktemp("site"), enrolled) as made,
        nodes(made, {node: of(node) for node in HOSTED}),
        torch_threads(1),
    ):
        yield made, hosts


def of_everyone(local: LocalTraining, model: str = "mlp") -> tuple[Plan, list[User]]:
    """A round with this local training, of users of all kinds but one."""
    plan = Plan(model, "per-layer", "weights", local, adaptive=True, measured=False, norm=0.3)
    sizes = (3, 8, 3, 1, 8, 3, 0, 3, 8)
    return plan, [User(*each, 0) for each in zip(USERS, sizes, strict=False)]


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(plans, users_at_nodes)
@example(*of_everyone(AdamW(0.02, batch_size=4, epochs=2)))
@example(*of_everyone(Scaffold(0.3, epochs=3, control_norm=0.4)))
@example(*of_everyone(LOCALS[-1], "personal-head"))
def test_over_grpc(served: tuple[Site, Hosts], plan: Plan, users: list[User]) -> None:
    made, hosts = served
    hosts.give(plan, users)
    assert_additive(made.transport(), request_of(plan, NUMBER))
