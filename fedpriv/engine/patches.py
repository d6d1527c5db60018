"""Convolution as a matrix product: the patches of images, and back."""

from dataclasses import dataclass
from itertools import product

import torch
from torch.nn import functional

_RUN = 16  # numbers in a row in memory; copying fewer costs as much


@dataclass(frozen=True)
class Window:
    """What a convolution looks at, as (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """How often the window fits into an image: (rows, columns)."""
        rows, columns = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return rows, columns

    @property
    def apart(self) -> tuple[int, int]:
        """How many positions further down, and to the right, the window meets other pixels only."""
        down, right = (
            -(-(d * (k - 1) + 1) // s)
            for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)
        )
        return down, right


def patches(
    images: torch.Tensor, window: Window, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """What the window sees at each position.

    Args:
        images: [N, height, width, channels]; fastest if contiguous.
        window: the window.
        memory: contiguous, where to write if it has the shape of the result; fresh memory costs
            more.

    Returns:
        [N, rows, columns, kernel height · kernel width · channels], contiguous, and no view of the
        images.
    """
    count, height, width, channels = images.shape
    (up, left), (rows, columns) = window.padding, window.positions(height, width)
    padded = functional.pad(images, (0, 0, left, left, up, up)) if up or left else images
    (kh, kw), (down, right), (dy, dx) = window.kernel, window.stride, window.dilation
    n, h, w, c = padded.stride()
    across, further = w * right, w * dx
    if kw * channels < _RUN:  # copied once by columns, which are fewer, to lie in longer runs
        shape = (count, columns, padded.shape[1], kw, channels)
        padded = padded.as_strided(shape, (n, across, h, further, c)).contiguous()
        n, across, h, further, c = padded.stride()
    places = (count, rows, columns, kh, kw, channels)
    seen = padded.as_strided(places, (n, h * down, across, h * dy, further, c))
    if memory is None or memory.shape != (*places[:3], kh * kw * channels):
        memory = images.new_empty((*places[:3], kh * kw * channels))
    memory.view(places).copy_(seen)
    return memory


def added(parts: torch.Tensor, window: Window, size: tuple[int, int]) -> torch.Tensor:
    """Images of a size, each the sum of the patches that are given for its positions.

    The adjoint of `patches`.

    Args:
        parts: [N, rows, columns, kernel height · kernel width · channels].
        window: the window.
        size: height and width of the images.

    Returns:
        [N, height, width, channels], of the type of the parts; added up in float32.
    """
    (height, width), (up, left), (dy, dx) = size, window.padding, window.dilation
    parts = parts.view(*parts.shape[:3], *window.kernel, -1)
    shape = len(parts), height + 2 * up, width + 2 * left, parts.shape[-1]
    total = parts.new_zeros(shape, dtype=torch.float32)
    n, h, w, c = total.stride()
    down, right = h * window.stride[0], w * window.stride[1]
    rows, columns = window.apart
    steps = (n, down * rows, right * columns, h * dy, w * dx, c)
    for row, column in product(range(rows), range(columns)):  # none of these overlap
        part = parts[:, row::rows, column::columns]
        if part.numel():
            total.as_strided(part.shape, steps, row * down + column * right).add_(part)
    return total[:, up : up + height, left : left + width].to(parts.dtype)
