"""The clipping of `fedpriv.privacy.clipping` as kernels of Triton, which comes with torch for CUDA.

torch takes ten passes over the numbers in float64. The kernels read them in float32, three times:
for the norms; for the squares of the whole numbers, by which rows that are too long are zeroed; and
to add the whole numbers up.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # numbers of a row that are squared at a time
_COLUMNS, _ROWS = 256, 4  # a tile of numbers that are added up at a time
_TURNS, _TURNS_OF_ROWS = 8, 32  # one program does so many of either, at most
_PROGRAMS = 1024  # that keep a GPU busy

Piece = tuple[torch.Tensor, torch.Tensor | None]
"""Numbers of each user, contiguous [c, n] float32, and a scale to divide them by, float64 []."""


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
    """Sum of squares of a piece of a row, of numbers or of the whole ones that they become."""
    row, piece = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([block], tl.float64)
    for turn in tl.static_range(turns):
        at = (piece * turns + turn) * block + tl.arange(0, block)
        here = numbers + row.to(tl.int64) * n + at
        number = tl.load(here, mask=at < n, other=0.0).to(tl.float64)
        if scaled:
            number = number / tl.load(scale)
        if whole:
            number = (number * tl.load(factors + row)).to(tl.int64).to(tl.float64)
        total += number * number
    tl.store(sums + row * pieces + piece, tl.sum(total, 0))


@triton.jit
def _row_kernel(sums, squares, pieces, most: tl.constexpr):
    """Add up the sums of a row."""
    row, at = tl.program_id(0), tl.arange(0, most)
    some = tl.load(sums + row * pieces + at, mask=at < pieces, other=0.0)
    tl.store(squares + row, tl.sum(some, 0))


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
    """Add the whole numbers of some sound rows to a total, exactly, so in any order."""
    at = tl.program_id(0) * columns + tl.arange(0, columns)
    added = tl.zeros([rows, columns], tl.int64)
    for turn in range(turns):
        row = (tl.program_id(1) * turns + turn) * rows + tl.arange(0, rows)
        counts = tl.load(sound + row, mask=row < users, other=0) != 0
        factor = tl.load(factors + row, mask=row < users, other=0.0)
        here = numbers + row.to(tl.int64)[:, None] * n + at[None, :]
        mask = counts[:, None] & (at < n)[None, :]
        number = tl.load(here, mask=mask, other=0.0).to(tl.float64)
        if scaled:
            number = number / tl.load(scale)
        # As in `_squares_kernel`, operation by operation: what is added is what was bounded.
        added += tl.where(mask, (number * factor[:, None]).to(tl.int64), 0)
    tl.atomic_add(total + at, tl.sum(added, 0), mask=at < n)


def squares(pieces: Sequence[Piece], factors: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of squares of each user's numbers, [c], or of the whole numbers that factors [c] make.

    A row is added up in an order of its own, whatever rows are beside it, and whole numbers exactly
    up to 2^53.
    """
    parts = [triton.cdiv(numbers.shape[1], _BLOCK * _TURNS) for numbers, _ in pieces]
    first, _ = pieces[0]
    users, count = len(first), max(1, sum(parts))
    sums = first.new_zeros((users, count), dtype=torch.float64)
    for (numbers, scale), part, end in zip(pieces, parts, accumulate(parts), strict=True):
        if part:
            _squares_kernel[users, part](
                numbers, factors, scale, sums[:, end - part :], count, numbers.shape[1],
                scale is not None, factors is not None, _BLOCK, _TURNS,
            )  # fmt: skip
    found = first.new_empty(users, dtype=torch.float64)
    _row_kernel[(users,)](sums, found, count, triton.next_power_of_2(count))
    return found


def add_whole(
    total: torch.Tensor, piece: Piece, factors: torch.Tensor, sound: torch.Tensor
) -> None:
    """Add the whole numbers that factors [c] make of those of sound users [c] to int64 [n]."""
    numbers, scale = piece
    users, n = numbers.shape
    if n:
        wide = triton.cdiv(n, _COLUMNS)
        spare = max(1, wide * users // (_ROWS * _PROGRAMS))
        turns = min(triton.next_power_of_2(spare), _TURNS_OF_ROWS)
        _sum_kernel[wide, triton.cdiv(users, _ROWS * turns)](
            numbers, factors, scale, sound, total, users, n,
            scale is not None, _COLUMNS, _ROWS, turns,
        )  # fmt: skip
