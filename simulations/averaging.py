"""The study behind `Run.mean_model`: the gain of the mean of the last models over the last one.

    FEDPRIV_DATA=FOLDER python -m simulations.averaging simulations/results/averaging.json

Each row is a task of `simulations.default_tasks` at its ε or a quarter of it, with one optimiser
and norm: accuracy on held-out rows of the last of 100 models, and the gain of each mean in
percentage points, on average over three seeds. A fraction is the averaged share of rounds, the last
ones; "ema 0.9" is an exponential average with that decay. This takes ten minutes of one core.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np

from fedpriv.evaluation.held_out import evaluate
from fedpriv.experiment.build import SharedRoads, on_population
from fedpriv.experiment.config import parse_config, spelled_out
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.training.rounds import train
from simulations.default_tasks import TASKS, population_of

FRACTIONS = {"1/2": 2, "1/3": 3, "1/4": 4, "1/10": 10}
DECAYS = (0.8, 0.9, 0.95)
SERVERS = (("fedavg", 1.0, 0.5), ("fedadam", 0.03, 0.1), ("fedadam", 0.03, 0.3))
NAMES, SEEDS, ROUNDS = ("digits", "activities", "employment"), 3, 100


def accuracies(
    task: str, epsilon: float, optimizer: str, rate: float, norm: float, seed: int
) -> dict[str, float]:
    """Return the accuracy of the last model and of each mean."""
    table: dict[str, object] = {
        "name": task,
        "seed": seed,
        "rounds": ROUNDS,
        **spelled_out({"data": TASKS[task].data}),
        "model": TASKS[task].model,
        "server": {"optimizer": optimizer, "options": {"learning_rate": rate}},
        "clipping": {"norm": norm},
        "privacy": {"epsilon": epsilon, "delta": TASKS[task].delta},
        "engine": {"processes": 1},
    }
    config = parse_config(table, task)
    experiment, transport = on_population(config, task, population_of(task), roads=SharedRoads())
    models = []
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "ledger.sqlite", Path(folder) / "participation.sqlite"
        with PrivacyRecords.open(*paths, task, experiment.budget) as records:
            state, entropy = experiment.initial_state, experiment.entropy
            for state_after, _ in train(experiment.plan, state, transport, records, entropy):
                models.append({n: t.astype(np.float64) for n, t in state_after.model.items()})
    means = {
        name: {n: np.mean([m[n] for m in models[-(ROUNDS // k) :]], axis=0) for n in models[0]}
        for name, k in FRACTIONS.items()
    }
    for decay in DECAYS:
        mean = models[0]
        for model in models[1:]:
            mean = {n: decay * mean[n] + (1.0 - decay) * model[n] for n in mean}
        means[f"ema {decay:g}"] = mean
    results = {}
    for name, tensors in {"last": models[-1], **means}.items():
        model = {n: t.astype(np.float32) for n, t in tensors.items()}
        figures = evaluate(experiment.task, experiment.held_out, experiment.device, model)
        assert figures.accuracy is not None
        results[name] = figures.accuracy
    return results


def main() -> None:
    """Run the rows that the file lacks, and write it after each row."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    rows = json.loads(path.read_text()) if path.exists() else []
    for task, share, (optimizer, rate, norm) in itertools.product(NAMES, (0.25, 1.0), SERVERS):
        epsilon = share * TASKS[task].epsilon
        key = {"task": task, "epsilon": epsilon, "optimizer": optimizer, "norm": norm}
        if any(row.items() >= key.items() for row in rows):
            continue
        of_seeds = [accuracies(task, epsilon, optimizer, rate, norm, seed) for seed in range(SEEDS)]
        last = np.mean([scores["last"] for scores in of_seeds])
        gains = {
            name: round(100.0 * float(np.mean([scores[name] for scores in of_seeds]) - last), 1)
            for name in of_seeds[0]
            if name != "last"
        }
        rows.append({**key, "last": round(100.0 * float(last), 1), "gain": gains})
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
