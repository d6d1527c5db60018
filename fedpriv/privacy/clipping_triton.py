"""The clipping of `fedpriv.privacy.clipping` as Triton kernels; Triton comes with torch for CUDA.

torch takes ten passes over the numbers in float64. The kernels read them in float32 three times:
for the norms, for the squares of the whole numbers, which show the rows that are too long and
become zero, and for the sum of the whole numbers.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # numbers of a row squared at a time
_COLUMNS, _ROWS = 256, 4  # shape of the tile of numbers added at a time
_TURNS, _TURNS_OF_ROWS = 8, 32  # the most blocks or tiles per program
_PROGRAMS = 1024  # enough programs to keep a GPU busy

Piece = tuple[torch.Tensor, torch.Tensor | None]
"""Numbers of each user, contiguous float32 [c, n], and the scale that divides them, float64 []."""


@triton.jit
def _squares_kernel(
    numbers,
    factors,
    scale,
    sums,
    pieces,
    n,
    scaled: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
    turns: tl.constexpr,
):
    """Sum the squares of a piece of a row, before or after conversion to whole numbers."""
    row, piece = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([block], tl.float64)
    for turn in tl.static_range(turns):
        columns = (piece * turns + turn) * block + tl.arange(0, block)
        addresses = numbers + row.to(tl.int64) * n + columns
        number = tl.load(addresses, mask=columns < n, other=0.0).to(tl.float64)
        if scaled:
            number = number / tl.load(scale)
        if whole:
            number = (number * tl.load(factors + row)).to(tl.int64).to(tl.float64)
        total += number * number
    tl.store(sums + row * pieces + piece, tl.sum(total, 0))


@triton.jit
def _row_kernel(sums, squares, pieces, width: tl.constexpr):
    """Add the partial sums of a row."""
    row, positions = tl.program_id(0), tl.arange(0, width)
    part_sums = tl.load(sums + row * pieces + positions, mask=positions < pieces, other=0.0)
    tl.store(squares + row, tl.sum(part_sums, 0))


@triton.jit
def _sum_kernel(
    numbers,
    factors,
    scale,
    sound,
    total,
    users,
    n,
    scaled: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    turns: tl.constexpr,
):
    """Add the whole numbers of some sound rows to a total; exact, so the order is irrelevant."""
    positions = tl.program_id(0) * columns + tl.arange(0, columns)
    sums = tl.zeros([rows, columns], tl.int64)
    for turn in range(turns):
        row = (tl.program_id(1) * turns + turn) * rows + tl.arange(0, rows)
        counts = tl.load(sound + row, mask=row < users, other=0) != 0
        factor = tl.load(factors + row, mask=row < users, other=0.0)
        addresses = numbers + row.to(tl.int64)[:, None] * n + positions[None, :]
        mask = counts[:, None] & (positions < n)[None, :]
        number = tl.load(addresses, mask=mask, other=0.0).to(tl.float64)
        if scaled:
            number = number / tl.load(scale)
        # The same operations as in `_squares_kernel`, so that the numbers added are those bounded.
        sums += tl.where(mask, (number * factor[:, None]).to(tl.int64), 0)
    tl.atomic_add(total + positions, tl.sum(sums, 0), mask=positions < n)


def squares(pieces: Sequence[Piece], factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return each user's sum of squares [c], of its numbers or, with factors [c], of whole numbers.

    The order of the sum in a row does not depend on other rows. Sums of whole numbers are exact up
    to 2^53.
    """
    parts = [triton.cdiv(numbers.shape[1], _BLOCK * _TURNS) for numbers, _ in pieces]
    numbers_of_first, _ = pieces[0]
    users, count = len(numbers_of_first), max(1, sum(parts))
    sums = numbers_of_first.new_zeros((users, count), dtype=torch.float64)
    for (numbers, scale), part, end in zip(pieces, parts, accumulate(parts), strict=True):
        if part:
            _squares_kernel[users, part](
                numbers, factors, scale, sums[:, end - part :], count, numbers.shape[1],
                scale is not None, factors is not None, _BLOCK, _TURNS,
            )  # fmt: skip
    result = numbers_of_first.new_empty(users, dtype=torch.float64)
    _row_kernel[(users,)](sums, result, count, triton.next_power_of_2(count))
    return result


def add_whole(
    total: torch.Tensor, piece: Piece, factors: torch.Tensor, sound: torch.Tensor
) -> None:
    """Multiply sound users' numbers by factors [c], truncate, and add to `total`, int64 [n]."""
    numbers, scale = piece
    users, n = numbers.shape
    if n:
        tiles = triton.cdiv(n, _COLUMNS)
        min_turns = max(1, tiles * users // (_ROWS * _PROGRAMS))
        turns = min(triton.next_power_of_2(min_turns), _TURNS_OF_ROWS)
        _sum_kernel[tiles, triton.cdiv(users, _ROWS * turns)](
            numbers, factors, scale, sound, total, users, n,
            scale is not None, _COLUMNS, _ROWS, turns,
        )  # fmt: skip
