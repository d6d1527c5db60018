"""The accountants as one interface, and what is particular to each."""

import pytest
from accountant_conformance import AccountantConformance

from fedpriv.accounting.accountants import (
    ACCOUNTANTS,
    Accountant,
    Bound,
    PLDAccountant,
    RDPAccountant,
    accountant_named,
    delta,
    epsilon,
)
from fedpriv.accounting.events import poisson_gaussian
from fedpriv.errors import InvalidValueError

EVENTS = [poisson_gaussian(0.01, 1.0, 1000), poisson_gaussian(1.0, 40.0, 3)]


class TestPLD(AccountantConformance):
    accountant: Accountant = PLDAccountant()

    def test_it_certifies_an_interval(self) -> None:
        loss = self.accountant.epsilon(EVENTS, 1e-6)
        assert 0 < loss.epsilon_low < loss.epsilon < 1.001 * loss.epsilon_low
        assert Bound.INTERVAL in loss.assumptions


class TestRDP(AccountantConformance):
    accountant: Accountant = RDPAccountant()

    def test_it_bounds_from_above(self) -> None:
        loss = self.accountant.epsilon(EVENTS, 1e-6)
        assert loss.epsilon_low == 0.0
        assert Bound.UPPER in loss.assumptions
        assert loss.epsilon > epsilon(EVENTS, 1e-6).epsilon

    def test_more_orders_never_cost_more(self) -> None:
        few = RDPAccountant(orders=(2.0, 64.0)).epsilon(EVENTS, 1e-6).epsilon
        assert self.accountant.epsilon(EVENTS, 1e-6).epsilon < few

    @pytest.mark.parametrize("orders", [(), (1.0, 2.0), (0.5,), (float("inf"),)])
    def test_illegal_orders_are_named(self, orders: tuple[float, ...]) -> None:
        with pytest.raises(InvalidValueError, match=r"orders are .*; there must be"):
            RDPAccountant(orders=orders)


def test_every_accountant_is_listed_under_its_name() -> None:
    assert {name: each.name for name, each in ACCOUNTANTS.items()} == {"pld": "pld", "rdp": "rdp"}
    for name in ACCOUNTANTS:
        assert accountant_named(name) is ACCOUNTANTS[name]


@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_functions_ask_the_named_accountant(name: str) -> None:
    assert epsilon(EVENTS, 1e-6, name) == ACCOUNTANTS[name].epsilon(EVENTS, 1e-6)
    assert delta(EVENTS, 2.0, name) == ACCOUNTANTS[name].delta(EVENTS, 2.0)


def test_the_default_is_the_certified_accountant() -> None:
    assert epsilon(EVENTS, 1e-6) == PLDAccountant().epsilon(EVENTS, 1e-6)
    assert delta(EVENTS, 2.0) == PLDAccountant().delta(EVENTS, 2.0)


def test_an_unknown_accountant_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"accountant is 'clt'; legal is: pld, rdp"):
        epsilon(EVENTS, 1e-6, "clt")
    with pytest.raises(InvalidValueError, match=r"accountant is 'moments'; legal is: pld, rdp"):
        delta(EVENTS, 1.0, "moments")
