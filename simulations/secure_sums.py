"""The cost of secure sums, in accuracy, processor time and bytes.

    python -m simulations.secure_sums simulations/results/secure_sums.json

`federation` measures rounds of real processes on loopback (see `secure_load`): for a node, the
processor time and the bytes that it sends; for the server, the processor time beyond a round whose
server is trusted; and the time of both rounds. All nodes take part, and none trains.

`training` is softmax regression on DIGITS as in `fedpriv simulate digits`, with 287 users at 10 or
100 nodes: mean accuracy on held-out rows and its standard deviation over five seeds, for a trusted
server and for secure sums that t nodes and the server may attack. Cohorts, clipping, noise and grid
are those of the library. Masks, which cancel to the bit, are left out, and no node drops out, so
that all add noise. The file names the processor; two figures are written next to it.
"""

import argparse
import json
import platform
import statistics
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.calibration import calibrate_noise_multiplier
from fedpriv.data.population import load_population
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, rounded_noise
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.report.charts import Axis, Chart, Series, save
from fedpriv.secure_sums.parameters import Grid, share_stddevs
from simulations.secure_load import costs

FEDERATIONS = ((3, 1, 0, 10**6), (5, 1, 1, 1_200_000), (100, 10, 10, 10**6), (100, 33, 5, 10**6))
USERS, Q, ROUNDS, NORM, RATE, DELTA = 287, 0.3, 100, 0.5, 0.5, 1e-3  # as the bundled experiment
SEEDS, EPSILONS = 5, (0.5, 1.0, 2.0, 8.0)
SHARES = {"t = 0": 0.0, "t = n/10": 0.1, "t = n/3": 1 / 3}
DROPOUTS = {10: 1, 100: 5}  # by the number of nodes
LAYOUT = Layout(("weight", "bias"), ((64, 10), (10,)))
CLIPPING = Clipping(LAYOUT, flat(LAYOUT, NORM))
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Digits:
    """Users' rows, with a column of ones for the bias, and their classes as unit vectors."""

    x: Matrix  # [rows, 65]
    y: Matrix  # [rows, 10]
    user: npt.NDArray[np.int64]  # of each row
    test_x: Matrix
    test_y: npt.NDArray[np.int64]

    @classmethod
    @cache
    def load(cls) -> "Digits":
        """Load DIGITS, divided among its users."""
        population = load_population("digits", {"users": USERS})
        users, test = population.users, population.test
        owners = np.repeat(np.arange(USERS), np.diff(users.offsets))
        unit = np.eye(10)[users.fields["y"]]
        of_test = _with_ones(test["x"]), test["y"].astype(np.int64)
        return cls(_with_ones(users.fields["x"]), unit, owners, *of_test)

    def updates(self, model: Matrix, cohort: npt.NDArray[np.int64]) -> Matrix:
        """Return one local step of each user of a cohort on all its rows: [C, 650]."""
        rows = np.isin(self.user, cohort)
        x, y, place = self.x[rows], self.y[rows], np.searchsorted(cohort, self.user[rows])
        errors = _softmax(x @ model) - y
        gradients = np.zeros((len(cohort), *model.shape))
        np.add.at(gradients, place, x[:, :, None] * errors[:, None, :])
        counts = np.bincount(place, minlength=len(cohort))
        updates: Matrix = (-RATE * gradients / counts[:, None, None]).reshape(len(cohort), -1)
        return updates

    def accuracy(self, model: Matrix) -> float:
        """Return the accuracy on held-out rows, in percent."""
        return 100.0 * float(np.mean(np.argmax(self.test_x @ model, axis=1) == self.test_y))


def _with_ones(images: npt.NDArray[np.generic]) -> Matrix:
    return np.hstack([images.reshape(-1, 64).astype(np.float64), np.ones((len(images), 1))])


def _softmax(scores: Matrix) -> Matrix:
    grown: Matrix = np.exp(scores - scores.max(axis=1, keepdims=True))
    sums: Matrix = grown.sum(axis=1, keepdims=True)
    return grown / sums


def accuracy(epsilon: float, secure: SecureSum | None, seed: int) -> float:
    """Return the accuracy after one run; without a secure sum the server is trusted."""
    z = calibrate_noise_multiplier(epsilon, DELTA, ROUNDS, Q)
    sampling, digits, model = PoissonSampling(USERS, Q), Digits.load(), np.zeros((65, 10))
    mechanism = GaussianMechanism.calibrated(sampling, CLIPPING, z, (1.0,), secure_sum=secure)
    for number in range(ROUNDS):
        entropy = SeededEntropy(seed * ROUNDS + number)
        cohort = sampling.draw(entropy.key("cohort"))[0]
        rows = digits.updates(model, cohort)
        CLIPPING.clip_rows(rows, np.ones(len(rows), np.int64))
        model += released(mechanism, rows.astype(np.int64), cohort, entropy).reshape(65, 10)
    return digits.accuracy(model)


def released(
    mechanism: GaussianMechanism,
    contributions: npt.NDArray[np.int64],
    cohort: npt.NDArray[np.int64],
    entropy: SeededEntropy,
) -> Matrix:
    """Return the average of one round; with a secure sum, of the rounded sums of nodes."""
    if (secure := mechanism.secure_sum) is None:
        total = contributions.sum(axis=0)
        return mechanism.query.noised_average(total, entropy, "noise")[0]
    n, grid = secure.nodes, Grid.of(mechanism.event, secure.nodes)
    stddevs, host = share_stddevs(mechanism.event, n), cohort * n // USERS
    rounded = np.zeros(LAYOUT.dimension, grid.dtype)
    for node in range(n):
        key = entropy.key(f"node {node}")  # of the only group
        noise = rounded_noise({"update": key}.__getitem__, CLIPPING, stddevs)
        rounded += grid.rounded(contributions[host == node].sum(axis=0) + noise, CLIPPING)
    return mechanism.query.averaged(grid.steps(rounded, CLIPPING))


def training() -> list[dict[str, object]]:
    """Return the rows of accuracies."""
    settings: list[tuple[int, str, SecureSum | None]] = [(0, "trusted server", None)]
    for (nodes, d), (name, share) in product(DROPOUTS.items(), SHARES.items()):
        settings.append((nodes, name, SecureSum(nodes, int(nodes * share), d)))
    rows: list[dict[str, object]] = []
    for (nodes, name, secure), epsilon in product(settings, EPSILONS):
        values = [accuracy(epsilon, secure, seed) for seed in range(SEEDS)]
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        about = {"nodes": nodes, "trust": name, "epsilon": epsilon}
        rows.append(about | {"accuracy": round(mean, 2), "stddev": round(deviation, 2)})
    return rows


def federation(nodes: int, colluding: int, dropouts: int, dimension: int) -> dict[str, object]:
    """Return the cost of a round."""
    trusted, masked = costs(SecureSum(nodes, colluding, dropouts), dimension)
    return {
        "n": nodes,
        "t": colluding,
        "d": dropouts,
        "dimension": dimension,
        "node_seconds": round(masked.node, 3),
        "node_seconds_trusting": round(trusted.node, 3),
        "server_seconds_beyond": round(masked.server - trusted.server, 3),
        "node_megabytes": round(masked.sent / 1e6, 3),
        "seconds": round(masked.seconds, 2),
        "seconds_trusting": round(trusted.seconds, 2),
    }


def processor() -> str:
    """Return the name of the processor; without Linux, of its architecture."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def chart(rows: list[dict[str, object]], nodes: int) -> Chart:
    """Return a chart of accuracy against ε."""
    series = []
    for name in ("trusted server", *SHARES):
        own_rows = [row for row in rows if row["trust"] == name and row["nodes"] in (0, nodes)]
        mean, deviation = (
            [float(str(row[key])) for row in own_rows] for key in ("accuracy", "stddev")
        )
        ends = zip(mean, deviation, strict=True)
        low, high = zip(*((m - s, m + s) for m, s in ends), strict=True)
        series.append(Series(name, EPSILONS, mean, low, high))
    caption = (
        f"DIGITS, 287 users at {nodes} nodes, up to {DROPOUTS[nodes]} of which may drop out: mean "
        f"and standard deviation over {SEEDS} seeds. Without a trusted server, honest nodes add "
        "all of the noise, and those that collude add theirs too."
    )
    x, y = Axis("ε", log=True), Axis("Accuracy on held-out rows", "%")
    name = "secure_sums" if nodes == min(DROPOUTS) else f"secure_sums_{nodes}"
    return Chart(name, f"What trust in the server is worth, {nodes} nodes", caption, x, y, series)


def main() -> None:
    """Run everything, and write the file and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    federations = [federation(*numbers) for numbers in FEDERATIONS]
    rows = training()
    result = {"processor": processor(), "federation": federations, "training": rows}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for nodes in DROPOUTS:
        save(chart(rows, nodes), path.parent, ["png"])


if __name__ == "__main__":
    main()
