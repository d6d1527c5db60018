"""What every transport must do; inherited by the tests of each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedpriv.experiment.grouping import equal_split
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS
from fedpriv.privacy.layout import Layout, flat, joint, layers, per_layer
from fedpriv.privacy.round import PartialSum, add_up
from fedpriv.training.request import RoundRequest, Transport

KINDS = ["flat", "per-layer", "joint", "weighted"]


class TransportConformance(ABC):
    """A transport over at least six users, of whom the last always fails."""

    @abstractmethod
    def transport(self) -> Transport:
        """The transport under test."""

    @abstractmethod
    def request(self) -> RoundRequest:
        """A request to all of its users, flat clipping at a norm that clips somebody."""

    def asked(self, users: Sequence[int], kind: str | None = None) -> RoundRequest:
        request = self.request()
        clipping = self.clippings()[kind] if kind else request.clipping
        return replace(request, users=np.array(users, np.int64), clipping=clipping)

    def collected(self, request: RoundRequest) -> list[PartialSum]:
        return list(self.transport().collect(request))

    def sum_of(self, users: Sequence[int], kind: str | None = None) -> PartialSum:
        request = self.asked(users, kind)
        return add_up(self.collected(request), request.clipping, len(users))

    def clippings(self) -> dict[str, Clipping]:
        layout = Layout.of(self.request().parameters)
        scales = {name: 0.1 * (i + 1) for i, name in enumerate(layout.names)}
        one = flat(layout, 0.01)
        groups = {
            "flat": one,
            "per-layer": per_layer(layout, layers(layout), equal_split(layers(layout), 0.01)),
            "joint": joint(layout, 0.01, scales),
        }
        weighted = Clipping(layout, one, weighted=(one[0].name,), weight_cap=3)
        return {name: Clipping(layout, of) for name, of in groups.items()} | {"weighted": weighted}

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_user_is_clipped_and_users_add_up_exactly(self, kind: str) -> None:
        users, clipping = self.request().users.tolist(), self.clippings()[kind]
        alone = {user: self.sum_of([user], kind) for user in users}
        for one in alone.values():
            assert clipping.admits(one.total, 1, one.weight)
            assert 0 <= one.weight <= clipping.weight_cap
        assert any(np.any(one.total) for one in alone.values())
        for cohort in (users, users[::2], users[1:], users[:-2]):
            together = self.sum_of(cohort, kind)
            np.testing.assert_array_equal(together.total, sum(alone[u].total for u in cohort))
            assert together.weight == sum(alone[user].weight for user in cohort)

    def test_a_failing_user_counts_as_zero_and_harms_nobody(self) -> None:
        *others, failing = self.request().users.tolist()
        np.testing.assert_array_equal(self.sum_of([failing]).total, 0)
        np.testing.assert_array_equal(
            self.sum_of([*others, failing]).total, self.sum_of(others).total
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_users_whose_update_counts_are_counted(self, kind: str) -> None:
        *others, failing = self.request().users.tolist()
        asked = self.asked([*others, failing], kind)
        of, one = asked.clipping, round(1.0 / CONTRIBUTORS.group.granularity)
        layout = Layout(
            (*of.layout.names, CONTRIBUTORS.tensor), (*of.layout.shapes, CONTRIBUTORS.shape)
        )
        clipping = replace(of, layout=layout, groups=(*of.groups, CONTRIBUTORS.group))
        counting = replace(asked, clipping=clipping, metrics=(CONTRIBUTORS,))
        total = add_up(self.collected(counting), clipping, asked.users.size).total
        plain = add_up(self.collected(asked), of, asked.users.size).total
        np.testing.assert_array_equal(total[:-1], plain)
        counted = [user for user in others if np.any(self.sum_of([user], kind).total)]
        assert 0 < total[-1] == one * len(counted)

    def test_an_empty_cohort_sums_to_zero(self) -> None:
        empty = self.sum_of([])
        np.testing.assert_array_equal(empty.total, 0)
        assert empty.weight == 0

    @pytest.mark.parametrize("kind", KINDS)
    def test_partial_sums_are_of_integers_and_name_their_users_once(self, kind: str) -> None:
        request = self.asked(self.request().users.tolist(), kind)
        partials = self.collected(request)
        assert partials
        for partial in partials:
            assert partial.total.dtype == np.int64
            assert partial.total.shape == (request.clipping.layout.dimension,)
            assert isinstance(partial.weight, int)
            assert 0 <= partial.weight <= partial.users * request.clipping.weight_cap
            assert request.clipping.admits(partial.total, partial.users, partial.weight)
        assert sum(partial.users for partial in partials) <= request.users.size
        assert len({partial.node for partial in partials}) == len(partials)

    def test_the_request_is_left_alone(self) -> None:
        request = self.request()
        before = {name: p.copy() for name, p in request.parameters.items()}
        list(self.transport().collect(request))
        for name, parameter in request.parameters.items():
            np.testing.assert_array_equal(parameter, before[name])
