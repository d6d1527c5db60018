"""What every transport must do; inherited by the tests of each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedpriv.federated.aggregate import add_up
from fedpriv.federated.transport import RoundRequest, Transport
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import VectorGroup, equal_split, flat, joint, layers, per_layer
from fedpriv.privacy.layout import Layout


class TransportConformance(ABC):
    """A transport over at least six users, of whom the last always fails."""

    @abstractmethod
    def transport(self) -> Transport:
        """The transport under test."""

    @abstractmethod
    def request(self) -> RoundRequest:
        """A request to all of its users, flat clipping at a norm that clips somebody."""

    def sum_of(self, users: Sequence[int], groups: tuple[VectorGroup, ...] | None) -> np.ndarray:
        request = self.request()
        layout = Layout.of(request.parameters)
        request = replace(
            request,
            users=np.array(users, np.int64),
            clipping=Clipping(layout, groups) if groups else request.clipping,
        )
        partials = self.transport().collect(request)
        return add_up(partials, request.clipping, len(users)).total

    def groupings(self) -> list[tuple[VectorGroup, ...]]:
        layout = Layout.of(self.request().parameters)
        scales = {name: 0.1 * (i + 1) for i, name in enumerate(layout.names)}
        return [
            flat(layout, 0.01),
            per_layer(layout, layers(layout), equal_split(layers(layout), 0.01)),
            joint(layout, 0.01, scales),
        ]

    @pytest.mark.parametrize("grouping", [0, 1, 2], ids=["flat", "per-layer", "joint"])
    def test_each_user_is_clipped_and_users_add_up(self, grouping: int) -> None:
        groups = self.groupings()[grouping]
        users = self.request().users.tolist()
        layout = Layout.of(self.request().parameters)
        clipping = Clipping(layout, groups)
        alone = [self.sum_of([user], groups) for user in users]
        for contribution in alone:
            assert clipping.admits(contribution, 1)
        assert any(np.any(contribution) for contribution in alone)
        np.testing.assert_allclose(self.sum_of(users, groups), sum(alone), atol=1e-8)

    def test_a_failing_user_counts_as_zero_and_harms_nobody(self) -> None:
        *others, failing = self.request().users.tolist()
        np.testing.assert_array_equal(self.sum_of([failing], None), 0.0)
        # Who trains together decides how float32 rounds: by about 1e-7 after these few steps.
        np.testing.assert_allclose(
            self.sum_of([*others, failing], None), self.sum_of(others, None), atol=1e-7
        )

    def test_an_empty_cohort_sums_to_zero(self) -> None:
        np.testing.assert_array_equal(self.sum_of([], None), 0.0)

    def test_partial_sums_name_their_users_once(self) -> None:
        request = self.request()
        partials = list(self.transport().collect(request))
        assert sum(partial.users for partial in partials) <= request.users.size
        assert len({partial.node for partial in partials}) == len(partials)

    def test_the_request_is_left_alone(self) -> None:
        request = self.request()
        before = {name: p.copy() for name, p in request.parameters.items()}
        list(self.transport().collect(request))
        for name, parameter in request.parameters.items():
            np.testing.assert_array_equal(parameter, before[name])
