import numpy as np

from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import flat
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.training.federation import LAYOUT, PARAMETERS, FakeTransport
from tests.training.transport_conformance import TransportConformance

USERS = 7


def update_of(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    if user == USERS - 1:
        raise RuntimeError("this user is broken")
    rng = np.random.default_rng(user)
    return {name: rng.standard_normal(p.shape) for name, p in request.parameters.items()}


def weight_of(user: int) -> int:
    return user % 3 + 1


class TestFakeTransport(TransportConformance):
    def transport(self) -> FakeTransport:
        return FakeTransport(update_of)

    def request(self) -> RoundRequest:
        clipping = Clipping(LAYOUT, flat(LAYOUT, 0.5))
        local = LocalTraining(0.1, steps=1)
        return RoundRequest("r", 0, 0, PARAMETERS, clipping, local, np.arange(USERS), bytes(32))

    def test_weights_are_those_that_a_function_says(self) -> None:
        request = self.asked(range(USERS), "weighted")
        partials = list(FakeTransport(update_of, weight_of).collect(request))
        assert [partial.weight for partial in partials] == [1, 2, 3, 1, 2, 3]
        whole = FakeTransport(update_of, lambda _: 3).collect(request)
        for partial, heaviest in zip(partials, whole, strict=True):
            assert np.all(np.abs(partial.total - heaviest.total * partial.weight / 3) <= 1.0)
