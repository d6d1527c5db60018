"""The total of whoever uploaded, to the bit, whoever drops out; and what is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import isprime

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import rounded_noise
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.privacy.noise import SeededEntropy, keystream, rounded_gaussian
from fedpriv.secure_sums import protocol
from fedpriv.secure_sums.parameters import degree_of, threshold_of
from fedpriv.secure_sums.protocol import (
    KeyPair,
    Member,
    Participant,
    Roster,
    key_statement,
    list_statement,
    unmasked,
)
from tests.secure_sums.world import (
    BINDING,
    World,
    begun,
    opened_by,
    roster_of,
    sign,
    totals_of,
    verify,
    world,
)

PATTERNS = [  # n, t, d, how many patterns: 1,000 in all
    *((2, 0, 0, 20), (3, 1, 0, 100), (3, 0, 1, 160), (4, 1, 1, 170), (5, 1, 1, 170)),
    *((5, 2, 1, 170), (8, 2, 2, 100), (9, 0, 4, 70), (32, 10, 10, 5), (33, 5, 3, 15)),
    *((36, 2, 4, 15), (40, 4, 6, 5)),
]


def run_round(
    at: World,
    sharers: list[str],
    survivors: list[str],
    openers: list[str],
    seed: int,
    dtype: type[np.signedinteger] = np.int64,
) -> tuple[np.ndarray, np.ndarray]:
    """The total that the server gets, and the plain sum."""
    totals = totals_of(survivors, 3, seed, dtype)
    masked = {name: at.masked(name, totals[name], sharers) for name in survivors}
    uploads = [upload for upload, _ in masked.values()]
    uploaded = {name: state for name, (_, state) in masked.items()}
    opened = opened_by(uploaded, survivors, openers)
    assert {upload.dtype for upload in uploads} == {np.dtype(f"u{np.dtype(dtype).itemsize}")}
    total = np.sum(uploads, axis=0, dtype=uploads[0].dtype)
    result = unmasked(total, at.roster, at.secure, sharers, survivors, opened)
    assert result.dtype == dtype
    return result, np.sum([totals[name] for name in survivors], axis=0)


def test_patterns_are_a_thousand() -> None:
    assert sum(count for *_, count in PATTERNS) == 1000


@pytest.mark.parametrize(("n", "t", "d", "count"), PATTERNS)
def test_total_is_the_plain_sum_whoever_drops_out(n: int, t: int, d: int, count: int) -> None:
    at, generator = world(n, t, d), random.Random(n)
    for number in range(count):
        order = generator.sample(at.names, n)
        # How many are gone before shares are sealed, before the upload, and before shares open.
        gone = sorted(generator.randint(0, d) for _ in range(3))
        sharers, survivors, openers = (order[lost:] for lost in gone)
        dtype = (np.int32, np.int64)[number % 2]
        result, plain = run_round(at, sharers, survivors, openers, number, dtype)
        np.testing.assert_array_equal(result, plain)


@pytest.mark.parametrize(("n", "t", "d"), [(5, 1, 1), (40, 4, 6)])
def test_one_drop_out_more_ends_the_round(n: int, t: int, d: int) -> None:
    at = world(n, t, d)
    names = list(at.names)
    with pytest.raises(InvalidValueError, match=f"{n - d - 1} of {n}.*at least {n - d}"):
        at.masked(names[-1], np.zeros(1, np.int64), names[d + 1 :])
    _, state = at.masked(names[-1], np.zeros(1, np.int64), names)
    with pytest.raises(InvalidValueError, match=f"{n - d - 1} of {n}.*at least {n - d}"):
        state.statement(names[d + 1 :])


def test_few_shares_name_the_node_that_they_do_not_suffice_for() -> None:
    at = world(5, 2, 1)
    names = list(at.names)
    masked = {name: at.masked(name, np.ones(1, np.int64), names) for name in names}
    uploaded = {name: state for name, (_, state) in masked.items()}
    total = np.sum([upload for upload, _ in masked.values()], axis=0, dtype=np.uint64)
    opened = opened_by(uploaded, names, names)
    for name in names[2:]:
        del opened[name]
    with pytest.raises(InvalidValueError, match=r"self-mask of node 'node-000'.* 1 shares; 3 true"):
        unmasked(total, at.roster, at.secure, names, names, opened)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_lie_about_a_share_is_passed_over_or_named(dropped: bool) -> None:
    at = world(8, 2, 2)
    names = list(at.names)
    survivors = names[1:] if dropped else names
    masked = {name: at.masked(name, np.ones(1, np.int64), names) for name in survivors}
    uploaded = {name: state for name, (_, state) in masked.items()}
    total = np.sum([upload for upload, _ in masked.values()], axis=0, dtype=np.uint64)
    opened = opened_by(uploaded, survivors, survivors)
    owner = names[0]
    for number, liar in enumerate(survivors[-6:], start=1):
        opened[liar] = opened[liar] | {owner: (5).to_bytes(33, "big")}
        if number <= 4:  # 3 of 7 in a row are true
            result = unmasked(total, at.roster, at.secure, names, survivors, opened)
            assert result == len(survivors)
    with pytest.raises(InvalidValueError, match=f"of node '{owner}' cannot be restored from 7"):
        unmasked(total, at.roster, at.secure, names, survivors, opened)
    opened[names[3]] = opened[names[3]] | {owner: b"short"}
    with pytest.raises(InvalidValueError, match=f"of node '{owner}' cannot be restored from 6"):
        unmasked(total, at.roster, at.secure, names, survivors, opened)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_upload_is_the_sum_of_plain_masks(dtype: type[np.signedinteger]) -> None:
    """Blocks of several masks against whole masks, added one by one in Python's integers."""
    at = world(3, 1, 0)
    dimension, size = protocol._BLOCK + 7, np.dtype(dtype).itemsize
    (total,) = totals_of(["any"], dimension, 0, dtype).values()
    sharers = at.names
    upload, _ = at.masked("node-001", total, sharers)
    pair = at.pairs["node-001"]
    self_key = protocol._self_key(at.roster, protocol._digest(sharers), "node-001", pair.seed)
    keys = [
        protocol._pair_key(
            at.roster, protocol._digest(sharers), (other, at.pairs[other].masking), "node-001"
        )
        for other in ("node-000", "node-002")
    ]
    own, before, after = (mask_of(key, dimension, size) for key in (self_key, *keys))
    plain = [
        (a + b - c + d) % 2 ** (8 * size)
        for a, b, c, d in zip(total.tolist(), own, before, after, strict=True)
    ]
    assert upload.tolist() == plain


def mask_of(key: bytes, dimension: int, size: int) -> list[int]:
    stream = keystream(key, size * dimension).tobytes()
    return [int.from_bytes(stream[at : at + size], "little") for at in range(0, len(stream), size)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_upload_alone_looks_uniform(dtype: type[np.signedinteger]) -> None:
    at = world(3, 1, 0)
    upload, _ = at.masked("node-000", np.zeros(100_000, dtype), at.names)
    bits = np.unpackbits(upload.view(np.uint8)).reshape(100_000, -1)
    deviations = (bits.mean(axis=0) - 0.5) * 2 * np.sqrt(len(bits))
    assert np.abs(deviations).max() < 6.5  # standard deviations; 5e-9 false alarms of 64 bits


def test_any_threshold_of_shares_restores_a_secret_and_fewer_do_not() -> None:
    secret = (2**256 - 1).to_bytes(32, "big")  # the largest
    points = list(range(1, 8))
    shares = dict(zip(points, protocol._shares(secret, 4, points), strict=True))
    generator = random.Random(0)
    for _ in range(50):
        chosen = [(x, int.from_bytes(shares[x], "big")) for x in generator.sample(points, 4)]
        assert protocol._at_zero(chosen) == 2**256 - 1
        # With any other secret in place of one share there is a polynomial, too.
        other = [(0, 12345), *chosen[1:]]
        assert protocol._at_zero(other) == 12345
        assert protocol._at_zero(chosen[1:]) != 2**256 - 1
    again = protocol._shares(secret, 4, points)
    assert not {*again} & {*shares.values()}


def test_the_field_of_shares_is_a_field_that_holds_every_key() -> None:
    assert isprime(protocol._PRIME)
    assert 2**256 <= protocol._PRIME < 2 ** (8 * protocol._SHARE_BYTES)


def test_secrets_do_not_show_in_a_repr() -> None:
    at = world(3, 1, 0)
    _, state = at.masked("node-000", np.zeros(1, np.int64), at.names)
    pair = at.pairs["node-000"]
    text = repr((pair, at.nodes["node-000"], state))
    for secret in (pair.sealing, pair.masking, pair.seed, *state.shares["node-001"]):
        assert repr(secret)[2:-1] not in text
    assert repr(pair.public) in text


def test_keys_are_fresh_and_private_parts_stay_apart() -> None:
    pairs = [KeyPair.fresh() for _ in range(4)]
    parts = [part for pair in pairs for part in (pair.sealing, pair.masking, pair.seed)]
    assert len({*parts}) == 12
    assert {len(part) for part in parts} == {32}
    for pair in pairs:
        entry = Member("a", pair.public)
        assert entry.sealing + entry.masking + entry.seed_hash == pair.public
        assert all(part not in pair.public for part in (pair.sealing, pair.masking, pair.seed))


def test_bad_values_get_a_sentence() -> None:
    at = world(3, 1, 0)
    pair, node, secure = at.pairs["node-000"], at.nodes["node-000"], at.secure
    members = at.roster.members
    with pytest.raises(InvalidValueError, match=r"public key of node 'a' has 5 bytes; .* have 96"):
        Member("a", b"short")
    with pytest.raises(InvalidValueError, match="binding has 3 bytes; it must have 32"):
        Roster(b"abc", members)
    for wrong in (members[::-1], (members[0], *members)):
        with pytest.raises(InvalidValueError, match="each node once, in the order of names"):
            Roster(BINDING, wrong)
    with pytest.raises(InvalidValueError, match="'stranger' is not in the roster"):
        at.roster.index("stranger")
    with pytest.raises(InvalidValueError, match="roster has 2 nodes; the round needs at least 3"):
        Participant.begin(Roster(BINDING, members[:2]), "node-000", pair, secure)
    twice = ["node-000", "node-000", "node-001"]
    with pytest.raises(InvalidValueError, match="names 3 of 3 nodes; it must name each only once"):
        node.masked(np.zeros(2, np.int64), twice, {})
    with pytest.raises(InvalidValueError, match="'stranger' is not in the roster"):
        unmasked(np.zeros(1, np.uint64), at.roster, secure, at.names, ["stranger"], {})
    wide = world(5, 1, 1)
    with pytest.raises(InvalidValueError, match=r"'node-000'.*must be among the sharers"):
        unmasked(np.zeros(1, np.uint64), wide.roster, wide.secure, wide.names[1:], wide.names, {})


def test_a_message_that_is_too_long_or_too_short_is_refused() -> None:
    at = world(3, 1, 0)
    sender, receiver = "node-000", "node-001"
    key = protocol._sealing_key(at.roster, at.pairs[sender], sender, receiver, sender=True)
    for text in (bytes(65), bytes(66 + 1025)):
        message = bytes(12) + protocol.AESGCM(key).encrypt(bytes(12), text, None)
        sealed = at.sealed(receiver, at.names) | {sender: message}
        with pytest.raises(InvalidValueError, match=f"has {len(text)} bytes; it must hold two"):
            at.nodes[receiver].masked(np.zeros(1, np.int64), at.names, sealed)


def test_a_public_key_of_small_order_is_refused() -> None:
    pairs = {name: KeyPair.fresh() for name in ("a", "b", "c")}
    weak = replace(pairs["c"], public=bytes(32) + pairs["c"].public[32:])
    with pytest.raises(InvalidValueError, match="public key of node 'c' is not valid"):
        begun(pairs | {"c": weak}, SecureSum(3, 1))


NAMES = st.lists(st.text(max_size=3), min_size=1, max_size=4, unique=True)


@given(NAMES, NAMES, st.data())
def test_statements_differ_if_anything_does(
    one: list[str], other: list[str], data: st.DataObject
) -> None:
    pair = world(3, 1, 0).pairs["node-000"]
    rosters = [roster_of(dict.fromkeys(names, pair)) for names in (one, other)]
    assert (rosters[0].digest == rosters[1].digest) == (sorted(one) == sorted(other))
    assert rosters[0].digest != roster_of(dict.fromkeys(one, pair), bytes(32)).digest
    lists = st.lists(st.sampled_from(one), unique=True)
    seen: dict[bytes, tuple[list[str], list[str]]] = {}
    for _ in range(4):
        sharers, survivors = sorted(data.draw(lists)), sorted(data.draw(lists))
        statement = list_statement(rosters[0], sharers[::-1], survivors)
        assert seen.setdefault(statement, (sharers, survivors)) == (sharers, survivors)
    assert statement != list_statement(replace(rosters[0], binding=bytes(32)), sharers, survivors)
    keys = {
        key_statement(binding, name, public)
        for binding in (BINDING, bytes(32))
        for name in one
        for public in (pair.public, bytes(96))
    }
    assert len(keys) == 4 * len(one)
    assert not keys & {*seen}


def test_opened_shares_are_for_the_quorum_of_the_nodes_own_statement() -> None:
    at = world(5, 1, 1)  # w = 4
    names, survivors = list(at.names), list(at.names)[:4]
    states = {name: at.masked(name, np.zeros(1, np.int64), names)[1] for name in survivors}
    statement = states[names[0]].statement(survivors)
    assert all(state.statement(survivors[::-1]) == statement for state in states.values())
    signatures = {name: sign(name, statement) for name in survivors}
    opened = states[names[0]].opened(survivors, signatures, verify)
    shares = states[names[0]].shares
    assert opened == {name: shares[name][1] for name in survivors[1:]} | {
        names[4]: shares[names[4]][0]
    }
    false = {
        "missing": {name: signatures[name] for name in survivors[:3]},
        "of another list": signatures
        | {names[2]: sign(names[2], states[names[2]].statement(names))},
        "of another node": signatures | {names[2]: signatures[names[1]]},
        "of one that was left out": {
            name: sign(name, statement) for name in (*survivors[:3], names[4])
        },
        "of strangers": {name: signatures[name] for name in survivors[:3]}
        | {"stranger": sign("stranger", statement)},
    }
    for given_signatures in false.values():
        with pytest.raises(InvalidValueError, match=r"3 survivors signed .*; at least 4 must"):
            states[names[0]].opened(survivors, given_signatures, verify)


# Two groups whose tensors lie apart in the vector.
CLIPPING = Clipping(
    Layout(("a", "b", "c"), ((3,), (4,), (5,))),
    (VectorGroup("outer", ("a", "c"), 1.0, (1.0, 1.0)), VectorGroup.single("b", 2.0)),
)


def test_noise_is_a_draw_for_each_group_in_its_place() -> None:
    asked = []

    def key_of(group: str) -> bytes:
        asked.append(group)
        return SeededEntropy(7).key(group)

    share = rounded_noise(key_of, CLIPPING, (2000.0, 5000.0))
    outer = rounded_gaussian(SeededEntropy(7).key("outer"), 8, 2000.0)
    inner = rounded_gaussian(SeededEntropy(7).key("b"), 4, 5000.0)
    np.testing.assert_array_equal(share, np.concatenate([outer[:3], inner, outer[3:]]))
    assert asked == ["outer", "b"]


def test_more_nodes_than_the_event_asks_for_take_part() -> None:
    pairs = {f"node-{number}": KeyPair.fresh() for number in range(7)}
    at = begun(pairs, SecureSum(5, 1, 1))
    names = list(at.names)
    result, plain = run_round(at, names, names[1:], names[1:], 0)
    np.testing.assert_array_equal(result, plain)
    assert at.secure.quorum(7) == 5
    assert (degree_of(7, at.secure), threshold_of(at.secure)) == (6, 2)
