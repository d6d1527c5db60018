"""What charts and figures draw: axes with names and units, and series of points."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.errors import InvalidValueError

# Told apart by people who see few colours, on white and on black; markers help on paper.
COLOURS = ("#3a86c8", "#d9622b", "#1a9a72", "#c973a6", "#c98a00", "#8a74c9", "#2aa3b8", "#8a8a8a")


@dataclass(frozen=True)
class Axis:
    """What a chart shows along one side.

    Attributes:
        name: of the quantity.
        unit: its unit; "no unit" for a pure number.
        log: whether the scale is logarithmic.
        ends: first and last value shown; None: as far as the data go.
        from_zero: whether zero is shown, where there are no ends.
        ticks: values that are marked, and their text; none: round ones.

    Raises:
        InvalidValueError: name or unit is empty.
    """

    name: str
    unit: str
    log: bool = False
    ends: tuple[float, float] | None = None
    from_zero: bool = False
    ticks: tuple[tuple[float, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.unit:
            raise InvalidValueError(
                f"an axis has name {self.name!r} and unit {self.unit!r}; it must have both"
            )


ROUNDS = Axis("rounds released", "count")


@dataclass(frozen=True)
class Series:
    """One line or set of points of a chart.

    Attributes:
        name: in the legend; may hold anything.
        x: [n].
        y: [n]; what is None or not finite is left out.
        low: [n] lower ends of a band around the line, None where it has a gap; empty: no band.
        high: [n] upper ends, None in the same places.
        dashed: whether the line is dashed.
        joined: whether points are joined by a line.
        marked: whether points have a marker, if there are few.
        bars: whether low and high are error bars of single points, and not a band.
        colour: which of `COLOURS`; None: the next.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dashed: bool = False
    joined: bool = True
    marked: bool = True
    bars: bool = False
    colour: int | None = None

    @property
    def reach(self) -> list[tuple[float, float]]:
        """[n] how far low and high are below and above y; zero where one of them is None."""
        found = []
        for y, low, high in zip(self.y, self.low, self.high, strict=True):
            if y is None or low is None or high is None:
                found.append((0.0, 0.0))
            else:
                found.append((y - low, high - y))
        return found


def on_log_scale(values: Sequence[float]) -> bool:
    """Whether positive values span more than a factor of ten, so that only logarithms show all."""
    return min(values) > 0.0 and max(values) > 10.0 * min(values)
