"""A round that nodes are asked in is charged, at whichever step of the server it ends."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from fedpriv import server, wire
from fedpriv.ledger.events import NeighbouringRelation
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import EveryUserSampling
from fedpriv.server.deployment import GrpcTransport
from fedpriv.server.service import Listener
from fedpriv.training.request import RoundRequest
from fedpriv.training.rounds import initial_state, train
from fedpriv.wire import federation_pb2 as pb
from tests.server.loopback import PATIENCE, clipped, nodes, site
from tests.training.federation import PARAMETERS, constant_update, make_plan, open_records

FILES = tuple(str(Path(each.__file__).parent) for each in (server, wire))
COLLECT = GrpcTransport.collect.__code__


class EndedError(Exception):
    """Ends a round."""


def answer(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    return clipped(offer, *(constant_update(request, user) for user in request.users.tolist()))


def test_whatever_the_server_is_doing_when_it_ends_the_round_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line of what collects, and at each call below it, on the event loop too."""
    sampling = EveryUserSampling(2, NeighbouringRelation.REPLACE_ONE)
    plan, ended, collecting = make_plan(sampling=sampling), 0, False

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal steps, ended, collecting
        own = frame.f_code is COLLECT
        collecting |= own
        called = event == "call" and frame.f_code.co_filename.startswith(FILES)
        if collecting and (called or (own and event == "line")):
            steps += 1
            if steps > ended:
                ended = steps
                sys.settrace(None)
                raise EndedError
        return trace if own else None

    def call(listener: Listener, work: Callable[[], object]) -> object:
        def traced() -> object:
            sys.settrace(trace)
            try:
                return work()
            finally:
                sys.settrace(None)

        return honest(listener, traced)

    honest, users = Listener.call, {"one": ["0"], "two": ["1"]}
    monkeypatch.setattr(Listener, "call", call)
    with (
        site(tmp_path, users) as made,
        nodes(made, dict.fromkeys(users, answer)),
        open_records(tmp_path) as records,
    ):
        soon = PATIENCE.model_copy(update={"deadline_seconds": 0.3})  # where one was not closed
        transport, state = made.transport(soon), initial_state(plan, PARAMETERS)
        attempts, before = 0, -1
        while before < ended:  # else the last round had no more steps
            attempts, before, steps, collecting = attempts + 1, ended, 0, False
            sys.settrace(trace)
            try:
                next(train(plan, state, transport, records, SeededEntropy(0)))
            except EndedError:
                pass
            finally:
                sys.settrace(None)
            assert records.ledger.head.count == attempts
        records.ledger.verify(records.participation)
    assert ended > 60
