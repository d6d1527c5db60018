"""Vector groups as users write them."""

import math

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import parse_config
from fedpriv.experiment.grouping import Grouping
from fedpriv.privacy.gaussian_mechanism import noise_stddevs
from fedpriv.privacy.layout import Layout

LAYOUT = Layout(
    ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc.weight", "fc.bias"),
    ((16, 1, 8, 8), (16,), (32, 16, 4, 4), (32,), (10, 512), (10,)),
)
REST = {"name": "rest", "tensors": ["*"], "norm": 0.5}


def grouping(clipping: dict[str, object], noise: dict[str, object] | None = None) -> Grouping:
    table = {
        "name": "test",
        "rounds": 1,
        "data": {"name": "digits"},
        "model": {"name": "cnn"},
        "local": {"learning_rate": 0.1, "steps": 1},
        "privacy": {"sampling_probability": 0.1, "delta": 1e-5, "epsilon": 1.0},
        "clipping": clipping,
        "noise": noise or {},
    }
    config = parse_config(table, "test.toml")
    mechanism = config.mechanism()
    return mechanism.clipping.grouping(LAYOUT, mechanism.allocation)


def test_mixed_groups_reduce_to_one_noise_multiplier() -> None:
    found = grouping(
        {
            "groups": [
                {"name": "conv", "tensors": ["conv*"], "norm": 0.3, "strategy": "joint"},
                {"name": "dense", "tensors": ["fc.*"], "norm": 0.4, "strategy": "per-layer"},
            ]
        }
    )
    assert [group.name for group in found.groups] == ["conv", "dense/fc"]
    assert found.groups[0].tensors == LAYOUT.names[:4]
    assert found.groups[0].scales != (1.0,) * 4
    assert found.groups[1].clipping_norm == 0.4
    stddevs = noise_stddevs(tuple(g.clipping_norm for g in found.groups), 1.5, found.shares)
    square = math.fsum(
        (g.clipping_norm / s) ** 2 for g, s in zip(found.groups, stddevs, strict=True)
    )
    assert square**-0.5 == pytest.approx(1.5)


def test_a_tensor_is_in_the_first_group_that_fits() -> None:
    biases = {"name": "biases", "tensors": ["*.bias"], "norm": 0.1}
    found = grouping({"groups": [biases, REST]})
    assert [group.tensors for group in found.groups] == [LAYOUT.names[1::2], LAYOUT.names[::2]]
    assert [group.name for group in found.groups] == ["biases", "rest"]


def test_per_tensor_groups_split_their_norm() -> None:
    found = grouping({"groups": [{**REST, "strategy": "per-layer", "parts": "tensor"}]})
    assert [group.name for group in found.groups] == [f"rest/{name}" for name in LAYOUT.names]
    assert math.fsum(g.clipping_norm**2 for g in found.groups) == pytest.approx(0.25)


def test_shares_are_weights_of_groups_split_within_them() -> None:
    conv = {"name": "conv", "tensors": ["conv*"], "norm": 0.3, "strategy": "per-layer"}
    found = grouping({"groups": [{**conv, "share": 3.0}, {**REST, "share": 1.0}]})
    assert [group.name for group in found.groups] == ["conv/conv1", "conv/conv2", "rest"]
    assert found.shares == pytest.approx((0.375, 0.375, 0.25))
    by_size = grouping(
        {"groups": [{**conv, "share": 1.0}, {**REST, "share": 1.0}]}, {"allocation": "dimension"}
    )
    first, second, rest = by_size.shares
    assert first / second == pytest.approx((16 * 64 + 16) / (32 * 256 + 32))
    assert (first + second, rest) == pytest.approx((0.5, 0.5))


def test_one_group_of_everything_is_flat_clipping() -> None:
    flat = grouping({"norm": 0.5})
    (group,) = grouping({"groups": [REST]}).groups
    assert (group.tensors, group.clipping_norm, group.scales) == (
        flat.groups[0].tensors,
        flat.groups[0].clipping_norm,
        flat.groups[0].scales,
    )


@pytest.mark.parametrize(
    ("clipping", "message"),
    [
        ({"groups": [{**REST, "tensors": ["conv*"]}]}, "tensor 'fc.weight' fits no pattern"),
        (
            {"groups": [REST, {**REST, "name": "late", "tensors": ["fc*"]}]},
            "group 'late' has no tensor",
        ),
        ({"groups": [REST], "norm": 1.0}, "norm is given next to groups"),
        ({"groups": [REST], "strategy": "joint"}, "strategy is given next to groups"),
        ({"groups": [REST, REST]}, "names must be unique"),
        ({"groups": [{**REST, "share": 1.0}, {**REST, "name": "b"}]}, "all must have one, or none"),
        ({"groups": [{**REST, "norm": -1.0}]}, r"clipping.groups.0.norm is -1.0"),
        ({"groups": [{**REST, "colour": 1}]}, r"unknown key clipping.groups.0.colour"),
        ({"groups": [{"name": "a", "norm": 1.0}]}, r"key clipping.groups.0.tensors is absent"),
        ({"groups": [{**REST, "tensors": []}]}, r"clipping.groups.0.tensors"),
    ],
)
def test_what_does_not_fit_is_refused(clipping: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        grouping(clipping)


def test_shares_are_said_once() -> None:
    with pytest.raises(InvalidValueError, match="only one may be given"):
        grouping({"groups": [{**REST, "share": 1.0}]}, {"allocation": {"rest": 1.0}})
