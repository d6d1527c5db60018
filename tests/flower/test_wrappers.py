"""Why Flower's own wrappers for differential privacy are not used: a test of each fault.

They are faults of one version. A test that fails under the next says that one is mended.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from tests.flower.local_grid import LocalGrid, app

VERSION = "1.41.0"
pytestmark = pytest.mark.skipif(
    version("flwr") != VERSION,
    reason=f"the faults are those of flwr {VERSION}; {version('flwr')} is installed",
)
NORMS = {"Fixed": "clipping_norm", "Adaptive": "initial_clipping_norm"}
"""Kinds of wrappers, and what each calls the clipping norm."""


@pytest.fixture
def grid() -> Iterator[Callable[[int], LocalGrid]]:
    """Makes grids of so many nodes, which are closed at the end."""
    made: list[LocalGrid] = []

    def of(nodes: int) -> LocalGrid:
        made.append(LocalGrid({node: (app, {}) for node in range(1, nodes + 1)}))
        return made[-1]

    yield of
    for opened in made:
        opened.close()


def wrapped(kind: str, nodes: int, clipping_norm: float = 1.0, **more: float) -> flower.Strategy:
    """Flower's federated averaging over half of the nodes, in a wrapper."""
    make = getattr(flower, f"DifferentialPrivacyServerSide{kind}Clipping")
    inner = flower.FedAvg(fraction_train=0.5, min_train_nodes=1, min_available_nodes=nodes)
    given = {"noise_multiplier": 0.0, NORMS[kind]: clipping_norm, **more}
    return make(inner, num_sampled_clients=nodes // 2, **given)


def train(
    strategy: flower.Strategy,
    grid: LocalGrid,
    updates: Sequence[np.ndarray],
    examples: Sequence[int],
) -> np.ndarray:
    """A round whose nodes move the model, which is zero, by these updates: the new model."""
    start = ArrayRecord([np.zeros_like(updates[0])])
    asked = list(strategy.configure_train(1, start, ConfigRecord(), grid))
    assert len(asked) == len(updates)
    replies = [
        Message(
            RecordDict({"arrays": ArrayRecord([u]), "metrics": MetricRecord({"num-examples": n})}),
            reply_to=message,
        )
        for message, u, n in zip(asked, updates, examples, strict=True)
    ]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    return arrays.to_numpy_ndarrays()[0]


def test_cohorts_have_a_fixed_size_and_are_of_connected_nodes(grid) -> None:
    for connected, size in [(20, 10), (8, 4)]:
        strategy, nodes = wrapped("Fixed", connected), grid(connected)
        sizes = {
            len(list(strategy.configure_train(n, ArrayRecord(), ConfigRecord(), nodes)))
            for n in range(1, 41)
        }
        # Forty cohorts of independent coins are all of one size with probability below 1e-20.
        assert sizes == {size}


@pytest.mark.parametrize("kind", NORMS)
def test_an_update_that_is_not_a_number_is_not_clipped_and_is_released(grid, kind) -> None:
    good, bad = np.ones(3), np.array([np.nan, 1e6, -1e6])
    model = train(wrapped(kind, 4), grid(4), [good, bad], [1, 1])
    assert np.isnan(model[0])
    assert abs(model[1:]).min() > 1e5


@pytest.mark.parametrize("kind", NORMS)
def test_an_update_of_zeros_ends_the_run(grid, kind) -> None:
    with pytest.raises(ZeroDivisionError):
        train(wrapped(kind, 4), grid(4), [np.ones(3), np.zeros(3)], [1, 1])


def test_noise_is_for_equal_weights_but_nodes_say_their_own(grid) -> None:
    own, others = np.array([1.0, 0.0]), [np.array([0.0, 1.0])] * 9
    model = train(wrapped("Fixed", 20), grid(20), [own, *others], [9991] + [1] * 9)
    # One node has moved the mean by ten times what the noise is calibrated to, 1/10.
    assert model[0] > 0.99


@pytest.mark.parametrize(("start", "away"), [(0.5, -1.0), (2.0, 1.0)])
def test_adaptive_clipping_moves_away_from_the_quantile(grid, start, away) -> None:
    strategy = wrapped("Adaptive", 20, start)
    nodes, norms = grid(20), [start]
    for _ in range(30):
        train(strategy, nodes, [np.array([1.0, 0.0])] * 10, [1] * 10)
        norms.append(strategy.clipping_norm)
    # The norm of all updates, and so their median, is 1.
    assert (away * np.diff(np.log(norms)) > 0.0).all()
    assert abs(np.log(norms[-1])) > 3.0


def test_adaptive_clipping_adds_noise_for_a_norm_that_did_not_clip(grid) -> None:
    strategy = wrapped(
        "Adaptive", 20, noise_multiplier=0.1, clipped_count_stddev=0.1, clip_norm_lr=1.0
    )
    clipped_by, noise_multiplier = strategy.clipping_norm, strategy.noise_multiplier
    updates = [np.full(100_000, 1.0)] * 10
    model = train(strategy, grid(20), updates, [1] * 10)
    stddev = noise_multiplier * clipped_by / 10
    # All are clipped, so the norm is about exp(-1/2) of what it was when the noise is drawn.
    assert strategy.clipping_norm < 0.9 * clipped_by
    assert model.std() < 0.9 * stddev
    np.testing.assert_allclose(model.std(), stddev * strategy.clipping_norm / clipped_by, rtol=0.03)
