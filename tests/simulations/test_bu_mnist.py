"""Table 1 of Bu et al. 2020: what its rows cost, public features, and a small rerun."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

import fedpriv
from fedpriv.accounting import epsilon, poisson_gaussian
from fedpriv.ledger import Ledger
from simulations.papers import bu_mnist
from simulations.papers.bu_mnist import (
    DELTA,
    IMAGES,
    ROWS,
    Found,
    Row,
    keras_cnn,
    main,
    measure,
    mnist,
    results_table,
    scattered,
    softmax_regression,
    trained,
)

MOMENTS = (1.19, 3.01, 7.10)  # as the paper prints them


def cost(row: Row) -> float:
    z = row.mechanism().noise_multiplier
    assert z is not None
    return epsilon([poisson_gaussian(row.q, z, row.rounds)], DELTA).epsilon


def test_rows_of_the_paper_cost_less_than_the_moments_accountant_says() -> None:
    for row, said in zip(ROWS, MOMENTS, strict=False):
        assert row.paper is not None
        assert said / 2 < cost(row) < said


def test_other_rows_cost_no_more_than_the_first_and_the_third() -> None:
    first, _, third, *others = ROWS
    costs = [cost(row) for row in others]
    assert costs == [pytest.approx(row.epsilon, rel=1e-3) for row in others]
    assert max(costs[::2]) <= cost(first)
    assert max(costs[1::2]) <= cost(third)


def test_the_papers_rows_start_as_keras_starts_them() -> None:
    assert [row.build for row in ROWS[:3]] == [keras_cnn] * 3
    torch.manual_seed(0)
    layers = [layer for layer in keras_cnn().children() if hasattr(layer, "weight")]
    # Inputs and outputs of a weight: those of a place of the kernel, times the places of a kernel.
    fans = [(64, 16 * 64), (16 * 16, 32 * 16), (512, 32), (32, 10)]
    for layer, (inputs, outputs) in zip(layers, fans, strict=True):
        weight, bias = (p.detach().numpy() for p in layer.parameters())
        limit = math.sqrt(6 / (inputs + outputs))
        assert not bias.any()
        assert 0.97 * limit < np.abs(weight).max() <= limit
        assert np.std(weight) == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_rows_that_are_not_trained_again_keep_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretended(row: Row, people: object, seeds: int) -> Found:
        return Found(row.name, row.lot, row.epochs, 1.0, 2.0, row.paper, (0.5,) * seeds)

    monkeypatch.setattr(bu_mnist, "mnist", lambda **_: object())
    monkeypatch.setattr(bu_mnist, "measure", pretended)
    before = [replace(pretended(row, None, 2), here=(0.25, 0.75)) for row in ROWS]
    text = json.dumps([asdict(each) for each in before])
    (tmp_path / "bu_mnist.json").write_text(text)
    main(["--rows", "2", "--seeds", "1", "--folder", str(tmp_path)])
    read = json.loads((tmp_path / "bu_mnist.json").read_text())
    after = [Found.read(each) for each in read]
    assert after == [before[0], pretended(ROWS[1], None, 1), *before[2:]]
    main(["--seeds", "1", "--folder", str(tmp_path)])
    read = json.loads((tmp_path / "bu_mnist.json").read_text())
    assert [each["here"] for each in read] == [[0.5]] * len(ROWS)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 1.0, 255.0]))
def test_features_of_an_image_are_bounded_and_its_own(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    images = (scale * rng.random((3, 1, 28, 28))).astype(np.float32)
    features = scattered(images)
    assert features.shape == (3, softmax_regression().in_features)
    assert np.linalg.norm(features, axis=1).max() <= 1.0
    others = rng.random((3, 1, 28, 28)).astype(np.float32)
    others[1] = images[1]
    np.testing.assert_allclose(scattered(others)[1], features[1], atol=1e-6)


def test_features_tell_directions_apart_and_not_brightness() -> None:
    stripes = np.zeros((1, 28, 28), np.float32)
    stripes[:, ::4] = stripes[:, 1::4] = 1.0
    images = np.stack([stripes, stripes.swapaxes(1, 2), 0.5 * stripes])
    level, upright, dark = scattered(images)
    assert np.linalg.norm(level - upright) > 0.2
    assert np.linalg.norm(level - dark) < 0.1


@pytest.mark.slow
def test_a_row_is_trained_by_example_within_its_budget(tmp_path: Path) -> None:
    read = load_digits()
    x, y = (read.data / 16.0).astype(np.float32), read.target
    owners, held_out = np.arange(1500) // 5, (x[1500:], y[1500:])
    people = fedpriv.Population.from_arrays(x[:1500], y[:1500], owners, held_out=held_out)
    lot = 0.1 * IMAGES  # rows give the expected lot of 60,000 images
    row = Row(
        "digits", int(lot), 10, 1.0, 1.0, epsilon=4.0, decays=True,
        build=lambda: nn.Linear(64, 10),
    )  # fmt: skip
    run = trained(row, people, 0, tmp_path)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert {charge.event.sampling.unit for charge in ledger.charges()} == {"example"}
    assert len(run.rounds) == row.rounds == 100
    assert 3.9 < run.epsilon <= 4.0
    assert run.accuracy > 0.7
    assert row.server == fedpriv.FedAvg(fedpriv.PolynomialDecay(1.0, 0.0, 100))
    found = measure(row, people, 1)
    assert found.here == (run.accuracy,)
    assert results_table([found]).rows[0][0] == "digits"


@pytest.mark.slow
@pytest.mark.skipif("FEDPRIV_DATA" not in os.environ, reason="FEDPRIV_DATA names no MNIST")
def test_public_features_learn_mnist() -> None:
    row = Row(
        "a few epochs", 4096, 5, 1.0, 20.0, 0.9, epsilon=5.639,
        build=softmax_regression, features=True,
    )  # fmt: skip
    (accuracy,) = measure(row, mnist(features=True), 1).here
    assert accuracy > 0.93
