import math
from fractions import Fraction

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.grouping import equal_split, scales_by_dimension, split_by_dimension
from fedpriv.privacy.layout import (
    Layout,
    VectorGroup,
    check_partition,
    flat,
    joint,
    layers,
    per_layer,
)
from tests.privacy.exact import steps_of

LAYOUT = Layout(("conv.weight", "conv.bias", "fc.weight"), ((4, 2), (4,), (3, 4)))


def test_flat_is_one_group_of_everything() -> None:
    (group,) = flat(LAYOUT, 2.0)
    assert group.tensors == LAYOUT.names
    assert group.clipping_norm == 2.0
    assert group.scales == (1.0, 1.0, 1.0)


def test_layers_are_prefixes() -> None:
    assert layers(LAYOUT) == {"conv": ("conv.weight", "conv.bias"), "fc": ("fc.weight",)}


@pytest.mark.parametrize("split", ["equal", "dimension"])
def test_squares_of_a_split_add_up_to_the_total(split: str) -> None:
    parts = layers(LAYOUT)
    norms = equal_split(parts, 3.0) if split == "equal" else split_by_dimension(LAYOUT, parts, 3.0)
    assert math.fsum(n**2 for n in norms.values()) == pytest.approx(9.0)
    # conv and fc hold 12 of 24 components each, so here both splits agree by hand.
    assert norms["conv"] == pytest.approx(3.0 / math.sqrt(2.0))


def test_split_by_dimension_follows_dimensions() -> None:
    parts = {name: (name,) for name in LAYOUT.names}
    norms = split_by_dimension(LAYOUT, parts, 1.0)
    assert norms["conv.bias"] == pytest.approx(math.sqrt(4 / 24))
    assert norms["fc.weight"] == pytest.approx(math.sqrt(12 / 24))


def test_per_layer_takes_given_norms() -> None:
    conv, fc = per_layer(LAYOUT, layers(LAYOUT), {"conv": 0.5, "fc": 2.0})
    assert (conv.clipping_norm, fc.clipping_norm) == (0.5, 2.0)
    with pytest.raises(InvalidValueError, match="'cnv'"):
        per_layer(LAYOUT, layers(LAYOUT), {"cnv": 0.5, "fc": 2.0})


def test_joint_keeps_the_order_of_the_layout() -> None:
    scales = {"fc.weight": 3.0, "conv.weight": 1.0, "conv.bias": 2.0}
    (group,) = joint(LAYOUT, 1.0, scales)
    assert group.scales == (1.0, 2.0, 3.0)
    with pytest.raises(InvalidValueError, match=r"fc\.weight"):
        joint(LAYOUT, 1.0, {"conv.weight": 1.0, "conv.bias": 2.0})


def test_scales_by_dimension_keep_the_energy_of_flat_noise() -> None:
    scales = scales_by_dimension(LAYOUT)
    energy = math.fsum(LAYOUT.sizes[name] * scale**2 for name, scale in scales.items())
    assert energy == pytest.approx(LAYOUT.dimension)


@pytest.mark.parametrize("name", LAYOUT.names)
@pytest.mark.parametrize("factor", [0.8, 0.99, 1.01, 1.25])
def test_scales_by_dimension_cost_least_when_tensors_are_equally_long(
    name: str, factor: float
) -> None:
    def cost(scales: dict[str, float]) -> float:
        energy = math.fsum(LAYOUT.sizes[n] * scale**2 for n, scale in scales.items())
        return energy * math.fsum(1 / scale**2 for scale in scales.values())

    best = scales_by_dimension(LAYOUT)
    assert cost(best) < cost({**best, name: best[name] * factor})


def test_groups_must_partition_the_layout() -> None:
    everything = flat(LAYOUT, 1.0)
    check_partition(LAYOUT, everything)
    with pytest.raises(InvalidValueError, match=r"'fc\.weight' is in 0 vector groups"):
        check_partition(LAYOUT, (VectorGroup("g", LAYOUT.names[:2], 1.0, (1.0, 1.0)),))
    with pytest.raises(InvalidValueError, match=r"'conv\.weight' is in 2 vector groups"):
        check_partition(LAYOUT, (*everything, VectorGroup("h", ("conv.weight",), 1.0, (1.0,))))
    with pytest.raises(InvalidValueError, match="x"):
        check_partition(LAYOUT, (*everything, VectorGroup("h", ("x",), 1.0, (1.0,))))
    twice = tuple(VectorGroup("g", (name,), 1.0, (1.0,)) for name in LAYOUT.names)
    with pytest.raises(InvalidValueError, match="not unique"):
        check_partition(LAYOUT, twice)


@pytest.mark.parametrize("norm", [1e-30, 0.3, 1.0, 1.5, math.nextafter(2.0, 0.0), 1e30])
def test_a_group_counts_in_steps_of_its_norm(norm: float) -> None:
    group = VectorGroup("g", ("a",), norm, (1e12,))
    assert (Fraction(group.granularity), group.squared_bound) == steps_of(norm)


@pytest.mark.parametrize(
    ("tensors", "norm", "scales", "message"),
    [
        ((), 1.0, (), "no tensors"),
        *(
            (("a",), norm, (1.0,), f"clipping_norm of group 'g' is {norm}")
            for norm in (0.0, -1.0, math.nan, math.inf)
        ),
        (("a",), 1e31, (1.0,), "clipping_norm of group 'g' is"),
        (("a",), 1e-31, (1.0,), "clipping_norm of group 'g' is"),
        (("a",), 1.0, (), "0 scales for 1"),
        (("a",), 1.0, (0.0,), "scale of tensor 'a' is 0.0"),
        (("a",), 1.0, (math.nan,), "scale of tensor 'a' is nan"),
    ],
)
def test_bad_groups_are_refused(
    tensors: tuple[str, ...], norm: float, scales: tuple[float, ...], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        VectorGroup("g", tensors, norm, scales)
