"""Keys and the pseudorandom words made of them: the only randomness that privacy rests on.

There is no generator whose state lives on between draws. Whoever needs randomness asks an
`Entropy` for a key of 32 bytes, gives the key to one pure function, and uses it for that one draw:

    sampling.draw(entropy.key("sampling/run-7/12/0"))         # run, round, attempt
    rounded_gaussian(entropy.key("noise/run-7/12/0"), d, sigma)

The purpose names the draw. Cohorts ("sampling/…"), noise ("noise/…") and local training
("local/…") are three separate families of purposes, so that what a node learns about its own
training randomness says nothing about the cohort or the noise. No purpose may be used for two
draws (a second vector group needs its own): noise drawn twice from one key cancels in the
difference of the two releases.

`OperatingSystemEntropy` is for releases. `SeededEntropy` makes a run repeatable and its guarantee
**void for whoever knows the seed**: they can compute the cohort and subtract the noise.
"""

import hmac
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedpriv.accounting.events import Randomness
from fedpriv.errors import InvalidValueError

_KEY_BYTES = 32
_AES_BLOCK_BYTES = 16


class Entropy(ABC):
    """A source of keys.

    Attributes:
        randomness: what the ledger records about this source.
    """

    randomness: ClassVar[Randomness]

    @abstractmethod
    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key of the one draw that `purpose` names."""


@dataclass(frozen=True)
class OperatingSystemEntropy(Entropy):
    """Keys of the operating system's CSPRNG.

    Each call gives a fresh key, independent of all others, even for a purpose asked before.
    """

    randomness: ClassVar[Randomness] = Randomness.OPERATING_SYSTEM

    def key(self, purpose: str) -> bytes:  # noqa: ARG002
        """Return 32 fresh bytes; the purpose is ignored."""
        return os.urandom(_KEY_BYTES)


@dataclass(frozen=True)
class SeededEntropy(Entropy):
    """Keys that are a function of a seed: for tests and repeatable simulations, not for releases.

    The key is HMAC-SHA-256 (RFC 2104) with the seed's hexadecimal digits as its key and the
    purpose as its message. The same seed and purpose give the same key on every machine; to
    someone who does not know the seed, keys of different purposes look independent. Seeds that
    can be guessed can be found by trying them.

    Attributes:
        seed: any integer from 0 up, of any size.

    Raises:
        InvalidValueError: the seed is not an integer or is negative.
    """

    seed: int

    randomness: ClassVar[Randomness] = Randomness.SEEDED

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidValueError(f"seed is {self.seed!r}; it must be a non-negative integer")

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key of (seed, purpose)."""
        # HMAC pads its key with zero bytes, so raw bytes of the seeds 1 and 256 would collide.
        return hmac.digest(f"{self.seed:x}".encode(), purpose.encode(), "sha256")


def keystream(key: bytes, size: int, *, stream: int = 0, start: int = 0) -> NDArray[np.uint8]:
    """Bytes `start` to `start + size` of one of the 2^64 pseudorandom streams of a key.

    The bytes are AES-256 in counter mode (NIST SP 800-38A, section 6.5) with the initial counter
    stream·2^64, so two streams never overlap and any part of a stream is had without the rest.
    A key is meant for one draw, which is why no nonce is needed.

    Args:
        key: 32 secret bytes.
        size: number of bytes, 0 or more.
        stream: which stream, in [0, 2^64).
        start: position of the first byte in the stream, with start + size ≤ 2^68.

    Returns:
        uint8[size], a new array.

    Raises:
        InvalidValueError: an argument is out of range; the message never contains the key.
    """
    if len(key) != _KEY_BYTES:
        raise InvalidValueError(f"the key has {len(key)} bytes; it must have {_KEY_BYTES}")
    if not 0 <= stream < 2**64:
        raise InvalidValueError(f"stream is {stream}; it must be in [0, 2^64)")
    if size < 0 or start < 0 or start + size > _AES_BLOCK_BYTES * 2**64:
        raise InvalidValueError(
            f"size is {size} and start {start}; they must not be negative or pass 2^68 bytes"
        )
    first_block, skip = divmod(start, _AES_BLOCK_BYTES)
    counter = ((stream << 64) + first_block).to_bytes(_AES_BLOCK_BYTES, "big")
    # The cipher asks for almost one block of room behind what it writes.
    buffer = np.empty(skip + size + _AES_BLOCK_BYTES - 1, np.uint8)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    encryptor.update_into(bytes(skip + size), buffer.data)
    return buffer[skip : skip + size]


def words(key: bytes, count: int, *, stream: int = 0, start: int = 0) -> NDArray[np.uint64]:
    """Words `start` to `start + count` of a stream: its bytes as little-endian 64-bit integers.

    Args:
        key: 32 secret bytes.
        count: number of words, 0 or more.
        stream: which stream, in [0, 2^64).
        start: position of the first word in the stream, with start + count ≤ 2^65.

    Returns:
        uint64[count], a new array, uniform on [0, 2^64) to whoever does not know the key.

    Raises:
        InvalidValueError: an argument is out of range.
    """
    little_endian = keystream(key, 8 * count, stream=stream, start=8 * start).view("<u8")
    return little_endian.astype(np.uint64, copy=False)
