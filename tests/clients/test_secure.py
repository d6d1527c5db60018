"""A node's part in a secure sum, with servers that lie."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.clients import secure
from fedpriv.clients.connection import Identity, identity_of
from fedpriv.clients.consent import review_of
from fedpriv.errors import InvalidValueError
from fedpriv.ledger import Head
from fedpriv.ledger.events import SecureSum
from fedpriv.secure_sums.protocol import KeyPair
from fedpriv.wire import Countersignature, RoundOffer, Stage, Step
from fedpriv.wire.naming import binding_of, countersigned
from simulations.loopback import issue
from tests.clients.secure_world import USERS, World, contribution_of

ROUNDED_NOISE = secure.rounded_noise


@pytest.fixture(autouse=True)
def _without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "rounded_noise", lambda *_: 0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def verified(tmp_path: Path) -> World:
    return World(tmp_path, verify=True)


def steps_of(world: World, name: str) -> list[Stage]:
    return [step.stage for step in world.server.taken.get(name, [])]


# Honest servers.


def test_the_opened_sum_is_that_of_the_users_whom_nodes_drew(world: World) -> None:
    opened, outcomes = asyncio.run(world.attempt())
    assert opened is not None
    np.testing.assert_array_equal(opened.total, world.expected())
    assert opened.nodes == 5
    assert set(outcomes.values()) == {None}


@pytest.mark.parametrize("stage", list(Stage))
def test_a_node_that_leaves_before_any_step_does_no_harm(world: World, stage: Stage) -> None:
    opened, _ = asyncio.run(world.attempt(gone={stage: ["n3"]}))
    assert opened is not None
    left_early = stage in (Stage.SHARE, Stage.AGREE)
    np.testing.assert_array_equal(opened.total, world.expected(*["n3"] * left_early))
    assert opened.nodes == 5 - left_early


@pytest.mark.parametrize("stage", [Stage.SHARE, Stage.AGREE])
def test_with_too_few_nodes_nothing_is_opened(world: World, stage: Stage) -> None:
    opened, outcomes = asyncio.run(world.attempt(gone={stage: ["n1", "n3"]}))
    assert opened is None
    assert None not in outcomes.values()
    for site in world.sites:
        assert Stage.OPEN not in steps_of(world, site)


def test_each_node_draws_its_own_users_and_only_those(world: World) -> None:
    asyncio.run(world.attempt())
    drawn = {name: site.trainer.trained[-1:] for name, site in world.sites.items()}
    for name, users in drawn.items():
        for positions in users:
            assert np.isin(positions, world.enrolment.users_of(name)).all()
    assert sum(users[0].size for users in drawn.values() if users) < 5 * USERS


def test_a_node_uploads_though_nobody_was_drawn_or_training_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure, "drawn_users", lambda _, users, __: np.arange(users))
    world.sites["n0"].trainer.fails = True
    opened, _ = asyncio.run(world.attempt())
    assert opened is not None
    np.testing.assert_array_equal(opened.total, world.expected("n0"))
    monkeypatch.setattr(secure, "drawn_users", lambda *_: np.empty(0, np.int64))
    nobody, _ = asyncio.run(world.attempt(number=2))
    assert nobody is not None
    assert not nobody.total.any()
    assert all(len(uploads) == 2 for uploads in world.server.uploads.values())


def test_noise_of_all_nodes_is_that_of_the_event_over_the_nodes_that_share_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variance of a component is n/(n − t − d) = 5/3 of the event's, in 60 components."""
    monkeypatch.setattr(secure, "rounded_noise", ROUNDED_NOISE)
    monkeypatch.setattr(secure, "drawn_users", lambda *_: np.empty(0, np.int64))
    numbers = []
    for number in range(1, 11):
        opened, _ = asyncio.run(world.attempt(number=number))
        assert opened is not None
        numbers.extend((opened.total / 2.0**24).tolist())
    statistic = float(np.square(numbers).sum()) / (5.0 / 3.0)
    assert 29.0 < statistic < 103.0  # χ² of 60 degrees of freedom, 1e-4 on either side


def test_a_node_that_is_there_and_takes_no_step_holds_nobody_up(world: World) -> None:
    """It has shared and uploaded; others wait for its signature and its shares only for a while."""
    world.grace = 0.01

    def silent(name: str, answer: Step) -> Step:
        if name == "n2" and answer.stage is Stage.AGREE:
            raise secure.VoidError("it refuses")
        return answer

    world.server.stays = {"n2"}
    opened, outcomes = asyncio.run(world.attempt(silent))
    assert opened is not None
    np.testing.assert_array_equal(opened.total, world.expected())
    assert [name for name, outcome in outcomes.items() if outcome is not None] == ["n2"]


# What leaves a node.


def test_an_upload_says_nothing_of_the_sum(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "drawn_users", lambda _, users, __: np.arange(users))
    for number in range(1, 3):
        asyncio.run(world.attempt(number=number))
    sums = {
        n: sum(map(contribution_of, s.trainer.trained[0].tolist())) for n, s in world.sites.items()
    }
    for name, (first, second) in world.server.uploads.items():
        assert not np.array_equal(first, second)
        coarse = sums[name] >> 13
        assert (np.abs(first.view(np.int32) - coarse) > 16).all()


def test_one_sum_leaves_for_an_attempt_even_after_a_restart(world: World) -> None:
    asyncio.run(world.attempt())
    for name in world.sites:
        world.restarted(name)
    opened, outcomes = asyncio.run(world.attempt())  # the same number of round and attempt
    assert opened is None
    assert None not in outcomes.values()
    assert all(len(uploads) == 1 for uploads in world.server.uploads.values())


def test_the_same_offer_twice_is_answered_once(world: World) -> None:
    async def twice() -> None:
        collected, offer = world.collection(world.proposal())
        world.server.begin(collected, lambda _, step: step, {})
        site = world.sites["n0"]
        first = asyncio.create_task(site.secure.take_part(site.welcome, offer, 1e9))
        await asyncio.sleep(0.01)
        with pytest.raises(secure.VoidError, match="vote"):
            await site.secure.take_part(site.welcome, offer, 1e9)
        first.cancel()

    asyncio.run(twice())


# Rosters.


def without_change(_: str, offer: RoundOffer) -> RoundOffer:
    return offer


def other_key(world: World, offer: RoundOffer, name: str, identity: Identity) -> Countersignature:
    """A key of a node that another, or a stranger, has signed."""
    binding = binding_of(world.enrolment.population_id, offer.id, world.price.event, offer.head)
    assert identity.certificate is not None
    public = KeyPair.fresh().public
    made = countersigned(name, public, binding, identity.certificate, identity.key)
    return replace(made, head=offer.head)


Change = Callable[[World, RoundOffer], tuple[Countersignature, ...]]


def substituted(world: World, offer: RoundOffer) -> tuple[Countersignature, ...]:
    """The key of n4 is the server's own, under the signature of the true one."""
    *others, last = offer.roster
    return (*others, replace(last, key=KeyPair.fresh().public))


def signed_by_another(world: World, offer: RoundOffer) -> tuple[Countersignature, ...]:
    return (*offer.roster[:-1], other_key(world, offer, "n4", world.sites["n3"].identity))


def of_another_attempt(world: World, offer: RoundOffer) -> tuple[Countersignature, ...]:
    return (*offer.roster[:-1], world.proposal(7).roster(list(world.sites))[-1])


def with_a_stranger(world: World, offer: RoundOffer) -> tuple[Countersignature, ...]:
    """A node that the authority has signed and nobody has enrolled."""
    stranger = identity_of(issue(world.folder, "n9").folder, None)
    return (*offer.roster, other_key(world, offer, "n9", stranger))


@pytest.mark.parametrize(
    "change", [substituted, signed_by_another, of_another_attempt, with_a_stranger]
)
def test_a_roster_with_a_key_that_no_enrolled_node_has_signed_ends_the_attempt(
    world: World, change: Change
) -> None:
    def changed(_: str, offer: RoundOffer) -> RoundOffer:
        return replace(offer, roster=change(world, offer))

    opened, outcomes = asyncio.run(world.attempt(change=changed))
    assert opened is None
    assert None not in outcomes.values()
    assert world.server.taken == {}
    assert world.server.uploads == {}


def test_a_roster_of_too_few_nodes_is_no_offer(world: World) -> None:
    def fewer(_: str, offer: RoundOffer) -> RoundOffer:
        return replace(offer, roster=offer.roster[1:])

    opened, outcomes = asyncio.run(world.attempt(change=fewer))
    assert opened is None
    assert all("roster has 4" in str(outcome) for outcome in outcomes.values())


def test_two_rosters_cancel_nothing(tmp_path: Path) -> None:
    """Six nodes agree; half of them are shown a roster without n5, the others all."""
    world = World(tmp_path, 6, SecureSum(5, 0, 1))

    def changed(name: str, offer: RoundOffer) -> RoundOffer:
        return replace(offer, roster=offer.roster[:-1]) if name in ("n0", "n1", "n2") else offer

    opened, outcomes = asyncio.run(world.attempt(change=changed))
    assert opened is None
    assert None not in outcomes.values()
    for uploads in world.server.uploads.values():
        assert not uploads  # messages that are sealed for another roster cannot be opened


# Lists.


def test_two_lists_of_survivors_open_nothing(world: World) -> None:
    """The server shows two nodes one list and three nodes another; neither gets a quorum of 4."""

    def lie(name: str, answer: Step) -> Step:
        if answer.stage is Stage.AGREE and name in ("n0", "n1"):
            return replace(answer, nodes=answer.nodes[:-1])
        return answer

    opened, outcomes = asyncio.run(world.attempt(lie))
    assert opened is None
    refusals = [str(outcomes[name]) for name in world.sites]
    assert all("signed" in reason for reason in refusals), refusals
    for name in world.sites:
        assert Stage.OPEN not in steps_of(world, name)


def test_a_list_that_leaves_a_node_out_is_not_signed_by_it(world: World) -> None:
    def lie(_: str, answer: Step) -> Step:
        return (
            replace(answer, nodes=("n0", "n1", "n2", "n3"))
            if answer.stage is Stage.AGREE
            else answer
        )

    _, outcomes = asyncio.run(world.attempt(lie))
    assert "n4" in str(outcomes["n4"])
    assert steps_of(world, "n4") == [Stage.SHARE, Stage.AGREE]


@pytest.mark.parametrize("stage", [Stage.SHARE, Stage.AGREE])
def test_a_list_of_too_few_nodes_ends_the_attempt(world: World, stage: Stage) -> None:
    def lie(_: str, answer: Step) -> Step:
        return replace(answer, nodes=answer.nodes[:3]) if answer.stage is stage else answer

    opened, outcomes = asyncio.run(world.attempt(lie))
    assert opened is None
    assert None not in outcomes.values()
    for name in world.sites:
        assert Stage.SIGN not in steps_of(world, name)


def test_two_lists_of_sharers_leave_masks_that_do_not_cancel(tmp_path: Path) -> None:
    """Both lists are long enough, and the uploads that the server gets open nothing."""
    world = World(tmp_path, 6, SecureSum(6, 0, 1))

    def lie(name: str, answer: Step) -> Step:
        if answer.stage is Stage.SHARE and name in ("n0", "n1", "n2"):
            items = {n: content for n, content in answer.items.items() if n != "n5"}
            return replace(answer, nodes=answer.nodes[:-1], items=items)
        return answer

    opened, outcomes = asyncio.run(world.attempt(lie))
    assert opened is None
    assert None not in outcomes.values()
    for name in world.sites:
        assert Stage.OPEN not in steps_of(world, name)


@pytest.mark.parametrize("kept", [0, 3])
def test_without_a_quorum_of_signatures_nothing_is_opened(world: World, kept: int) -> None:
    """w = ⌊(5 + 1)/2⌋ + 1 = 4."""

    def lie(_: str, answer: Step) -> Step:
        if answer.stage is Stage.SIGN:
            return replace(answer, items=dict(list(answer.items.items())[:kept]))
        return answer

    opened, outcomes = asyncio.run(world.attempt(lie))
    assert opened is None
    assert None not in outcomes.values()
    for name in world.sites:
        assert Stage.OPEN not in steps_of(world, name)


def test_signatures_of_another_attempt_are_no_quorum(world: World) -> None:
    first: dict[str, dict[str, bytes]] = {}

    def note(name: str, answer: Step) -> Step:
        if answer.stage is Stage.SIGN:
            first[name] = dict(answer.items)
        return answer

    def replay(name: str, answer: Step) -> Step:
        return replace(answer, items=first[name]) if answer.stage is Stage.SIGN else answer

    opened, _ = asyncio.run(world.attempt(note))
    assert opened is not None
    again, outcomes = asyncio.run(world.attempt(replay, number=2))
    assert again is None
    assert all("signed" in str(outcome) for outcome in outcomes.values())


# Charges and ledgers.


def test_nodes_that_verify_open_what_was_charged(verified: World) -> None:
    opened, outcomes = asyncio.run(verified.attempt())
    assert opened is not None
    assert set(outcomes.values()) == {None}


def test_nodes_that_verify_open_nothing_that_was_not_charged(verified: World) -> None:
    opened, outcomes = asyncio.run(verified.attempt(charge=False))
    assert opened is None
    assert {str(outcome) for outcome in outcomes.values()} == {
        "the ledger has not charged the attempt"
    }
    for name in verified.sites:
        assert Stage.OPEN not in steps_of(verified, name)


def test_two_ledgers_that_are_shown_to_two_nodes_are_noticed_in_the_round(verified: World) -> None:
    """The offer of n2 has the head that it was shown, or that of the others."""
    verified.heads["n2"] = Head(1, "00" * 32)

    def its_own(name: str, offer: RoundOffer) -> RoundOffer:
        return replace(offer, head=offer.roster[2].head) if name == "n2" else offer

    for number, change in enumerate((its_own, without_change), 1):
        opened, outcomes = asyncio.run(verified.attempt(number=number, change=change))
        assert opened is None
        shown = {str(outcome) for outcome in outcomes.values()}
        assert shown == {"the server has shown two ledgers in this run"}
    assert verified.server.taken == {}


# Consent.


def test_a_node_takes_part_only_with_the_nodes_that_it_has_pinned(world: World) -> None:
    site, terms = world.sites["n0"], world.proposal().terms
    assert world.consent.objection_to_nodes(site.welcome, terms) is None
    for nodes in (
        site.welcome.nodes[:-1],
        (*site.welcome.nodes[:-1], replace(site.welcome.nodes[-1], fingerprint=bytes(32))),
        (*site.welcome.nodes[:-1], replace(site.welcome.nodes[-1], users=5)),
        (),
    ):
        objection = world.consent.objection_to_nodes(replace(site.welcome, nodes=nodes), terms)
        assert objection is not None
        assert "digest" in objection
    anybody = world.consent.model_copy(update={"enrolment": None})
    objection = anybody.objection_to_nodes(site.welcome, terms)
    assert str(objection).endswith("this node's consent does not name it")


def test_a_review_prints_the_line_that_pins_the_nodes(world: World) -> None:
    site, terms = world.sites["n0"], world.proposal().terms
    text = review_of(site.welcome, terms)
    assert f'enrolment = "{world.consent.enrolment}"' in text.splitlines()
    for node in site.welcome.nodes:
        assert f"{node.name}, {USERS} users, certificate {node.fingerprint.hex()}" in text


def test_a_node_may_ask_that_the_server_need_not_be_trusted(world: World) -> None:
    site, terms = world.sites["n0"], world.proposal().terms
    event = replace(terms.price.event, secure_sum=None)
    trusting = replace(terms, price=replace(terms.price, event=event))
    assert "trust none" in str(world.consent.objection_to_nodes(site.welcome, trusting))
    anything = world.consent.model_copy(update={"trust": None})
    assert anything.objection_to_nodes(site.welcome, trusting) is None


def test_a_node_may_ask_for_a_number_of_nodes_that_may_collude(world: World) -> None:
    site, terms = world.sites["n0"], world.proposal().terms
    for least, fits in ((1, True), (2, False)):
        consent = world.consent.model_copy(update={"least_colluding_nodes": least})
        assert (consent.objection_to_nodes(site.welcome, terms) is None) == fits


def test_without_a_certificate_a_node_has_no_key_for_a_secure_sum(world: World) -> None:
    site, terms = world.sites["n0"], world.proposal().terms
    site.secure.identity = replace(site.identity, certificate=None)
    with pytest.raises(InvalidValueError, match="certificate"):
        site.countersignature(terms)
