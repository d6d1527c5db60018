"""A server that deviates, with t nodes: it learns the total of all honest survivors, or nothing."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SecureSum
from fedpriv.secure_sums import parameters, protocol
from fedpriv.secure_sums.parameters import degree_of, threshold_of
from fedpriv.secure_sums.protocol import KeyPair, Participant, key_statement, unmasked
from tests.secure_sums.adversary import Coalition, Upload, relations, uploads_of
from tests.secure_sums.world import (
    World,
    begun,
    opened_by,
    roster_of,
    sign,
    totals_of,
    verify,
    world,
)

ZERO = np.zeros(1, np.int64)


def lists_of(names: Sequence[str], least: int) -> list[tuple[str, ...]]:
    """All lists of at least so many names."""
    return [chosen for size in range(least, len(names) + 1) for chosen in combinations(names, size)]


def opened_to(
    at: World,
    uploads: Mapping[str, Upload],
    colluding: Sequence[str],
    sharers: tuple[str, ...],
    survivors: tuple[str, ...],
) -> dict[str, Mapping[str, bytes]]:
    """What honest nodes open if all that may sign these lists do, the colluding ones too."""
    honest = [
        node
        for node, upload in uploads.items()
        if upload.state.sharers == sharers and node in survivors
    ]
    statement = protocol.list_statement(at.roster, sharers, survivors)
    signers = (*honest, *(node for node in colluding if node in survivors))
    signatures = {name: sign(name, statement) for name in signers}
    opened = {}
    for node in honest:
        try:
            opened[node] = uploads[node].state.opened(survivors, signatures, verify)
        except InvalidValueError:
            assert len(signatures) < at.secure.quorum(len(at.names))
    return opened


def shown(
    at: World, honest: Sequence[str], choices: int | None, seed: int
) -> Iterator[dict[str, tuple[str, ...]]]:
    """All ways, or some, to show each honest node a list of sharers, or none: it drops out."""
    lists = lists_of(at.names, len(at.names) - at.secure.dropouts)
    options = [[None, *(each for each in lists if node in each)] for node in honest]
    generator = random.Random(seed)
    drawn = (
        product(*options)
        if choices is None
        # Two lists, as a rule: of more, fewer nodes are for each.
        else (two_of(options, generator) for _ in range(choices))
    )
    for chosen in drawn:
        yield {node: each for node, each in zip(honest, chosen, strict=True) if each}


def two_of(options: list[list], generator: random.Random) -> list:
    few = generator.sample(sorted({each for some in options for each in some if each}), 2)
    return [generator.choice([e for e in (*few, *few, None) if e in some]) for some in options]


CASES = [  # n, t, d, how many ways to show lists of sharers: None is all
    *((2, 0, 0, None), (3, 1, 0, None), (3, 0, 1, None), (4, 1, 1, None), (4, 2, 0, None)),
    *((5, 1, 1, 150), (5, 2, 1, None), (6, 1, 2, 60), (6, 2, 1, 150), (6, 0, 2, 40)),
]


@pytest.mark.parametrize(("n", "t", "d", "choices"), CASES)
def test_nothing_but_the_total_of_all_honest_survivors_can_be_read(
    n: int, t: int, d: int, choices: int | None
) -> None:
    """All behaviours of a server that shows lists as it likes and has the signatures it can get."""
    at = world(n, t, d)
    totals = totals_of(at.names, 2, 1)
    lists = lists_of(at.names, n - d)
    generator = random.Random(n)
    kept: dict[tuple[str, tuple[str, ...]], Upload] = {}
    released = hidden = 0
    for number, ways in enumerate(shown(at, at.names[t:], choices, n)):
        colluding = at.names[:t]
        for node, sharers in ways.items():
            if (node, sharers) not in kept:
                kept[node, sharers] = uploads_of(at, totals, {node: sharers})[node]
        uploads = {node: kept[node, sharers] for node, sharers in ways.items()}
        pairs = [(s, u) for s in {*ways.values()} for u in lists if {*u} <= {*s}]
        if choices is not None:
            pairs = generator.sample(pairs, min(len(pairs), 4))
        for sharers, survivors in pairs:
            opened = opened_to(at, uploads, colluding, sharers, survivors)
            coalition = Coalition(at, frozenset(colluding), opened)
            honest = frozenset({*survivors} - {*colluding})
            complete = opened and all(ways.get(node) == sharers for node in honest)
            allowed = {honest} if complete else set()
            assert coalition.read(uploads) == allowed, (number, ways, sharers, survivors)
            basis = coalition.relations(uploads)
            assert basis == [dict.fromkeys(sorted(honest), Fraction(1))] * len(allowed)
            released += bool(complete)
            hidden += not complete
    assert released
    assert hidden or n == 2


def test_the_adversary_of_these_tests_reads_what_is_not_hidden() -> None:
    """Of any node both secrets, or of all the seeds: else the tests above would show nothing."""
    at = world(4, 1, 1)
    uploads = uploads_of(at, totals_of(at.names, 2, 0), dict.fromkeys(at.names[1:], at.names))
    seeds = {
        node: {owner: seed for owner, (_, seed) in upload.state.shares.items()}
        for node, upload in uploads.items()
    }
    one = at.names[1]
    keys = {
        node: shares | {one: uploads[node].state.shares[one][0]}
        for node, shares in seeds.items()
        if node != one
    }
    with_seeds = Coalition(at, frozenset(at.names[:1]), seeds)
    assert with_seeds.read(uploads) == {frozenset(at.names[1:])}
    both = replace(with_seeds, opened=keys)  # of one node the masking key in place of the seed
    read = both.read({node: uploads[node] for node in at.names[2:]})
    assert read == {frozenset(at.names[2:])}


@pytest.mark.parametrize(
    ("n", "t", "d"), [(n, t, d) for n in range(2, 9) for t in range(n - 1) for d in range(n)]
)
def test_two_lists_never_both_get_a_quorum(n: int, t: int, d: int) -> None:
    if d > n - ((n + t) // 2 + 1):
        with pytest.raises(InvalidValueError, match="dropouts is"):
            SecureSum(n, t, d)
        return
    quorum = SecureSum(n, t, d).quorum(n)
    # Honest nodes sign one list each, colluding ones both.
    reached = [
        min(first, n - t - first - idle) + t
        for first in range(n - t + 1)
        for idle in range(n - t - first + 1)
    ]
    assert max(reached) < quorum <= n - d


def test_a_server_that_shows_two_lists_of_survivors_opens_at_most_one() -> None:
    at = world(5, 1, 1)
    liar, honest = at.names[0], at.names[1:]
    uploads = uploads_of(at, totals_of(at.names, 2, 0), dict.fromkeys(honest, at.names))
    lists = [at.names, at.names[:4]]
    for chosen in product([0, 1], repeat=3):  # the last of the honest is in one list alone
        signed = dict(zip(honest, (*chosen, 0), strict=True))
        opened = {}
        for which, survivors in enumerate(lists):
            mine = [node for node in honest if signed[node] == which]
            statement = protocol.list_statement(at.roster, at.names, survivors)
            signatures = {node: sign(node, statement) for node in (*mine, liar)}
            for node in mine:
                try:
                    opened[node] = uploads[node].state.opened(survivors, signatures, verify)
                except InvalidValueError:
                    assert len(signatures) < 4
        coalition = Coalition(at, frozenset({liar}), opened)
        # With the liar, three honest nodes are the four that a quorum takes.
        allowed = {0: {frozenset(honest)}, 1: {frozenset(honest)}, 3: {frozenset(honest[:3])}}
        assert coalition.read(uploads) == allowed.get(sum(chosen), set())


def isolating(at: World, victim: str, colluding: Sequence[str]) -> tuple[dict, tuple[str, ...]]:
    """Lists of sharers, and of survivors, that take the most neighbours from one honest node.

    The victim is shown a list without d of its honest neighbours, the others all nodes; the
    survivors lack d others.
    """
    d = at.secure.dropouts
    linked = [name for name in at.nodes[victim].sealed if name not in colluding]
    first, second = linked[:d], linked[d : 2 * d]
    honest = [name for name in at.names if name not in colluding]
    ways = dict.fromkeys(honest, at.names)
    ways[victim] = tuple(name for name in at.names if name not in first)
    return ways, tuple(name for name in at.names if name not in second)


@pytest.mark.parametrize("degree", [8, None])
def test_two_lists_of_sharers_isolate_a_node_only_in_a_sparser_graph(
    monkeypatch: pytest.MonkeyPatch, degree: int | None
) -> None:
    """n = 36, t = 2, d = 3: k = 10 for t + 2d + 1 = 9. With k = 8 the victim's sum is read."""
    if degree:
        monkeypatch.setattr(protocol, "degree_of", lambda *_: degree)
    pairs = {f"node-{number:02}": KeyPair.fresh() for number in range(36)}
    at = begun(pairs, SecureSum(36, 2, 3))
    victim = at.names[20]
    linked = list(at.nodes[victim].sealed)
    assert len(linked) == (degree or 10)
    colluding = linked[-2:]
    ways, survivors = isolating(at, victim, colluding)
    uploads = uploads_of(at, totals_of(at.names, 2, 3), ways)
    opened = opened_to(at, uploads, colluding, at.names, survivors)
    assert len(opened) == 36 - 2 - 3 - 1  # all honest survivors but the victim
    coalition = Coalition(at, frozenset(colluding), opened)
    alone = {victim: uploads[victim]}
    assert coalition.read(alone) == ({frozenset({victim})} if degree else set())
    basis = coalition.relations(uploads)
    assert basis == ([{victim: Fraction(1)}] if degree else [])


@pytest.mark.parametrize("degree", [6, None])
def test_a_server_that_drops_chosen_nodes_cuts_the_circle_only_in_a_sparser_graph(
    monkeypatch: pytest.MonkeyPatch, degree: int | None
) -> None:
    """n = 36, t = 4, d = 2: two runs of k/2 = 3 nodes, colluding or dropped, cut off two others."""
    if degree:
        monkeypatch.setattr(protocol, "degree_of", lambda *_: degree)
    pairs = {f"node-{number:02}": KeyPair.fresh() for number in range(36)}
    at = begun(pairs, SecureSum(36, 4, 2))
    circle = [at.names[place] for place in parameters._circle(at.roster.digest, 36)]
    victims, dropped = circle[3:5], (circle[0], circle[7])
    colluding = (*circle[1:3], *circle[5:7])
    honest = [name for name in at.names if name not in colluding]
    survivors = tuple(name for name in at.names if name not in dropped)
    uploads = uploads_of(at, totals_of(at.names, 2, 3), dict.fromkeys(honest, at.names))
    opened = opened_to(at, uploads, colluding, at.names, survivors)
    coalition = Coalition(at, frozenset(colluding), opened)
    everyone = frozenset({*honest} - {*dropped})
    basis = coalition.relations(uploads)
    assert len(basis) == (2 if degree else 1)
    assert degree or basis == [dict.fromkeys(sorted(everyone), Fraction(1))]
    part = coalition.read({name: uploads[name] for name in victims})
    assert part == ({frozenset(victims)} if degree else set())


@pytest.mark.parametrize(("n", "t", "d"), [(36, 2, 3), (34, 5, 1), (40, 0, 5)])
def test_no_lists_read_less_than_the_total_in_a_sparse_graph(n: int, t: int, d: int) -> None:
    """Adversaries that concentrate on a node or on an arc of the circle, and random ones."""
    secure = SecureSum(n, t, d)
    linked = parameters.neighbours(bytes(32), n, degree_of(n, secure))
    generator = random.Random(n)
    released = 0
    for _ in range(150):
        victim = generator.randrange(n)
        near = sorted(linked[victim], key=lambda _: generator.random())
        far = generator.sample([node for node in range(n) if node not in near], n - len(near))
        order = (near + far) if generator.random() < 0.7 else generator.sample(range(n), n)
        order.remove(victim)
        colluding = {*order[:t]}
        missing, dropped = {*order[t : t + d]}, {*order[t + d : t + 2 * d]}
        # Some honest nodes are shown a list without `missing`; all else is for the full list.
        deceived = {victim, *generator.sample(order, generator.randint(0, n // 2))} - missing
        deceived -= colluding if generator.random() < 0.9 else set()
        if generator.random() < 0.3:
            deceived = set()
        survivors = {*range(n)} - dropped
        honest = {*range(n)} - colluding
        signers = (survivors - deceived) | (colluding & survivors)
        won = len(signers) >= secure.quorum(n)
        rows = {
            str(node): unknown_masks(
                node,
                linked[node],
                missing if node in deceived else set(),
                colluding,
                dropped if won else set(),
                seeds=survivors if won else set(),
            )
            for node in sorted(honest)
        }
        basis = relations(rows)
        everyone = {str(node) for node in honest & survivors}
        allowed = won and not deceived & survivors & honest
        assert basis == [dict.fromkeys(sorted(everyone, key=int), Fraction(1))] * allowed
        released += allowed
    assert released > 10


def unknown_masks(
    node: int,
    linked: Sequence[int],
    missing: set[int],
    colluding: set[int],
    keys: set[int],
    seeds: set[int],
) -> dict[object, int]:
    """Unknown masks of an honest node's upload, if masking keys of `keys` are opened."""
    masks: dict[object, int] = {} if node in seeds else {("self", node): 1}
    for other in linked:
        if other not in missing | colluding | keys and node not in keys:
            pair = (min(node, other), max(node, other), frozenset(missing))
            masks[pair] = 1 if node < other else -1
    return masks


def test_messages_of_another_roster_or_attempt_do_not_open() -> None:
    """Two rosters for one attempt, and messages that the server kept from an earlier one."""
    pairs = {name: KeyPair.fresh() for name in "abcd"}
    secure = SecureSum(3, 1)
    now = begun(pairs, secure)
    others = {
        "another attempt": begun(pairs, secure, bytes(32)),
        "fewer nodes": begun({name: pairs[name] for name in "abc"}, secure),
        "another key": begun(pairs | {"d": KeyPair.fresh()}, secure),
    }
    for other in others.values():
        replayed = now.sealed("a", "bcd") | {"b": other.nodes["b"].sealed["a"]}
        with pytest.raises(InvalidValueError, match="message of node 'b' to 'a' cannot be opened"):
            now.nodes["a"].masked(ZERO, "abcd", replayed)


def test_messages_do_not_open_in_another_place_or_changed() -> None:
    at = world(4, 1, 1)
    a, b, c, _ = at.names
    false = {
        "to another": at.nodes[b].sealed[c],
        "from another": at.nodes[c].sealed[a],
        "its own, sent back": at.nodes[a].sealed[b],
        "nothing": b"",
        "cut": at.nodes[b].sealed[a][:-1],
        "a bit flipped": at.nodes[b].sealed[a][:-1] + bytes([at.nodes[b].sealed[a][-1] ^ 1]),
    }
    for message in false.values():
        with pytest.raises(InvalidValueError, match=f"message of node '{b}' to '{a}' cannot be"):
            at.nodes[a].masked(ZERO, at.names, at.sealed(a, at.names) | {b: message})
    missing = at.sealed(a, at.names)
    del missing[b]
    with pytest.raises(InvalidValueError, match="cannot be opened; it must be sealed for this"):
        at.nodes[a].masked(ZERO, at.names, missing)
    _, state = at.nodes[a].masked(ZERO, (a, c, at.names[3]), missing)  # b did not share
    assert set(state.shares) == {c, at.names[3]}


def test_a_server_that_substitutes_keys_is_noticed() -> None:
    """By the node whose key it is, by each signature, and by everybody's messages."""
    pairs = {name: KeyPair.fresh() for name in "abc"}
    secure = SecureSum(3, 1)
    false = pairs | {"b": KeyPair.fresh()}
    roster = roster_of(false)
    with pytest.raises(InvalidValueError, match="roster has another key of node 'b'"):
        Participant.begin(roster, "b", pairs["b"], secure)
    signature = sign("b", key_statement(roster.binding, "b", pairs["b"].public))
    member = roster.member("b")
    assert not verify("b", key_statement(roster.binding, "b", member.key), signature)
    # Another node's key, or one of another attempt, is not signed for this place either.
    assert not verify("b", key_statement(bytes(32), "b", pairs["b"].public), signature)
    assert not verify("b", key_statement(roster.binding, "a", pairs["b"].public), signature)
    true, deceived = begun(pairs, secure), Participant.begin(roster, "a", pairs["a"], secure)
    with pytest.raises(InvalidValueError, match="message of node 'b' to 'a' cannot be opened"):
        deceived.masked(ZERO, "abc", true.sealed("a", "abc"))


def test_masks_of_two_lists_or_rosters_share_no_word() -> None:
    """Else a difference of two uploads would show a difference of two sums."""
    at, other = world(4, 1, 1), world(4, 1, 1, which=1)
    a, b = at.names[:2]
    key = at.pairs[a].masking
    every, fewer = protocol._digest(at.names), protocol._digest(at.names[:3])
    keys = [
        protocol._pair_key(at.roster, every, (a, key), b),
        protocol._pair_key(at.roster, fewer, (a, key), b),
        protocol._pair_key(replace(at.roster, binding=other.roster.binding), every, (a, key), b),
        protocol._pair_key(at.roster, every, (a, key), at.names[2]),
        protocol._self_key(at.roster, every, a, key),
        protocol._self_key(at.roster, fewer, a, key),
        protocol._sealing_key(at.roster, at.pairs[a], a, b, sender=True),
        protocol._sealing_key(at.roster, at.pairs[a], a, b, sender=False),
    ]
    assert len({*keys}) == len(keys)
    assert keys[0] == protocol._pair_key(at.roster, every, (b, at.pairs[b].masking), a)
    assert keys[-1] == protocol._sealing_key(at.roster, at.pairs[b], b, a, sender=True)


def test_a_server_that_asks_twice_gets_the_same_shares_or_none() -> None:
    at = world(5, 1, 1)
    uploads = uploads_of(at, totals_of(at.names, 1, 0), dict.fromkeys(at.names, at.names))
    states = {node: upload.state for node, upload in uploads.items()}
    first = opened_by(states, at.names, at.names)
    assert opened_by(states, at.names, at.names[1:])[at.names[1]] == first[at.names[1]]
    # For another list there are only the signatures of the colluding, and those of the first list.
    again = at.names[:4]
    old = {node: sign(node, states[node].statement(at.names)) for node in at.names}
    forged = old | {at.names[0]: sign(at.names[0], states[at.names[0]].statement(again))}
    with pytest.raises(InvalidValueError, match="1 survivors signed"):
        states[at.names[1]].opened(again, forged, verify)


def test_a_node_that_was_left_out_or_put_in_signs_nothing() -> None:
    at = world(5, 1, 1)
    narrow = at.masked(at.names[0], ZERO, at.names[:4])[1]
    wide = at.masked(at.names[4], ZERO, at.names)[1]
    with pytest.raises(InvalidValueError, match="list of survivors must name it"):
        wide.statement(at.names[:4])
    with pytest.raises(InvalidValueError, match="list of sharers must name it"):
        at.nodes[at.names[4]].masked(ZERO, at.names[:4], at.sealed(at.names[4], at.names))
    with pytest.raises(InvalidValueError, match=r"survivors include \['node-004'\]"):
        narrow.statement(at.names)


@pytest.mark.parametrize("one_key", [True, False])
def test_the_key_of_a_dropped_node_opens_its_messages_only_if_it_has_no_other(
    one_key: bool,
) -> None:
    """A server that calls a node dropped, whose upload it has, learns its masking key."""
    pairs = {name: KeyPair.fresh() for name in ("a", "b", "c", "d", "e")}
    if one_key:  # as if a node had one X25519 key for both purposes
        pairs = {
            name: replace(p, sealing=p.masking, public=p.public[32:64] + p.public[32:])
            for name, p in pairs.items()
        }
    at = begun(pairs, SecureSum(5, 1, 1))
    uploads = uploads_of(at, totals_of(at.names, 2, 0), dict.fromkeys(at.names, at.names))
    survivors = tuple("bcde")
    opened = opened_to(at, uploads, (), at.names, survivors)
    masking = Coalition(at, frozenset(), opened)._restored["a", True]
    assert masking == pairs["a"].masking
    # The server relayed the messages of a. With that key in both places it reads them.
    server = Participant(at.roster, "a", KeyPair(b"", masking, masking, bytes(32)), at.secure, {})
    shares = {}
    for name in survivors:
        key = protocol._sealing_key(at.roster, server.pair, "a", name, sender=True)
        message = at.nodes["a"].sealed[name]
        try:
            text = protocol.AESGCM(key).decrypt(message[:12], message[12:], None)
        except protocol.InvalidTag:
            continue
        shares[name] = {"a": text[33:66]}
    assert bool(shares) == one_key
    if one_key:
        points = {at.roster.index(name) + 1: given["a"] for name, given in shares.items()}
        member = at.roster.member("a")
        assert protocol._restored(member, points, 2, masking=False) == pairs["a"].seed


@pytest.mark.parametrize(("n", "t", "d"), [(3, 1, 0), (5, 2, 1), (8, 3, 1), (36, 5, 2)])
def test_colluding_nodes_are_one_share_short_of_every_secret(n: int, t: int, d: int) -> None:
    at = world(n, t, d)
    threshold = threshold_of(at.secure)
    owner = at.names[-1]
    held = list(at.nodes[owner].sealed)[:t]
    texts = {name: at.nodes[name]._text(owner, at.nodes[owner].sealed[name]) for name in held}
    for masking, cut in ((True, slice(0, 33)), (False, slice(33, 66))):
        points = {at.roster.index(name) + 1: text[cut] for name, text in texts.items()}
        with pytest.raises(InvalidValueError, match=f"from {t} shares; {t + 1} true ones are"):
            protocol._restored(at.roster.member(owner), points, threshold, masking=masking)
    # One more suffices.
    extra = list(at.nodes[owner].sealed)[t]
    text = at.nodes[extra]._text(owner, at.nodes[owner].sealed[extra])
    points |= {at.roster.index(extra) + 1: text[33:66]}
    found = protocol._restored(at.roster.member(owner), points, threshold, masking=False)
    assert found == at.pairs[owner].seed


def test_a_void_attempt_has_revealed_nothing() -> None:
    """Uploads without one opened share: every combination of them keeps an unknown mask."""
    at = world(5, 2, 1)
    honest = at.names[2:]
    uploads = uploads_of(at, totals_of(at.names, 2, 0), dict.fromkeys(honest, at.names))
    coalition = Coalition(at, frozenset(at.names[:2]), {})
    assert coalition.relations(uploads) == []
    assert coalition.read(uploads) == set()
    total = np.sum([upload.upload for upload in uploads.values()], axis=0, dtype=np.uint64)
    with pytest.raises(InvalidValueError, match="cannot be restored from 0 shares"):
        unmasked(total, at.roster, at.secure, at.names, at.names, {})
