"""How Ray's workers share the GPUs of a machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.flower.ray import gpu_share

_RESOLUTION = 10_000  # Ray counts shares of a resource in such parts, rounding down


@given(gpus=st.integers(1, 16), workers=st.integers(1, 256))
def test_all_workers_are_placed_at_once_and_no_gpu_is_left_that_could_be_used(
    gpus: int, workers: int
) -> None:
    share = gpu_share(gpus, workers)
    assert 0.0 < share <= 1.0  # Ray takes no 1.5
    on_each = _RESOLUTION // int(share * _RESOLUTION)
    assert gpus * on_each >= workers
    # With larger shares not all would fit.
    crowd = round(1.0 / share)
    assert crowd == 1 or gpus * (crowd - 1) < workers


@pytest.mark.parametrize("workers", [1, 3])
def test_without_gpus_there_is_nothing_to_share(workers: int) -> None:
    assert gpu_share(0, workers) == 0.0
