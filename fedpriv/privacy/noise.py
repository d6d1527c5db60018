"""Randomness and noise: keys, pseudorandom words from keys, and exact Gaussian noise.

No generator keeps state between draws. A draw gets a 32-byte key from an `Entropy`, passes it to
one pure function, and never uses it again:

    sampling.draw(entropy.key("sampling/run-7/12/0"))         # run, round, attempt
    rounded_gaussian(entropy.key("noise/run-7/12/0"), d, sigma)

The purpose names the draw. Cohorts ("sampling/…"), noise ("noise/…") and local training
("local/…") have separate purposes, so that a node's training randomness reveals nothing about the
cohort or the noise. Each purpose is for one draw only (each vector group has its own): noise drawn
twice from one key cancels in the difference of the two releases.

A release is a whole number of steps of γ, the granularity of a vector group:

    γ·(Σa + K),  K = round(η/γ),  η ~ N(0, σ²).

Since Σa is whole, Σa + round(η/γ) = round(Σa + η/γ): rounding is post-processing of the continuous
Gaussian mechanism, whose analysis applies unchanged. No low-order digits remain that could
distinguish two sums (Mironov 2012, "On significance of the least significant bits for differential
privacy").

K has exactly the law of the rounded normal, not that of a floating-point approximation. The normals
of Box and Muller 1958 are functions of two uniform real numbers, whose bits come from a keystream:
64 bits of each at first. float64 gives a normal within an error band. If all numbers in the band
round to one integer, K is that integer. Otherwise the draw reads further bits, and intervals of
growing precision enclose the normal until they round to one integer (Ziv 1991, "Fast evaluation of
elementary mathematical functions with correctly rounded last bit"). So K is the same on all
processors.
"""

import hmac
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from mpmath import libmp
from numpy.typing import NDArray

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import Randomness

_KEY_BYTES = 32
_AES_BLOCK_BYTES = 16


class Entropy(ABC):
    """A source of keys."""

    randomness: ClassVar[Randomness]  # the ledger's name for this source

    @abstractmethod
    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key of the one draw that `purpose` names."""


@dataclass(frozen=True)
class OperatingSystemEntropy(Entropy):
    """Keys from the operating system's CSPRNG, for releases; every key is fresh."""

    randomness: ClassVar[Randomness] = Randomness.OPERATING_SYSTEM

    def key(self, purpose: str) -> bytes:  # noqa: ARG002
        """Return 32 fresh bytes; the purpose is ignored."""
        return os.urandom(_KEY_BYTES)


@dataclass(frozen=True)
class SeededEntropy(Entropy):
    """Keys that are a function of a seed, so that a run is reproducible; not for releases.

    The guarantee is **void for anyone who knows or guesses the seed**: they can compute the cohort
    and subtract the noise. The key is HMAC-SHA-256 (RFC 2104) of the purpose, keyed with the seed's
    hexadecimal digits, and is the same on every machine.
    """

    seed: int  # ≥ 0, of any size

    randomness: ClassVar[Randomness] = Randomness.SEEDED

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidValueError(f"seed is {self.seed!r}; it must be a non-negative integer")

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key of (seed, purpose)."""
        # HMAC pads its key with zero bytes, so raw bytes of the seeds 1 and 256 would collide.
        return hmac.digest(f"{self.seed:x}".encode(), purpose.encode(), "sha256")


def keystream(key: bytes, size: int, *, stream: int = 0, start: int = 0) -> NDArray[np.uint8]:
    """Return bytes `start` to `start + size` of one of the 2^64 pseudorandom streams of a key.

    The bytes are AES-256 in counter mode (NIST SP 800-38A, section 6.5) with the initial counter
    stream·2^64, so streams do not overlap. A key is for one draw, so no nonce is needed.

    The key is 32 secret bytes; error messages never contain it. start + size ≤ 2^68. Raises
    InvalidValueError for arguments outside these ranges.
    """
    if len(key) != _KEY_BYTES:
        raise InvalidValueError(f"the key has {len(key)} bytes; it must have {_KEY_BYTES}")
    if not 0 <= stream < 2**64:
        raise InvalidValueError(f"stream is {stream}; it must be in [0, 2^64)")
    if size < 0 or start < 0 or start + size > _AES_BLOCK_BYTES * 2**64:
        sizes = f"size is {size} and start {start}"
        raise InvalidValueError(f"{sizes}; they must not be negative or pass 2^68 bytes")
    first_block, skip = divmod(start, _AES_BLOCK_BYTES)
    counter = ((stream << 64) + first_block).to_bytes(_AES_BLOCK_BYTES, "big")
    # The cipher requires almost one block of space after its output.
    buffer = np.empty(skip + size + _AES_BLOCK_BYTES - 1, np.uint8)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    encryptor.update_into(bytes(skip + size), buffer.data)
    return buffer[skip : skip + size]


def words(key: bytes, count: int, *, stream: int = 0, start: int = 0) -> NDArray[np.uint64]:
    """Return words `start` to `start + count` of a `keystream`, as little-endian integers.

    They are uint64 [count], uniform on [0, 2^64) to anyone who does not know the key.
    """
    little_endian = keystream(key, 8 * count, stream=stream, start=8 * start).view("<u8")
    return little_endian.astype(np.uint64, copy=False)


_Interval = tuple[tuple[int, ...], tuple[int, ...]]  # both ends, in the format of mpmath's `libmp`

LARGEST_STDDEV = 2.0**40  # in steps; beyond it, float64 leaves too many normals undecided

# Even, because normals come in pairs; a block's words and normals fit in a core's cache.
_BLOCK = 1 << 14
_WORDS, _MORE_BITS = 0, 1  # streams of a key
_MORE_BYTES = 1 << 12  # bytes of the second stream for each word of the first

# The error of `_box_muller` against the normal of all bits, for u ≥ 2^-20 and R ≥ 2^-7, hence
# R < 5.27. Let v = 2^-53, and let logarithms be off by 4 units in the last place, tangents by 8.
# * u is off by 2^-65, half of its last bit, and by two roundings. R = √(−2 ln u) has the derivative
#   −1/(uR), so R is off by (2^-65/u + 2·v)/R + 5·v·R, which is below 2.9e-14 at R = 2^-7 and below
#   9e-15 at u = 2^-20.
# * θ is off by 1.1e-15, its sine and cosine by 16·v for the tangent and 5·v for roundings: 3.5e-15,
#   times R.
# Both together stay below 3e-14. The product with σ/γ adds 6e-16, and so does the sum with an
# offset; the band has the same margin again. `tests/privacy/test_noise.py` measures the functions.
# For every σ/γ that sum also adds 2^-54, half a unit in the last place of an offset of ½.
# If R < 2^-7, ln u is off by (2^-65 + 2·v)·(1 + 2^-14), since u > 1 - 2^-15; and roots of squares
# that differ by d differ by at most d over either root. So the computed radius R is off by
# (2^-64 + 4·v)·(1 + 2^-14)/R, which is below 2^-50/R, plus the other terms above.
_BAND = 2.0**-44
_BAND_BY_RADIUS = 2.0**-50
_OFFSET_BAND = 2.0**-52
_LEAST_WORD = 1 << 44  # u ≥ 2^-20
_LEAST_RADIUS = 2.0**-7


def rounded_gaussian(
    key: bytes, count: int, stddev: float, offsets: NDArray[np.float64] | None = None
) -> NDArray[np.int64]:
    """Return independent normals of mean 0 and the given stddev, each rounded to an integer.

    With offsets, float64 [count] in [−½, ½], each normal is rounded after its offset is added. The
    normal does not depend on the offset, so offsets may depend on other draws.

    Guarantees, for an observer who cannot tell AES-256 from random bits:

    * each integer k has exactly the probability Φ((k + ½)/σ) − Φ((k − ½)/σ), at any distance from
      0; with an offset o, it has that of k − o;
    * the integers depend only on key, stddev and offsets, and are the same on every processor;
    * the first m integers are the same for every count ≥ m and do not depend on the block size.

    A normal that the error band leaves undecided costs as much as thousands of others. This affects
    one in 65,000 at σ = 2^27, and proportionally more or fewer elsewhere, down to one in a million.

    The key is 32 secret bytes and has no other use; σ is from 0, which gives zeros, to 2^40. The
    result is int64 [count]. Raises InvalidValueError for arguments outside these ranges.
    """
    if count < 0:
        raise InvalidValueError(f"count is {count}; it must not be negative")
    if not 0.0 <= stddev <= LARGEST_STDDEV:
        raise InvalidValueError(
            f"stddev is {stddev} steps; it must be from 0 to 2^{math.log2(LARGEST_STDDEV):.0f}"
        )
    if offsets is not None and (
        offsets.shape != (count,) or not np.all(np.abs(offsets) <= 0.5)  # NaN neither
    ):
        raise InvalidValueError(
            f"offsets have the shape {list(offsets.shape)}; they must be {count} from -½ to ½"
        )
    offset_band = 0.0 if offsets is None else _OFFSET_BAND
    rounded = np.zeros(count + count % 2, np.int64)
    for start in range(0, count, _BLOCK):
        block = rounded[start : start + _BLOCK]
        uniforms = words(key, block.size, stream=_WORDS, start=start)
        normals, radii = _box_muller(uniforms)
        normals *= stddev
        if offsets is not None:
            block_offsets = offsets[start : start + _BLOCK]
            normals[: block_offsets.size] += block_offsets
        nearest = np.rint(normals)
        block[:] = nearest
        normals -= nearest
        for index in _undecided(normals, radii, uniforms, stddev, offset_band):
            pair, position = index - index % 2, start + index
            first, second = (int(word) for word in uniforms[pair : pair + 2])
            offset = 0.0 if offsets is None or position >= count else float(offsets[position])
            block[index] = _exactly(key, start + pair, (first, second), index % 2, stddev, offset)
    return rounded[:count]


def _box_muller(uniforms: NDArray[np.uint64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Convert an even number of words to normals [n] and radii [n/2], within `_BAND`.

    Words 2i and 2i + 1 give R·cos θ and R·sin θ with R = √(−2 ln u). Here u is the first word over
    2^64, and θ/2π is the second, as a signed integer, over 2^64.
    """
    radius = uniforms[0::2].astype(np.float64)
    radius *= 2.0**-64
    radius += 2.0**-65
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    # With t = tan(θ/2), cos θ = (1 − t²)/(1 + t²) and sin θ = 2t/(1 + t²): one tangent replaces a
    # sine and a cosine, and NumPy's tangent is up to nine times as fast as either.
    tangent = uniforms.view(np.int64)[1::2] * (math.pi / 2**64)
    np.tan(tangent, out=tangent)
    square = tangent * tangent
    scaled = radius / (1.0 + square)
    normals = np.empty(uniforms.size)
    np.multiply(scaled, 1.0 - square, out=normals[0::2])
    tangent *= 2.0
    np.multiply(scaled, tangent, out=normals[1::2])
    return normals, radius


def _undecided(
    distances: NDArray[np.float64],
    radii: NDArray[np.float64],
    uniforms: NDArray[np.uint64],
    stddev: float,
    offset_band: float = 0.0,
) -> list[int]:
    """Return the indices of normals whose band may contain the midpoint between two integers.

    `distances` [n] of normals to their nearest integers are overwritten, `radii` [n/2] are the
    radii of the pairs before scaling by σ, and `uniforms` [n] are the words of the normals.
    """
    if stddev == 0.0:
        return []
    pairs = np.abs(distances, out=distances).reshape(-1, 2)
    undecided = pairs >= 0.5 - (stddev * _BAND + offset_band)
    # These comparisons are written so that NaN, which no word gives, counts as undecided.
    is_small = ~(radii >= _LEAST_RADIUS)
    with np.errstate(divide="ignore"):  # R is -0 if float64 rounds u to 1
        bands = stddev * (_BAND + _BAND_BY_RADIUS / np.abs(radii[is_small])) + offset_band
    undecided[is_small] = ~(pairs[is_small] < 0.5 - bands[:, np.newaxis])
    undecided[uniforms[0::2] < np.uint64(_LEAST_WORD)] = True
    return np.flatnonzero(undecided).tolist()


def _exactly(
    key: bytes, number: int, pair: tuple[int, int], component: int, stddev: float, offset: float
) -> int:
    """Return one normal of a pair, rounded with its offset, from as many bits as needed.

    The words in `pair` are the first bits of u and of θ/2π; `number` is the index of the first word
    in its stream. `component` is 0 for the cosine and 1 for the sine.
    """
    first, second = pair
    turn = second - (1 << 64) if second >= 1 << 63 else second
    size = 8
    while True:
        u, angle = (
            (head << 8 * size)
            + int.from_bytes(
                keystream(key, size, stream=_MORE_BITS, start=i * _MORE_BYTES).tobytes(), "big"
            )
            for i, head in ((number, first), (number + 1, turn))
        )
        low, high = _enclosed(u, angle, 64 + 8 * size, component, stddev, offset)
        if low == high:
            return low
        size *= 2


def _enclosed(
    u: int, turn: int, bits: int, component: int, stddev: float, offset: float
) -> tuple[int, int]:
    """Return both rounded ends of the interval of normal plus offset over all unread bits.

    `u` holds the first bits of u, and `turn` those of θ/2π with its sign, as integers.
    """
    if u == 0:  # its logarithm is unbounded
        return -1, 1
    precision = bits + 64
    logarithm = libmp.mpi_log(_between(u, bits), precision)
    radius = libmp.mpi_sqrt(libmp.mpi_mul(_exact(-2.0), logarithm, precision), precision)
    two_pi = libmp.mpi_mul(_exact(2.0), _pi(precision), precision)
    angle = libmp.mpi_mul(two_pi, _between(turn, bits), precision)
    unit = libmp.mpi_cos_sin(angle, precision)[component]
    scaled = libmp.mpi_mul(libmp.mpi_mul(radius, unit, precision), _exact(stddev), precision)
    shifted = libmp.mpi_add(scaled, _exact(offset), precision)
    low, high = libmp.mpi_add(shifted, _exact(0.5), precision)
    return int(libmp.to_int(low, libmp.round_floor)), int(libmp.to_int(high, libmp.round_floor))


def _between(head: int, bits: int) -> _Interval:
    """Return the interval of the numbers in [0, 1) or [−½, ½) that start with these bits."""
    return libmp.from_man_exp(head, -bits), libmp.from_man_exp(head + 1, -bits)


def _exact(number: float) -> _Interval:
    return libmp.from_float(number), libmp.from_float(number)


def _pi(precision: int) -> _Interval:
    return tuple(libmp.mpf_pi(precision, end) for end in (libmp.round_floor, libmp.round_ceiling))
