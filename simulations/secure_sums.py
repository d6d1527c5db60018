"""What does it cost that the server need not be trusted? Accuracy, processor time and bytes.

    python -m simulations.secure_sums simulations/results/secure_sums.json

`training` are runs on DIGITS, 287 users at 10 nodes, 100 rounds, as `fedpriv simulate digits`: mean
accuracy on held-out rows and its standard deviation over two seeds, for a trusted server and for
secure sums that t nodes and the server may attack, with up to d = 1 drop-out and one node in a
hundred that drops out. `protocol` are the steps of one round without training: processor time of a
node, and of the server besides the plain sum, and the bytes that a node sends. The file names the
processor; a figure is written next to it. About four minutes of one core.
"""

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import TypeVar

import numpy as np

from fedpriv.experiment.bundled import experiment_file
from fedpriv.ledger.events import SecureSum
from fedpriv.report.charts import Axis, Chart, Series, save
from fedpriv.run.simulate import run_simulation
from fedpriv.secure_sums.protocol import KeyPair, Member, Participant, Roster, unmasked

NODES, DROPOUTS, SEEDS = 10, 1, 2
EPSILONS = (1.0, 2.0)
COLLUDING = {"trusted server": None, "t = 0": 0, "t = n/10": 1, "t = n/3": 3}
ROUNDS = ((3, 1, 0, 10**6), (5, 1, 1, 1_200_000), (100, 10, 10, 10**6), (100, 33, 5, 10**6))
Result = TypeVar("Result")


def accuracy(epsilon: float, colluding: int | None, seed: int) -> float:
    """Accuracy on held-out rows of one run."""
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
        run = run_simulation(
            experiment_file(Path("digits")), settings, Path(folder) / "run", resume=False
        )
        value = run.rounds[-1].accuracy
    assert value is not None
    return value


def training() -> list[dict[str, object]]:
    """Rows of accuracies."""
    rows: list[dict[str, object]] = []
    for name, colluding in COLLUDING.items():
        for epsilon in EPSILONS:
            values = [100.0 * accuracy(epsilon, colluding, seed) for seed in range(SEEDS)]
            mean, spread = statistics.fmean(values), statistics.stdev(values)
            rows.append({"trust": name, "epsilon": epsilon, "accuracy": mean, "stddev": spread})
    return rows


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and how long it took, in seconds of this process."""
    began = process_time()
    result = work()
    return result, process_time() - began


def protocol(nodes: int, colluding: int, dropouts: int, dimension: int) -> dict[str, object]:
    """The cost of one round in which as many nodes as may drop out do so before the upload."""
    secure = SecureSum(nodes, colluding, dropouts)
    pairs = {f"node-{number:03d}": KeyPair.fresh() for number in range(nodes)}
    members = tuple(Member(name, pair.public) for name, pair in pairs.items())
    roster, at_nodes, sent = Roster(bytes(32), members), 0.0, 0
    begun = {}
    for name, pair in pairs.items():
        begun[name], seconds = timed(partial(Participant.begin, roster, name, pair, secure))
        at_nodes += seconds
        sent += sum(map(len, begun[name].sealed.values()))
    sharers, survivors = list(pairs), list(pairs)[: nodes - dropouts]
    total, own = np.zeros(dimension, np.uint64), np.zeros(dimension, np.int64)
    uploaded = {}
    for name in survivors:
        inbox = {n: one.sealed[name] for n, one in begun.items() if name in one.sealed}
        work = partial(begun[name].masked, own, sharers, inbox)
        (masked, uploaded[name]), seconds = timed(work)
        at_nodes += seconds
        sent += masked.nbytes
        total += masked
    signatures = dict.fromkeys(survivors, b"s" * 72)
    opened = {}
    for name in survivors:
        opened[name] = uploaded[name].opened(survivors, signatures, lambda *_: True)
        sent += sum(map(len, opened[name].values()))
    summed, at_server = timed(lambda: unmasked(total, roster, secure, sharers, survivors, opened))
    assert not summed.any()
    return {
        "n": nodes,
        "t": colluding,
        "d": dropouts,
        "dimension": dimension,
        "node_seconds": round(at_nodes / nodes, 3),
        "server_seconds": round(at_server, 3),
        "node_megabytes": round(sent / nodes / 1e6, 3),
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
        series.append(Series(name, EPSILONS, mean, low, high, bars=True))
    caption = (
        f"DIGITS, 287 users at {NODES} nodes, of which up to {DROPOUTS} may drop out: mean and "
        f"standard deviation over {SEEDS} seeds. Without a trusted server, honest nodes add all of "
        "the noise, and those that collude add theirs too."
    )
    x, y = Axis("ε", log=True), Axis("Accuracy on held-out rows", "%")
    return Chart("secure_sums", "What trust in the server is worth", caption, x, y, series)


def main() -> None:
    """Run all, and write the file and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    rows = training()
    result = {
        "processor": processor(),
        "training": rows,
        "protocol": [protocol(*numbers) for numbers in ROUNDS],
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    save(chart(rows), path.parent, ["png"])


if __name__ == "__main__":
    main()
