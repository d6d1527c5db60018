"""Every way in which a partial sum can be wrong counts as zero."""

import numpy as np
import pytest
from federation import LAYOUT

from fedpriv.federated.aggregate import add_up
from fedpriv.federated.transport import PartialSum
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import flat

CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 1.0))
D = LAYOUT.dimension
GOOD = PartialSum("good", 2, np.full(D, 1.9 / np.sqrt(D)))


def test_good_sums_add_up() -> None:
    other = PartialSum("other", 1, np.full(D, -0.1))
    np.testing.assert_allclose(
        add_up([GOOD, other], CLIPPING, 3).total, np.full(D, 1.9 / np.sqrt(D) - 0.1)
    )


@pytest.mark.parametrize(
    "bad",
    [
        PartialSum("good", 1, np.full(D, 0.1)),
        PartialSum("bad", 1, np.full(D, np.nan)),
        PartialSum("bad", 1, np.full(D, np.inf)),
        PartialSum("bad", 1, np.full(D, 1e38)),
        PartialSum("bad", 1, np.full(D, 1e300)),
        PartialSum("bad", 1, np.append(np.zeros(D - 1), np.nan)),
        PartialSum("bad", 1, np.full(D - 1, 0.1)),
        PartialSum("bad", 1, np.full((D, 1), 0.1)),
        PartialSum("bad", 0, np.full(D, 0.1)),
        PartialSum("bad", -1, np.full(D, 0.1)),
        PartialSum("bad", 9, np.full(D, 0.1)),
    ],
    ids=[
        "duplicate",
        "nan",
        "inf",
        "huge",
        "overflow",
        "one nan",
        "short",
        "shape",
        "nobody",
        "negative",
        "too many",
    ],
)
def test_bad_sums_count_as_zero(bad: PartialSum, caplog: pytest.LogCaptureFixture) -> None:
    np.testing.assert_array_equal(add_up([GOOD, bad], CLIPPING, 10).total, GOOD.total)
    (message,) = caplog.messages
    assert bad.node not in message


def test_no_sums_are_zero() -> None:
    np.testing.assert_array_equal(add_up([], CLIPPING, 0).total, np.zeros(D))
