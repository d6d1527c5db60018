"""federation.trust: what it needs, what it cannot be combined with, and a simulation with it."""

from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.ledger.events import SecureSum
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.simulate import run_simulation
from fedpriv.training.rounds import Stop

DIGITS = experiment_file(Path("digits"))
NONE = ["federation.trust=none", "federation.least_nodes=7", "federation.colluding_nodes=2"]
SHORT = ["rounds=3", "seed=1", "engine.processes=1"]


def test_the_server_is_trusted_unless_it_is_said() -> None:
    assert load_config(DIGITS).federation is None
    trusted = load_config(DIGITS, ["federation.least_nodes=3"]).federation
    assert trusted is not None
    assert trusted.secure_sum is None
    given = load_config(DIGITS, [*NONE, "federation.dropouts=2"]).federation
    assert given is not None
    assert given.secure_sum == SecureSum(7, 2, 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["federation.colluding_nodes=1"], "colluding_nodes is 1"),
        (["federation.dropouts=1"], "dropouts is 1"),
        (["federation.simulated_dropout=0.5"], r"simulated_dropout is 0\.5"),
        (["federation.trust=none"], "nodes is 1"),
        (["federation.trust=nobody"], "federation.trust"),
        ([*NONE, "federation.dropouts=3"], "dropouts is 3"),
        ([*NONE, "federation.colluding_nodes=6"], "colluding_nodes is 6"),
        ([*NONE, "output.simulation_only=true"], "simulation_only"),
        ([*NONE, "audit.canaries=50"], "audit"),
        ([*NONE, "averaging.cap=4", "averaging.total_weight=9", "averaging.floor=0.5"], "floor"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        load_config(DIGITS, settings)


def test_policies_that_need_a_central_draw_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "fixed.toml"
    text = DIGITS.read_text(encoding="utf-8").replace("sampling_probability = 0.3", "")
    policy = '\n[sampling]\npolicy = "fixed-size"\noptions = { cohort_size = 20 }\n'
    file.write_text(text + policy, encoding="utf-8")
    with pytest.raises(InvalidValueError, match="fixed-size"):
        run_simulation(file, [*NONE, *SHORT], tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_simulation_charges_as_with_a_trusted_server_and_repeats_itself(tmp_path: Path) -> None:
    folders = {
        "trusted": SHORT,
        "first": [*SHORT, *NONE],
        "second": [*SHORT, *NONE],
    }
    runs = {
        name: run_simulation(DIGITS, settings, tmp_path / name, resume=False)
        for name, settings in folders.items()
    }
    first, second, trusted = runs["first"], runs["second"], runs["trusted"]
    assert first.epsilon == second.epsilon == trusted.epsilon
    assert [r.accuracy for r in first.rounds] == [r.accuracy for r in second.rounds]
    assert first.rounds[-1].accuracy != trusted.rounds[-1].accuracy
    with Ledger.open(tmp_path / "first" / "ledger.sqlite") as ledger:
        events = {row.event for row in ledger.charges()}
    assert {event.secure_sum for event in events} == {SecureSum(7, 2, 0)}
    # Without drop-outs, the noise of a count is √(n/(n − t − d)) of that which is charged.
    ratio = (
        first.rounds[0].metrics_noise_stddev["contributors"]
        / trusted.rounds[0].metrics_noise_stddev["contributors"]
    )
    assert ratio == pytest.approx((7 / 5) ** 0.5)


def test_a_run_whose_nodes_drop_out_ends_and_has_charged_each_attempt(tmp_path: Path) -> None:
    lost = [*SHORT, *NONE, "federation.simulated_dropout=1.0"]
    run = run_simulation(DIGITS, lost, tmp_path / "run", resume=False)
    assert run.stop is Stop.DECLINED
    assert run.rounds == ()
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert [(row.round, row.attempt) for row in ledger.charges()] == [(1, 0), (1, 1), (1, 2)]
