"""A whole run of DP-SGD compared with Opacus: lots, noise, ε and accuracy included.

It is the first row of Bu et al. 2020, Table 1 (lots of 256 images, σ = 1.3), for some epochs, or
the same with other lots: in larger lots the fixed costs of a round matter less. Opacus is used as
in its tutorials: `make_private` with Poisson sampling. Times are from data in memory to the
accuracy on the test images, without imports. Each run has its own process, and they take turns.

    .venv-rivals/bin/python -m simulations.benchmarks.whole_run [--lots 256 600 2048] --json FILE

Data: MNIST's files, in the folder FEDPRIV_DATA.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional

import fedpriv
from fedpriv.report.tables import Column, Table, print_table
from simulations.benchmarks.machine import environment, made_by
from simulations.papers.bu_mnist import DELTA, IMAGES, ROWS, Row, mnist, trained


@dataclass(frozen=True)
class Trained:
    """One run."""

    seconds: float
    accuracy: float
    epsilon: float  # by the library


def ours(people: fedpriv.Population, row: Row) -> Trained:
    """Run `fedpriv.simulate`, including its ledger on disk."""
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        run = trained(row, people, 0, Path(folder))
        return Trained(perf_counter() - began, run.accuracy or 0.0, run.epsilon)


def opacus(people: fedpriv.Population, row: Row) -> Trained:
    """Run Opacus with its own sampler, optimiser and accountant."""
    from opacus import PrivacyEngine  # noqa: PLC0415 - of the rivals' environment
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    torch.manual_seed(0)
    x, y = (torch.from_numpy(people.users.fields[name]) for name in ("x", "y"))
    began = perf_counter()
    model = row.build()
    engine = PrivacyEngine()
    model, optimizer, lots = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=row.learning_rate),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=row.lot),
        noise_multiplier=row.noise_multiplier,
        max_grad_norm=row.clipping_norm,
    )
    rounds_left = row.rounds
    while rounds_left:
        for images, labels in lots:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            rounds_left -= 1
            if not rounds_left:
                break
    with torch.no_grad():
        predicted = model(torch.from_numpy(people.test["x"])).argmax(dim=1).numpy()
    epsilon = engine.get_epsilon(DELTA)
    accuracy = float((predicted == people.test["y"]).mean())
    return Trained(perf_counter() - began, accuracy, float(epsilon))


_LIBRARIES: Mapping[str, Callable[[fedpriv.Population, Row], Trained]] = {
    "fedpriv": ours,
    "Opacus": opacus,
}


def results_table(runs: Mapping[str, Sequence[Trained]], row: Row) -> Table:
    """Return a table of medians over the runs of each library."""
    seconds = {name: median(run.seconds for run in of_one) for name, of_one in runs.items()}
    rows = [
        (
            name,
            f"{seconds[name]:.1f}",
            f"{row.epochs * IMAGES / seconds[name]:,.0f}",
            f"{median(run.accuracy for run in of_one):.1%}",
            f"{of_one[0].epsilon:.3f}",
            f"{seconds['Opacus'] / seconds[name]:.1f} ×",
        )
        for name, of_one in runs.items()
    ]
    names = "seconds", "images/s", "accuracy", "ε as it says", "Opacus's time over its"
    columns = [Column("", "text"), *map(Column, names)]
    title = f"DP-SGD, CNN on MNIST, {row.epochs:g} epochs in lots of {row.lot}, a whole run"
    return Table(title, columns, rows)


def measured(row: Row, repeats: int, threads: int) -> dict[str, list[Trained]]:
    """Run each library in turn, each run in its own process."""
    options = "--lots", str(row.lot), "--epochs", str(row.epochs), "--threads", str(threads)
    command = [sys.executable, "-m", "simulations.benchmarks.whole_run", *options, "--only"]
    runs: dict[str, list[Trained]] = {name: [] for name in _LIBRARIES}
    for _ in range(repeats):
        for name, of_one in runs.items():
            process = subprocess.run(
                [*command, name], stdout=subprocess.PIPE, check=True, env=environment()
            )
            of_one.append(Trained(**json.loads(process.stdout.splitlines()[-1])))
    return runs


def main() -> None:
    """Run both in turn; print and, if requested, write the numbers."""
    parser = argparse.ArgumentParser(description="a whole run of DP-SGD, compared with Opacus")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument(
        "--lots", type=int, nargs="+", default=[ROWS[0].lot], help="expected images of a round"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(_LIBRARIES), help="one run, as JSON")
    options = parser.parse_args()
    rows = [replace(ROWS[0], epochs=options.epochs, lot=lot) for lot in options.lots]
    if options.only:
        torch.set_num_threads(options.threads)
        print(json.dumps(asdict(_LIBRARIES[options.only](mnist(), rows[0]))))
        return
    runs_done = []
    for row in rows:
        runs = measured(row, options.repeats, options.threads)
        print_table(results_table(runs, row))
        content = {name: [asdict(run) for run in of_one] for name, of_one in runs.items()}
        runs_done.append({"lot": row.lot, "epochs": row.epochs, "runs": content})
    if options.json:
        packages = ["fedpriv", "torch", "opacus"]
        about = made_by("benchmarks.whole_run", packages, threads=options.threads)
        text = json.dumps(about | {"lots": runs_done}, indent=1)
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
