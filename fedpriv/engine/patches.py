"""Convolution as a matrix product: the patches of images, and back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional


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

    def taps(self, positions: tuple[int, int]) -> Iterator[tuple[int, int, slice, slice]]:
        """Each place (i, j) of the kernel with the pixels of the padded image that it meets."""
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield i, j, self._met(0, i, positions), self._met(1, j, positions)

    def _met(self, axis: int, place: int, positions: tuple[int, int]) -> slice:
        first = place * self.dilation[axis]
        stride = self.stride[axis]
        return slice(first, first + stride * (positions[axis] - 1) + 1, stride)


def patches(images: torch.Tensor, window: Window) -> torch.Tensor:
    """What the window sees at each position.

    Args:
        images: [N, height, width, channels]; fastest if contiguous.
        window: the window.

    Returns:
        [N, rows, columns, kernel height · kernel width · channels].
    """
    found: torch.Tensor = _Patches.apply(images, window)  # type: ignore[no-untyped-call]
    return found


class _Patches(torch.autograd.Function):
    """Patches with a backward pass that adds one slice for each place of the kernel."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, images: torch.Tensor, window: Window
    ) -> torch.Tensor:
        count, height, width, channels = images.shape
        ctx.size, ctx.window = (height, width), window  # type: ignore[attr-defined]
        (up, left), positions = window.padding, window.positions(height, width)
        padded = functional.pad(images, (0, 0, left, left, up, up)) if up or left else images
        n, h, w, c = padded.stride()
        (down, right), (dy, dx) = window.stride, window.dilation
        seen = padded.as_strided(
            (count, *positions, *window.kernel, channels),
            (n, h * down, w * right, h * dy, w * dx, c),
        )
        return seen.reshape(count, *positions, -1)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        window: Window = ctx.window  # type: ignore[attr-defined]
        height, width = ctx.size  # type: ignore[attr-defined]
        count, *positions, _ = gradient.shape
        places = gradient.view(count, *positions, *window.kernel, -1)
        (up, left) = window.padding
        total = gradient.new_zeros((count, height + 2 * up, width + 2 * left, places.shape[-1]))
        for i, j, rows, columns in window.taps((positions[0], positions[1])):
            total[:, rows, columns] += places[:, :, :, i, j]
        return total[:, up : up + height, left : left + width], None
