"""The study of random allocation: what its notes say holds for rows of its table."""

from simulations.papers.allocation import SETTINGS, Setting, compared


def test_a_short_pass_costs_far_less_than_a_poisson_sample_at_small_delta() -> None:
    setting = Setting(10, 1, 1, 1.0, 1e-6)
    assert setting in SETTINGS
    assert setting.allocation.epsilon < 0.8 * setting.poisson.epsilon_low
    assert compared(setting).endswith("% less")


def test_at_a_large_delta_it_costs_more() -> None:
    setting = SETTINGS[-1]
    assert setting.delta > 0.1
    assert setting.allocation.epsilon_low > setting.poisson.epsilon
    assert compared(setting).endswith("% more")


def test_several_participations_are_an_interval() -> None:
    setting = Setting(1000, 10, 10, 4.0, 1e-6)
    assert setting in SETTINGS
    assert (
        0
        < setting.allocation.epsilon_low
        < setting.allocation.epsilon
        < setting.poisson.epsilon_low
    )
