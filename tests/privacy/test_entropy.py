import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import Randomness
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy, keystream, words

KEY = bytes(range(32))
FALSE_ALARM = 1e-6


def slow_keystream(key, size, stream=0):
    """AES-256 of the counter blocks stream·2^64 + 0, 1, 2, …, each encrypted on its own."""
    blocks = b""
    for block in range(-(-size // 16)):
        encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        blocks += encryptor.update((stream * 2**64 + block).to_bytes(16, "big"))
    return np.frombuffer(blocks[:size], np.uint8)


def test_keystream_is_the_published_counter_mode_vector():
    # NIST SP 800-38A, F.5.5 (CTR-AES256.Encrypt): the output blocks of its four counter blocks.
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    stream, block = 0xF0F1F2F3F4F5F6F7, 0xF8F9FAFBFCFDFEFF
    expected = bytes.fromhex(
        "0bdf7df1591716335e9a8b15c860c502"
        "5a6e699d536119065433863c8f657b94"
        "1bc12c9c01610d5d0d8bd6a3378eca62"
        "2956e1c8693536b1bee99c73a31576b6"
    )
    assert keystream(key, 64, stream=stream, start=16 * block).tobytes() == expected


@pytest.mark.parametrize("stream", [0, 1, 1074, 2**64 - 1])
def test_keystream_is_the_encrypted_counter(stream):
    np.testing.assert_array_equal(
        keystream(KEY, 1000, stream=stream), slow_keystream(KEY, 1000, stream)
    )


@given(start=st.integers(0, 300), size=st.integers(0, 300), stream=st.integers(0, 3))
def test_any_part_of_a_stream_is_had_without_the_rest(start, size, stream):
    whole = slow_keystream(KEY, 600, stream)
    part = keystream(KEY, size, stream=stream, start=start)
    assert part.dtype == np.uint8
    np.testing.assert_array_equal(part, whole[start : start + size])


@given(start=st.integers(0, 40), count=st.integers(0, 40))
def test_words_are_the_little_endian_bytes(start, count):
    raw = slow_keystream(KEY, 8 * 80).tobytes()
    expected = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(80)]
    got = words(KEY, count, start=start)
    assert got.dtype == np.uint64
    assert got.tolist() == expected[start : start + count]


def test_the_end_of_a_stream_is_not_passed():
    assert keystream(KEY, 16, start=16 * 2**64 - 16).size == 16
    with pytest.raises(InvalidValueError, match="2\\^68"):
        keystream(KEY, 17, start=16 * 2**64 - 16)


def test_each_result_is_a_new_array():
    first = keystream(KEY, 64)
    first[:] = 0
    assert keystream(KEY, 64).any()


def test_streams_and_keys_share_no_words():
    other = SeededEntropy(1).key("other")
    pieces = [words(KEY, 5000), words(KEY, 5000, stream=1), words(other, 5000)]
    assert np.unique(np.concatenate(pieces)).size == 15_000


def test_bytes_are_uniform():
    counts = np.bincount(keystream(KEY, 1_000_000), minlength=256)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    # A thousand zeros too many among a million bytes would be noticed.
    counts[0] += 1000
    assert stats.chisquare(counts).pvalue < FALSE_ALARM


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_key_of_wrong_size_is_refused_without_showing_it(size):
    key = b"\xa7secret"[:size].ljust(size, b"k")
    with pytest.raises(InvalidValueError, match=f"has {size} bytes; it must have 32") as caught:
        keystream(key, 8)
    assert "secret" not in str(caught.value)
    assert "kk" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [{"size": -1}, {"start": -1}, {"stream": -1}, {"stream": 2**64}]
)
def test_keystream_refuses_what_is_out_of_range(arguments):
    with pytest.raises(InvalidValueError, match="must"):
        keystream(KEY, **{"size": 8, **arguments})


def test_negative_count_of_words_is_refused():
    with pytest.raises(InvalidValueError, match="must not be negative"):
        words(KEY, -1)


def test_operating_system_keys_are_fresh_whatever_the_purpose():
    entropy = OperatingSystemEntropy()
    keys = {entropy.key("noise/run/0/0") for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {32}
    assert entropy.randomness is Randomness.OPERATING_SYSTEM


def test_operating_system_keys_are_what_the_operating_system_gave(monkeypatch):
    given_out = [bytes(range(32)), bytes(range(32, 64))]
    supply = iter(given_out)
    monkeypatch.setattr("os.urandom", lambda size: next(supply)[:size])
    entropy = OperatingSystemEntropy()
    assert [entropy.key("noise"), entropy.key("noise")] == given_out


def slow_hmac(key, message):
    """RFC 2104 as it is written, with SHA-256 (block size 64)."""
    if len(key) > 64:
        key = hashlib.sha256(key).digest()
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + message).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()


@given(seed=st.integers(0, 2**600), purpose=st.text(st.characters(codec="utf-8")))
def test_seeded_key_is_the_hmac_of_seed_and_purpose(seed, purpose):
    expected = slow_hmac(format(seed, "x").encode(), purpose.encode())
    assert SeededEntropy(seed).key(purpose) == expected
    assert len(expected) == 32


def test_seeded_keys_of_different_seeds_and_purposes_differ():
    # 0 is a seed; 1 and 256 differ by a trailing zero byte; the last has 10,001 digits.
    seeds = [0, 1, 2, 16, 256, 2**32, 2**64, 10**10_000]
    purposes = ["", "noise/a/1/0", "noise/a/10", "sampling/a/1/0", "local/a/1/0", "é", "0"]
    keys = {SeededEntropy(seed).key(purpose) for seed in seeds for purpose in purposes}
    assert len(keys) == len(seeds) * len(purposes)


def test_seeded_key_is_pure():
    assert SeededEntropy(7).key("noise") == SeededEntropy(7).key("noise")
    assert SeededEntropy(7).randomness is Randomness.SEEDED


@pytest.mark.parametrize("seed", [-1, -(10**30), 1.5, "7", None])
def test_seed_that_is_no_natural_number_is_refused(seed):
    with pytest.raises(InvalidValueError, match="non-negative integer"):
        SeededEntropy(seed)


def test_representations_show_no_key():
    entropy = SeededEntropy(7)
    assert repr(entropy) == "SeededEntropy(seed=7)"
    assert repr(OperatingSystemEntropy()) == "OperatingSystemEntropy()"
