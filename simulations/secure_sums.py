"""What does it cost that the server need not be trusted? Accuracy, processor time and bytes.

    python -m simulations.secure_sums simulations/results/secure_sums.json

`federation` are rounds of real processes on loopback, see `secure_load`: of a node the processor
time and the bytes that it sends, of the server the processor time beyond that of a round whose
server is trusted, and the time of both rounds. All nodes take part, and none trains.

`training` are runs of `fedpriv simulate digits`, 287 users at 10 nodes: mean accuracy on held-out
rows and its standard deviation over five seeds, for a trusted server and for secure sums that t
nodes and the server may attack, with up to d = 1 drop-out and one node in a hundred that drops out.
The file names the processor; a figure is written next to it. About ten minutes of two cores.
"""

import argparse
import json
import platform
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from fedpriv.experiment.bundled import experiment_file
from fedpriv.ledger.events import SecureSum
from fedpriv.report.charts import Axis, Chart, Series, save
from fedpriv.run.simulate import run_simulation
from simulations.secure_load import costs

FEDERATIONS = ((3, 1, 0, 10**6), (5, 1, 1, 1_200_000), (100, 10, 10, 10**6), (100, 33, 5, 10**6))
NODES, DROPOUTS, SEEDS, EPSILONS = 10, 1, 5, (0.5, 1.0, 2.0, 8.0)
COLLUDING = {"trusted server": None, "t = 0": 0, "t = n/10": 1, "t = n/3": 3}


def accuracy(epsilon: float, colluding: int | None, seed: int) -> float:
    """Accuracy on held-out rows of one run, in percent; with None the server is trusted."""
    settings = [f"privacy.epsilon={epsilon}", f"seed={seed}", "engine.processes=1"]
    if colluding is not None:
        section = {
            "trust": "none",
            "least_nodes": NODES,
            "colluding_nodes": colluding,
            "dropouts": DROPOUTS,
            "simulated_dropout": 0.01,
        }
        settings += [f"federation.{key}={value}" for key, value in section.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = run_simulation(experiment_file(Path("digits")), settings, out, resume=False)
    value = run.rounds[-1].accuracy
    assert value is not None
    return 100.0 * value


def training() -> list[dict[str, object]]:
    """Rows of accuracies."""
    runs = [*product(COLLUDING, EPSILONS, range(SEEDS))]
    of_runs = zip(*((epsilon, COLLUDING[name], seed) for name, epsilon, seed in runs), strict=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        values = dict(zip(runs, pool.map(accuracy, *of_runs), strict=True))
    rows: list[dict[str, object]] = []
    for name, epsilon in product(COLLUDING, EPSILONS):
        own = [values[name, epsilon, seed] for seed in range(SEEDS)]
        mean, spread = round(statistics.fmean(own), 2), round(statistics.stdev(own), 2)
        rows.append({"trust": name, "epsilon": epsilon, "accuracy": mean, "stddev": spread})
    return rows


def federation(nodes: int, colluding: int, dropouts: int, dimension: int) -> dict[str, object]:
    """What a round costs."""
    plain, masked = costs(SecureSum(nodes, colluding, dropouts), dimension)
    return {
        "n": nodes,
        "t": colluding,
        "d": dropouts,
        "dimension": dimension,
        "node_seconds": round(masked.node, 3),
        "node_seconds_trusting": round(plain.node, 3),
        "server_seconds_beyond": round(masked.server - plain.server, 3),
        "node_megabytes": round(masked.sent / 1e6, 3),
        "seconds": round(masked.seconds, 2),
        "seconds_trusting": round(plain.seconds, 2),
    }


def processor() -> str:
    """The name of the processor, where Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def chart(rows: list[dict[str, object]]) -> Chart:
    """Accuracy by ε."""
    series = []
    for name in COLLUDING:
        own = [row for row in rows if row["trust"] == name]
        mean, spread = ([float(str(row[key])) for row in own] for key in ("accuracy", "stddev"))
        ends = zip(mean, spread, strict=True)
        low, high = zip(*((m - s, m + s) for m, s in ends), strict=True)
        series.append(Series(name, EPSILONS, mean, low, high))
    caption = (
        f"DIGITS, 287 users at {NODES} nodes, up to {DROPOUTS} of which may drop out: mean and "
        f"standard deviation over {SEEDS} seeds. Without a trusted server, honest nodes add all of "
        "the noise, and those that collude add theirs too."
    )
    x, y = Axis("ε", log=True), Axis("Accuracy on held-out rows", "%")
    return Chart("secure_sums", "What trust in the server is worth", caption, x, y, series)


def main() -> None:
    """Run all, and write the file and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    federations = [federation(*numbers) for numbers in FEDERATIONS]
    rows = training()
    result = {"processor": processor(), "federation": federations, "training": rows}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    save(chart(rows), path.parent, ["png"])


if __name__ == "__main__":
    main()
