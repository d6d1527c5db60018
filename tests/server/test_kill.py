"""A run that is killed at random moments never releases what its ledger does not hold."""

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.run.folder import RunFolder
from fedpriv.run.simulate import run_simulation
from fedpriv.training.rounds import checkpoints, load_checkpoint

CONFIG = """
name = "killed"
data = { name = "digits" }
model = { name = "softmax" }
local = { learning_rate = 0.5, epochs = 1 }
clipping = { norm = 0.5 }
output = { evaluate_every = 500 }
privacy = { sampling_probability = 0.3, epsilon = 50.0, delta = 1e-3, noise_multiplier = 4.0, \
accountant = "rdp" }
"""


def await_release(folder: RunFolder, process: BaseProcess) -> None:
    """Wait for a release after this call, or for the end of the process."""
    before = folder.metrics.stat().st_size if folder.metrics.exists() else 0
    while process.is_alive():
        if folder.metrics.exists() and folder.metrics.stat().st_size > before:
            return
        time.sleep(0.002)


def check(folder: RunFolder) -> int:
    """Every release is charged and the checkpoint is covered; returns the next round."""
    if not folder.ledger.exists():
        assert list(folder.read_metrics()) == []
        assert checkpoints(folder.checkpoints) == []
        return 0
    with Ledger.open(folder.ledger) as ledger:
        record = record_path(folder.ledger)
        if record.exists():
            with ParticipationRecord.open(record) as participation:
                ledger.verify(participation)
        charged = {row.hash: (row.round, row.attempt) for row in ledger.charges()}
        for row in folder.read_metrics():
            assert charged[str(row["charge"])] == (row["round"], row["attempt"])
        found = checkpoints(folder.checkpoints)
        if not found:
            return 0
        saved = load_checkpoint(found[-1])
        assert ledger.contains_head(saved.ledger_head)
        assert set(range(1, saved.state.round + 1)) <= {number for number, _ in charged.values()}
        return saved.state.round


@pytest.mark.parametrize(
    ("kills", "rounds"), [(2, 100), pytest.param(12, 800, marks=pytest.mark.slow)]
)
def test_killing_and_resuming_never_loses_a_charge(tmp_path: Path, kills: int, rounds: int) -> None:
    config, folder = tmp_path / "killed.toml", RunFolder(tmp_path / "run")
    config.write_text(f"rounds = {rounds}\n{CONFIG}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedpriv.run.simulate", "fedpriv.data.builtin"])

    def start() -> BaseProcess:
        """What `fedpriv simulate FILE --out DIR --resume` does, in a process of its own."""
        process = context.Process(
            target=run_simulation, args=(config, [], folder.path), kwargs={"resume": True}
        )
        process.start()
        return process

    moments = random.Random(0)
    reached = []
    for kill in range(kills):
        process = start()
        if kill % 2:  # while rounds are run, however long the start takes
            await_release(folder, process)
        time.sleep(moments.uniform(0.0, 1.0))
        process.kill()
        process.join()
        reached.append(check(folder))
    assert reached == sorted(reached)
    assert reached[-1] > 0
    process = start()
    process.join()
    assert process.exitcode == 0
    assert check(folder) == rounds
    assert folder.model.exists()
