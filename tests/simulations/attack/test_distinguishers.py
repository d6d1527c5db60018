"""What is read of a run's releases, against the releases themselves."""

from dataclasses import fields, replace

import numpy as np
import pytest
from scipy.stats import norm

from fedpriv.data.population import UserStore
from fedpriv.evaluation.held_out import evaluate
from fedpriv.privacy import round as rounds_module
from fedpriv.privacy.noise import SeededEntropy
from simulations.attack.distinguishers import (
    Enemy,
    OwnUpdate,
    Released,
    ReleaseMoments,
    always,
    learnt_combination,
    learnt_direction,
    loss_on,
)
from simulations.attack.populations import POPULATIONS
from simulations.attack.suite import AttackedPlan
from tests.simulations.attack.targets import config_of, people

SETTINGS = {
    "plain": {},
    "measured": {
        "metrics": {"report": {"accuracy": {}, "label-counts": {"classes": 3, "bound": 10.0}}}
    },
    "adaptive": {"clipping": {"norm": 0.1, "strategy": "per-layer", "adaptive": {}}},
    "adam": {"server": {"optimizer": "fedadam", "options": {"learning_rate": 0.1}}},
}


def target_with(setting: str, rounds: int = 2) -> AttackedPlan:
    return AttackedPlan.of(config_of(**SETTINGS[setting]), people(4), rounds, 4)


def released_by(target: AttackedPlan, seed: int = 0) -> Released:
    return target.run(target.transport(target.crowd.users), SeededEntropy(seed))


@pytest.mark.parametrize("setting", SETTINGS)
def test_averages_and_numbers_are_what_was_released(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen, honest = target_with(setting), [], rounds_module.release

    def watched(*given: object) -> np.ndarray:
        seen.append(honest(*given))
        return seen[-1]

    monkeypatch.setattr(rounds_module, "release", watched)
    released = released_by(target)
    assert len(seen) == len(released.states) == len(released.charges) == 2
    size, numbers = target.plan.layout.dimension, released.numbers
    before = released.start
    for row, whole, average, after in zip(
        released.averages, numbers, seen, released.states, strict=True
    ):
        mechanism = target.plan.mechanism_at(before.clipping_norms)
        layout = mechanism.clipping.layout
        parts = layout.unflatten(average)
        expected = [
            (parts[n] / mechanism.tensor_stddevs[n]).ravel() for n in target.plan.layout.names
        ]
        np.testing.assert_allclose(row, np.concatenate(expected), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(row, whole[:size])
        # Nothing that was released is missing.
        assert len(whole) == layout.dimension
        before = after
    for each in always(target.plan):
        assert np.isfinite(each(released))


def test_released_numbers_are_those_of_results() -> None:
    for setting, names in {
        "measured": {"accuracy", "contributors"},
        "adaptive": {"unclipped of 0", "clipping norm of 0"},
    }.items():
        target = target_with(setting)
        released = released_by(target)
        told = {each.name: each(released) for each in always(target.plan)}
        assert names - {"unclipped of 0", "clipping norm of 0"} <= told.keys()
        last = [result.metrics["contributors"] for result in released.results]
        assert told["contributors"] == pytest.approx(np.mean(last))
        assert told["charges"] == told["rounds released"] == 2
        assert told["attempts"] == 0
        group = target.plan.groups[0].name
        if setting == "adaptive":
            shares = [result.unclipped[group] for result in released.results]
            assert told[f"unclipped of {group}"] == pytest.approx(np.mean(shares))
            norms = [result.clipping_norms[group] for result in released.results]
            assert told[f"clipping norm of {group}"] == pytest.approx(np.mean(norms))


def test_a_run_that_raises_is_told_by_its_end() -> None:
    target = target_with("plain")
    honest = target.transport(target.crowd.users)
    calls = []

    class Raising(type(honest)):
        def collect(self, request: object) -> object:
            calls.append(request)
            if len(calls) == 2:
                raise ZeroDivisionError("half")
            yield from super().collect(request)

    given = [each.name for each in fields(honest) if each.init]
    raising = Raising(**{name: getattr(honest, name) for name in given})
    released = target.run(raising, SeededEntropy(0))
    assert released.ended == "ZeroDivisionError: half"
    told = {each.name: each(released) for each in always(target.plan)}
    assert told["rounds released"] == 1
    assert released.averages[0].any()
    assert not released.averages[1].any()


def enemy_of(target: AttackedPlan, users: UserStore) -> Enemy:
    places = np.arange(users.population)[:, np.newaxis]
    return Enemy(target.plan, target.start, target.transport(users), places)


def test_moments_are_mean_and_variance_and_what_an_enemy_sees() -> None:
    target = target_with("measured")
    enemy = enemy_of(target, target.crowd.users)
    runs = [released_by(target, seed) for seed in range(5)]
    numbers = np.array([run.numbers for run in runs])
    found = ReleaseMoments.of(runs, enemy)
    np.testing.assert_allclose(found.mean, numbers.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.variance, numbers.var(0), rtol=1e-9, atol=1e-12)
    assert found.seen.shape == (5, 2 * (4 + 1))
    first, second = runs[3].averages
    seen = [*(enemy.first @ first), np.linalg.norm(first)]
    seen += [*(enemy.first @ second), np.linalg.norm(second)]
    np.testing.assert_allclose(found.seen[3], seen)


def test_the_learnt_direction_grows_with_what_differs() -> None:
    target = target_with("measured")
    runs = [released_by(target, seed) for seed in range(6)]
    without = ReleaseMoments.of(runs[:3], enemy_of(target, target.crowd.users))
    moved = replace(without, mean=without.mean + np.eye(*without.mean.shape))
    along = learnt_direction(without, moved)
    weight = 1.0 / without.variance
    expected = np.vdot(np.eye(*weight.shape) * weight, runs[4].numbers)
    assert along(runs[4]) == pytest.approx(expected)


def test_of_many_runs_the_learnt_combination_is_fishers_discriminant() -> None:
    target = target_with("plain")
    enemy = enemy_of(target, target.crowd.users)
    rng, size = np.random.default_rng(0), 2 * (4 + 1)
    mixed = rng.standard_normal((size, size))
    covariance, apart = mixed @ mixed.T, rng.standard_normal(size)
    seen = rng.multivariate_normal(np.zeros(size), covariance, 100_000)
    without, with_one = (
        ReleaseMoments(np.zeros(0), np.zeros(0), part)
        for part in (seen[:50_000], seen[50_000:] + apart)
    )
    found = learnt_combination(enemy, without, with_one)
    runs = [released_by(target, seed) for seed in range(4)]
    way = np.linalg.solve(covariance, apart)
    expected = [way @ enemy.seen(run) for run in runs]
    assert np.corrcoef(expected, [found(run) for run in runs])[0, 1] > 0.99


def test_a_combination_of_numbers_that_never_vary_is_one() -> None:
    target = target_with("plain")
    same = ReleaseMoments(np.zeros(0), np.zeros(0), np.ones((2, 10)))
    moved = replace(same, seen=2.0 * same.seen)
    found = learnt_combination(enemy_of(target, target.crowd.users), same, moved)
    assert np.isfinite(found(released_by(target)))


def test_the_loss_is_that_of_the_last_model() -> None:
    target = target_with("plain")
    released, task = released_by(target), target.experiment.task
    rows = target.experiment.held_out
    found = loss_on("rows", task, rows)(released)
    expected = evaluate(task, rows, target.experiment.device, released.states[-1].parameters).loss
    assert found == expected
    broken = {**rows, "y": np.full_like(rows["y"], 99)}
    assert loss_on("rows", task, broken)(released) == 0.0


@pytest.mark.parametrize("q", [0.3, 1.0])
def test_alone_the_own_update_is_the_exact_likelihood_ratio(q: float) -> None:
    privacy = {"epsilon": 4.0, "delta": 1e-3, "sampling_probability": q}
    target = AttackedPlan.of(config_of(privacy=privacy), people(4), 1, 4)
    pair = POPULATIONS["alone"].pair(target.crowd)
    enemy = enemy_of(target, pair.with_one)
    own = OwnUpdate(enemy, np.zeros((1, target.plan.layout.dimension)))
    update = enemy.added(target.start, np.array([3]))
    assert np.linalg.norm(update) == pytest.approx(1.0 / target.plan.noise_multiplier, rel=0.2)
    for seed in range(3):
        released = target.run(enemy.transport, SeededEntropy(seed))
        (seen,) = released.averages
        drawn, missed = (norm.logpdf(seen - moved).sum() for moved in (update, 0.0))
        expected = np.logaddexp(np.log(q) + drawn, np.log1p(-q) + missed if q < 1.0 else -np.inf)
        assert own(released) == pytest.approx(expected - missed, abs=1e-6)


def test_what_others_coins_add_counts_for_less() -> None:
    """The ratio is that of normals with the covariance of others' coins."""
    privacy = {"epsilon": 4.0, "delta": 1e-3, "sampling_probability": 0.3}
    target = AttackedPlan.of(config_of(privacy=privacy), people(4), 1, 4)
    enemy = enemy_of(target, target.crowd.users)
    own = OwnUpdate(enemy, np.ones((1, target.plan.layout.dimension)))
    *others, update = enemy.first
    covariance = np.eye(len(update)) + 0.21 * sum(np.outer(each, each) for each in others)
    released = target.run(enemy.transport, SeededEntropy(1))
    way = np.linalg.solve(covariance, update)
    signal = way @ (released.averages[0] - 1.0) - way @ update / 2.0
    assert own(released) == pytest.approx(np.log(0.7 + 0.3 * np.exp(signal)))
